"""Settings of a training that follow from its rows: `recipe="auto"`, and defaults without it."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrm.command_line import flags_of
from dlrm.data.clicks.batch import ClickDataset
from dlrm.model.layers.choices import QUADRATIC
from dlrm.train.reports.console import Line
from dlrm.train.schedule import OF_NVIDIA

BATCH_SIZE = 4096  # for reading labels
_FEWEST_ROWS = 100
_FEW_ROWS = 60_000
_STEPS_OF_AN_EPOCH, _STEPS = 200, 1000  # at least, where batches of 32 to 32,768 samples allow it
_SAMPLES, _MOST_EPOCHS = 400_000, 10  # of a run, if the rarer class has a quarter of them or more
_TWO_EPOCHS = 1_000_000  # rows below which there are two; measured at 612,500, .0007 above one
# From this many table rows for each training row on, epochs are fewer: vectors of ids overfit.
_MANY_IDS, _MOST_EPOCHS_OF_IDS = 0.01, 4
# --embedding_l2 times rows. On 26,000 rows of UCI Adult, 100,000 of logs in Criteo's format and all
# 37 million of Criteo's (FuxiCTR, https://github.com/reczoo/BARS), the best value was about this.
_L2, _MOST_L2 = 350, 0.02
_MOST_LABELS = 1 << 20  # read for the share of clicks
# For few rows: of one model, and of packed members with few ids, which also read 1.5 times as many
# samples, since they overfit later; docs/guide/tuning.md has trials.
_FEW_LR, _PACKED_LR, _PACKED_SAMPLES = 0.004, 0.008, 1.5
_BIG_ROWS = 30_000_000  # or more: one epoch of NVIDIA's architecture without regularization
_NVIDIA_ROWS = 64_000 * 32_768  # one epoch reaches the decay of NVIDIA's schedule
_SET_ASIDE = 0.1  # share of the training rows, unless the dataset has others to choose on
_DEFAULT_DIM, _DEFAULT_SAMPLES, _DEFAULT_EPOCHS = 16, 100_000, 4  # without a recipe
_WIDTH = 96  # of the lines that list the settings
# The settings that short descriptions name, most important first.
_CHIEF = (
    *("batch_size", "epochs", "lr", "embedding_dim", "dropout", "embedding_l2", "wide"),
    *("numerical_embedding", "bottom_mlp_sizes", "top_mlp_sizes", "mlp_optimizer", "schedule"),
)
_WHOLE_TABLES = ("balanced", "nvidia")  # of `--placement`


class DatasetFacts(NamedTuple):
    """The facts about the training rows that a recipe depends on.

    Attributes:
        rows: number of rows.
        num_numerical: numerical fields.
        table_sizes: rows of the table of each categorical field.
        click_rate: share of the rows with label 1.
        field_tables: number of each field's table; None is a table of its own for each.
    """

    rows: int
    num_numerical: int
    table_sizes: tuple[int, ...]
    click_rate: float
    field_tables: tuple[int, ...] | None = None

    @classmethod
    def from_dataset(cls, train: ClickDataset) -> "DatasetFacts":
        """Returns the facts of a dataset's training rows, read in batches of `BATCH_SIZE`.

        Raises:
            ValueError: the rows are too few, or all labels are the same.
        """
        rows = train.num_samples
        if rows < _FEWEST_ROWS:
            raise ValueError(
                f"--recipe auto: expected {_FEWEST_ROWS} training rows or more, got {rows:,}"
            )
        rate = _click_rate(train)
        if rate in (0, 1):
            raise ValueError(
                "--recipe auto: expected training rows of both classes, got label "
                f"{rate:g} in all {rows:,}"
            )
        return cls(rows, train.num_numerical, tuple(train.table_sizes), rate, train.field_tables)

    def __str__(self) -> str:
        count = len({*(self.field_tables or ())})
        tables = f" in {count} table{'s' * (count > 1)}" if count else ""
        return (
            f"{self.rows:,} training rows, {100 * self.click_rate:.3g} % of them with label 1, "
            f"{self.num_numerical} numerical and {len(self.table_sizes)} categorical fields{tables}"
        )


def auto(facts: DatasetFacts, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the settings of a training by field name: the caller's and the recipe's.

    The recipe makes no choice that a given setting rules out. docs/guide/tuning.md has the rules
    and the measurements behind them.
    """
    given = dict(given or {})
    if facts.rows >= _NVIDIA_ROWS:
        return {"epochs": 1} | given
    chosen = _of_many_rows(given) if facts.rows >= _BIG_ROWS else _of_few_rows(facts, given)
    for name in _impossible(chosen, given):
        chosen.pop(name, None)
    return training_defaults(facts.rows, chosen | given)


def embedding_l2(rows: int) -> float:
    """Returns the recipe's `--embedding_l2` for a number of training rows, of one run or several.

    It is a prior of the weights, whose share of the gradient falls as rows grow.
    """
    return min(float(f"{_L2 / rows:.2g}"), _MOST_L2)


def describe(facts: DatasetFacts, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Line:
    """Returns the settings that the recipe chose, as flags for a shell; shortly, the chief ones."""
    chosen = {name: value for name, value in settings.items() if name not in given}
    flags = textwrap.wrap(" ".join(flags_of(chosen)), _WIDTH, break_on_hyphens=False)
    lines = " \\\n".join(f"  {line}" for line in flags)
    chief = flags_of({name: chosen[name] for name in _CHIEF if name in chosen})
    short = "; ".join(flag.removeprefix("--").replace("=", " ") for flag in chief)
    return Line(f"--recipe auto, of {facts}:\n{lines}", f"recipe: {short}")


def _of_many_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    dim = width_of(given, 128)
    return {
        "epochs": 1,
        "embedding_dim": dim,
        "bottom_mlp_sizes": (512, 256, dim),
        "top_mlp_sizes": (1024, 1024, 512, 256, 1),
        "lr": 0.001,
        "schedule": "linear",
        "warmup": 0.05,
    }


def _of_few_rows(facts: DatasetFacts, given: Mapping[str, Any]) -> dict[str, Any]:
    rows, rate = facts.rows, min(facts.click_rate, 1 - facts.click_rate)
    samples = max(_SAMPLES, 2 * rows if rows < _TWO_EPOCHS else 0) * min(4 * rate, 1)
    tables = facts.field_tables or range(len(facts.table_sizes))
    ids = sum(dict(zip(tables, facts.table_sizes, strict=True)).values())
    many_ids = ids >= _MANY_IDS * rows
    most_epochs = _MOST_EPOCHS_OF_IDS if many_ids else _MOST_EPOCHS
    epochs = given.get("epochs") or min(max(round(samples / rows), 1), most_epochs)
    most = min(rows / _STEPS_OF_AN_EPOCH, epochs * rows / _STEPS)
    chosen = {
        "batch_size": 1 << min(max(int(math.log2(most)), 5), 15),
        "epochs": epochs,
        "wide": True,
        "dropout": 0.3 if rows < _FEW_ROWS else 0.2,
        "embedding_l2": embedding_l2(rows),
        "schedule": "linear",
        "warmup": 0.05,
    }
    if rows < _FEW_ROWS:
        ensemble = given.get("ensemble", 1)
        packed = isinstance(ensemble, int) and ensemble > 1 and not many_ids
        chosen["lr"] = _PACKED_LR if packed else _FEW_LR
        if packed:
            chosen["epochs"] = min(max(round(_PACKED_SAMPLES * samples / rows), 1), most_epochs)
    if facts.num_numerical:
        bins = 64 if many_ids or rows >= _FEW_ROWS else 256
        chosen |= {"numerical_embedding": "piecewise", "numerical_bins": bins}
    if given.get("placement", "balanced") not in _WHOLE_TABLES:  # only those update all rows
        chosen["embedding_l2_mode"] = "looked_up"
    return chosen


def _impossible(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns the settings that cannot be combined with the given ones."""
    kind = given.get("numerical_embedding", chosen.get("numerical_embedding"))
    sgd = given.get("embedding_optimizer") == "sgd"
    shrinks = chosen.get("embedding_l2", 0) * given.get("lr", 0) if sgd else 0
    by_step = any(name in given for name in OF_NVIDIA)
    fixed = given.get("freeze_embeddings", False) or given.get("cuda_graphs", False)
    refused = {
        "embedding_l2": fixed or shrinks >= 1,
        "weight_decay": given.get("freeze_mlps", False),
        "dropout": (
            QUADRATIC not in given.get("interaction_op", "").split(",")
            and len(given.get("top_mlp_sizes", (1, 1))) == 1
        ),
        "numerical_bins": kind != "piecewise",
        "schedule": by_step,
        "warmup": by_step or given.get("schedule") == "nvidia" or "warmup_unit" in given,
    }
    names = [name for name, is_refused in refused.items() if is_refused]
    if "embedding_l2" in {*names, *given}:
        names += [] if given.get("embedding_l2") else ["embedding_l2_mode"]
    return names


def _click_rate(train: ClickDataset) -> float:
    """Returns the share of label 1 in batches spread over the rows, or more, until both occur."""
    step = max(len(train) * train.batch_size // _MOST_LABELS, 1)
    clicks = count = 0
    for first in range(step):
        for index in range(first, len(train), step):
            labels = train.batch(index).labels
            clicks, count = clicks + int(labels.sum()), count + len(labels)
        if 0 < clicks < count:
            break
    return clicks / count


def training_defaults(rows: int, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns settings of a training by field name: the caller's, and defaults for the rest.

    The batch size, between 32 and 32,768 samples, gives an epoch 600 to 1200 steps where possible.
    Fewer than 50,000 rows are read for up to four epochs: on UCI Adult (26,000 rows) four epochs
    instead of one raise the AUC from 0.903 to 0.906, the mean of three splits. Unless the caller
    chose another schedule, the learning rate warms up for a twentieth of the run and falls linearly
    to 0 over its second half.
    """
    chosen = dict(given or {})
    batch_size = chosen.get("batch_size")
    if batch_size is None:
        batch_size = 32
        while batch_size < 32768 and rows > 600 * 2 * batch_size:
            batch_size *= 2
    epochs = chosen.get("epochs") or min(max(_DEFAULT_SAMPLES // max(rows, 1), 1), _DEFAULT_EPOCHS)
    steps = epochs * -(-rows // batch_size)
    steps = max(min(steps, chosen.get("max_steps") or steps), 1)
    start = max(steps // 2, chosen.get("warmup_steps", 0))
    by_steps = {
        "warmup_steps": steps // 20,
        "decay_start_step": start,
        "decay_steps": max(steps - start, 0) if steps > 1 else 0,  # a decay ends at 0
        "decay_power": 1,
    }
    dim = width_of(chosen, _DEFAULT_DIM)
    return {
        "batch_size": batch_size,
        "test_batch_size": 16384,
        "epochs": epochs,
        "embedding_dim": dim,
        "bottom_mlp_sizes": (128, 64, dim),
        "top_mlp_sizes": (256, 128, 1),
        "embedding_init_scale": 0.1,
        "embedding_optimizer": "adam",
        "mlp_optimizer": "adam",
        "lr": 0.002,
        **(by_steps if chosen.get("schedule", "nvidia") == "nvidia" else {}),
        "test_freq": -(-steps // 4),
        "print_freq": max(steps // 20, 1),
    } | chosen


def width_of(given: Mapping[str, Any], usual: int) -> int:
    """Returns the width of embeddings that settings give, or the usual one."""
    return given.get("embedding_dim") or (given.get("bottom_mlp_sizes") or (usual,))[-1]


def set_aside_default(rows: Mapping[str, int]) -> dict[str, float]:
    """Returns the share of the training rows to set aside, as a setting; nothing where none is.

    The best weights are chosen on rows that do not train. With test and validation rows, test
    chooses and validation reports. With one of these only, choosing on it would leave no rows to
    report, so the choice is made on training rows.
    """
    if (rows.get("test") and rows.get("validation")) or rows["train"] < 2:
        return {}
    return {"set_aside": max(_SET_ASIDE, 1 / rows["train"])}  # one row at least
