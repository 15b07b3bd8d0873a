"""The flags of `dlrm.scripts.daily`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.data.clicks.config import DataConfig
from dlrm.preproc.stages.options import IncrementConfig
from dlrm.scripts.prepare.flags import PrepareConfig
from dlrm.settings import REQUIRED, check_settings, same_setting, setting
from dlrm.tasks.config import ClickCheckpointConfig

CONTINUED, FROZEN, RETRAINED = "continued", "frozen", "retrained"


@dataclass(frozen=True)
class DailyConfig:
    """The days, and what is done with each; field names are those of the flags."""

    days: Path = setting(
        REQUIRED,
        "directory with a file or a folder for each day, named so that the names sort in the order "
        "of time, such as 2026-11-20.csv, 2026-11-20T13.csv or day_3",
        uri="own",
    )
    schema: str = same_setting(PrepareConfig, "schema")
    output: Path = setting(REQUIRED, "directory of the chain: its record, datasets, checkpoints")
    train_flags: Path | None = setting(
        None,
        "file of flags of dlrm train, such as best.flags of dlrm tune; default: --recipe auto",
        uri="read",
    )
    compare: tuple[str, ...] = setting(
        (FROZEN,),
        "models to judge beside the continued one: that of the first day, and one trained anew on "
        "all days before, which takes longer each day",
        choices=(FROZEN, RETRAINED),
    )
    skip: tuple[str, ...] = setting((), "names of days to leave out")
    accept: tuple[str, ...] = setting(
        (), "names of days to learn although they have far fewer rows than the day before"
    )
    undo: str | None = setting(
        None,
        "name of the last day: remove it from the chain, and learn nothing. It is learned again by "
        "the next command if it is still in --days",
    )
    until: str | None = setting(None, "name of the last day to learn; default: all that are there")
    epochs: int = setting(1, "number of passes over the rows of a day after the first", least=1)
    replay: float = same_setting(DataConfig, "replay")
    evict_unseen_days: int | None = same_setting(ClickCheckpointConfig, "evict_unseen_days")
    half_life: float | None = same_setting(IncrementConfig, "half_life")
    candidates: int = same_setting(IncrementConfig, "candidates")
    admission_probability: float = same_setting(IncrementConfig, "admission_probability")
    recalibrate: bool = setting(
        False,
        "fit a recalibration to each day before it is learned, for the scores of the next; "
        "default: that of the day before stays, if there is one",
    )
    keep: int = setting(
        3, "number of days whose datasets and checkpoints are kept, besides the first", least=1
    )
    least_rows: float = setting(
        0.01, "least rows of a day, as a share of those of the day before", least=0
    )
    cores: int | None = setting(
        None, "number of cores to use; default: all of this machine", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class AlarmConfig:
    """Bounds of a day; field names are those of the flags."""

    most_miscalibration: float = setting(
        0.2, "greatest distance of predicted over observed clicks from 1", least=0
    )
    least_auc: float | None = setting(None, "least AUC of a day; default: none")
    most_unknown: float = setting(
        0.5, "greatest share of values of a field that the model does not know", least=0, most=1
    )
    most_psi: float = setting(
        1.0,
        "greatest population stability index of a field against the day before; that of a field "
        "whose frequent values are replaced is high on ordinary days",
        least=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
