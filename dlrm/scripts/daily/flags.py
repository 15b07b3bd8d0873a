"""The flags of `dlrm.scripts.daily`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, check_settings, setting


@dataclass(frozen=True)
class DailyConfig:
    """The days, and how each is learned; field names are those of the flags."""

    days: Path = setting(
        REQUIRED,
        "directory with a file or a folder for each day, named so that the names sort in the order "
        "of time, such as 2026-11-20.csv, 2026-11-20T13.csv or day_3",
        uri="own",
    )
    schema: Path = setting(REQUIRED, "schema.yaml", uri="read")
    output: Path = setting(REQUIRED, "directory for the models, datasets and metrics of the days")
    train_flags: Path | None = setting(
        None,
        "file of flags of dlrm train for the first day, such as best.flags of dlrm tune; later "
        "days have its settings; default: --recipe auto",
        uri="read",
    )
    epochs: int = setting(1, "number of passes over the rows of a day after the first", least=1)
    keep: int = setting(3, "number of days whose datasets and models are kept", least=1)
    cores: int | None = setting(None, "number of cores; default: all of this machine", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
