"""Turns Parquet files with transformed values into a dataset.

    dlrm convert-to-binary --source PARQUET --output DATASET

PARQUET is a directory with train/, test/ and optionally validation/, as Spark writes them, or a
file or directory whose last rows, the share --held_out, become test/ and validation/, half each.
Row k of the dataset is row k of the Parquet, with files in the order of their names.

The first column is the label. Floating-point columns are numbers, which are copied, and integer
columns are ids. Table sizes are those of model_size.json beside the directories, if it exists,
otherwise the greatest id plus one. `dlrm prepare` does the same by a schema.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data.clicks import names
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.stages.options import OUTPUT_FORMATS, PreparationOptions, RunConfig, SplitConfig
from dlrm.settings import REQUIRED, setting

if TYPE_CHECKING:
    from dlrm.data.tables.kinds.kind import TableFile
    from dlrm.data.transform.schema import Schema


def convert(
    source: Path,
    output: Path,
    output_format: str = OUTPUT_FORMATS[0],
    held_out: float = 0.1,
    cores: int | None = None,
    restart: bool = False,
    **options: Any,
) -> dict[str, int]:
    """Writes a dataset; returns the rows of each split.

    Args:
        source, output, output_format, held_out, cores, restart: as the flags.
        options: further fields of `TableOptions`.

    Raises:
        FileNotFoundError: there is no Parquet.
        ValueError: a file is not Parquet or has other columns, or a value is out of range.
        FileExistsError: `output` exists and may not be replaced.
    """
    from dlrm.preproc.preset import prepare_preset
    from dlrm.preproc.tables.options import TableOptions

    if not 0 < held_out < 1:
        raise ValueError(f"--held_out {held_out}: expected a number in (0, 1)")
    by_files = (source / "train").is_dir()
    tables = _splits(source) if by_files else {"train": _files(source)}
    made = TableOptions(
        _schema(source, tables["train"][0].path),
        SplitConfig() if by_files else SplitConfig(held_out=held_out),
        output_ordering="input",
        output_format=output_format,
        default_names=True,
        **options,
    )
    result = prepare_preset(made, tables, output, cores, replace=True, restart=restart)
    return {name: total.get("rows", 0) for name, total in result["totals"].items()}


def _splits(source: Path) -> "dict[str, list[TableFile]]":
    """Returns the files of each split."""
    splits = [name for name in names.SPLITS if (source / name).is_dir()]
    if "test" not in splits:
        raise FileNotFoundError(f"{source / 'test'}: missing, though there is a train/")
    return {name: _files(source / name) for name in splits}


def _files(source: Path) -> "list[TableFile]":
    from dlrm.data.tables.files import PARQUET
    from dlrm.data.tables.kinds.kind import TableFile

    if source.is_file():
        return [TableFile(source, PARQUET)]
    files = sorted(path for path in source.rglob("*.parquet") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source}: no Parquet file, nor a folder with some")
    return [TableFile(path, PARQUET) for path in files]


def _schema(source: Path, first: Path) -> "Schema":
    """Returns the schema of the columns of the first file."""
    import pyarrow.types as types

    from dlrm.data.clicks.layout import read_model_size
    from dlrm.data.tables.files import PARQUET
    from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema

    label, *columns = PARQUET.open(first, first).schema
    numerical, categorical = [], []
    for column in columns:
        if types.is_floating(column.type):
            numerical.append(NumericalField(column.name, "none", required=True))
        elif types.is_integer(column.type):
            categorical.append(CategoricalField(column.name, "id"))
        else:
            raise ValueError(
                f"{first}: column {column.name}: expected floating-point or integer numbers, got "
                f"{column.type}: is it transformed already?"
            )
    if (source / names.MODEL_SIZE).is_file():
        sizes = read_model_size(source)
        if len(sizes) != len(categorical):
            raise ValueError(
                f"{source / names.MODEL_SIZE}: expected {len(categorical)} tables, as the Parquet "
                f"has integer columns, got {len(sizes)}"
            )
        pairs = zip(categorical, sizes, strict=True)
        categorical = [CategoricalField(f.column, "id", cardinality=n) for f, n in pairs]
    try:
        return Schema(Label(label.name), tuple(numerical), tuple(categorical))
    except ValueError as error:
        raise ValueError(f"{first}: {error}") from None


@dataclass(frozen=True)
class ConvertConfig:
    """The Parquet, and the place of the dataset; field names are those of the flags."""

    source: Path = setting(REQUIRED, "Parquet file, or directory of Parquet files", uri="read")
    output: Path = setting(REQUIRED, "directory to write the dataset to", uri="replace")
    held_out: float = setting(0.1, "share of the rows, the last ones, for test and validation")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [
            ("Dataset", ConvertConfig),
            ("Preparation", PreparationOptions),
            ("Preparation", RunConfig),
        ],
        without=("output_ordering", "split_bytes"),
    )
    hint = "the same command resumes the run"
    return run_command(line, _convert, __doc__, arguments, usage=2, hint=hint)


def _convert(values: Values) -> None:
    rows = convert(**values)
    shown = "  ".join(f"{name} {count:,}" for name, count in rows.items())
    print(f"{values['output']}: {shown} rows; complete")


if __name__ == "__main__":
    sys.exit(main())
