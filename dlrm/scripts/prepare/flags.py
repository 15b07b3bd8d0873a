"""The flags of `dlrm.scripts.prepare`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.data.choices import CRITEO_TRANSFORMS, described
from dlrm.preproc.options import OUTPUT_FORMATS
from dlrm.preproc.spark.session import ENGINES
from dlrm.settings import REQUIRED, setting

CRITEO = "criteo"
INPUTS = ("input", "test_input", "validation_input")
DEFAULT_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class PrepareConfig:
    """The rows, their schema, and the dataset; field names are those of the flags."""

    schema: str = setting(
        REQUIRED, "schema.yaml, or criteo for logs in Criteo's format", uri="read"
    )
    output: Path = setting(REQUIRED, "directory to write the dataset to", uri="write")
    input: tuple[str, ...] = setting((), "files, or directories of files", uri="read")
    test_input: tuple[str, ...] = setting((), "files of test rows only", uri="read")
    validation_input: tuple[str, ...] = setting((), "files of validation rows only", uri="read")
    engine: str = setting(
        "local",
        "local: processes of this machine; spark: Spark. Both write the same bytes",
        choices=ENGINES,
    )
    overwrite: bool = setting(False, "replace an earlier dataset once the new one is complete")
    test_fraction: float | None = setting(
        None,
        f"share of the rows to choose at random as test rows; default: {DEFAULT_TEST_FRACTION} "
        "if no other flag splits the rows",
        topic="Division of rows",
    )


@dataclass(frozen=True)
class CriteoConfig:
    """Logs in Criteo's format, whose tables' schema has the like; fields are those of the flags."""

    num_days: int | None = setting(
        None, "number of day files, or of days into which train.txt is cut"
    )
    num_numerical: int | None = setting(None, "number of integer columns; default: 13")
    num_categorical: int | None = setting(None, "number of hexadecimal columns; default: 26")
    frequency_limit: str | None = setting(
        None,
        "number of rows that a value must occur in to get an id: N, or COLUMN:N, comma-separated; "
        "default: 15",
    )
    dictionary_days: str | None = setting(None, "days to fit on, as A-B; default: all")
    numeric_transform: str | None = setting(
        None, f"{described(CRITEO_TRANSFORMS)}; default: readme", choices=CRITEO_TRANSFORMS
    )
    hold_out: bool | None = setting(
        None,
        "hold out the last day, half for testing and half for validation (default)",
    )
    output_format: str | None = setting(
        None,
        "split_binary (default), one file per feature; binary, NVIDIA's rows of 4-byte words",
        choices=OUTPUT_FORMATS,
    )
