"""Turns CSV into a dataset by flags only, which name the columns and give the schema.

It is `dlrm.preproc.prepare_tables` with the flags of earlier versions; `dlrm.scripts.prepare` takes
a schema and any table. `dlrm.preproc.transcode_spec` is for NVIDIA's specifications of CSV.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.transform.numeric_transforms import NUMERIC_TRANSFORMS, described
from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.preproc.preset import prepare_preset
from dlrm.preproc.stages.options import SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.settings import check_settings, setting


@dataclass(frozen=True)
class CsvConfig:
    """A CSV file, or a directory of them, and the roles of columns; fields are flag names.

    Attributes:
        input: a file, or a directory whose CSV files are read in order of their names.
        output: the dataset's directory; it must not exist, or be empty.
        label: column of the label.

    Raises:
        ValueError: a value is impossible; the message names the flag.
    """

    input: str
    output: str
    label: str
    numerical: tuple[str, ...] = setting((), "columns of numbers")
    categorical: tuple[str, ...] = setting(
        (), "columns of any other values, with one embedding table each"
    )
    positive: str | None = setting(
        None, "value of the label that counts as 1; default: labels are 0 or 1"
    )
    header: bool | None = setting(
        None,
        "files begin with a line of column names; default: yes unless --columns is given",
    )
    columns: tuple[str, ...] = setting(
        (), "names of all columns of the file; default: those of its header"
    )
    delimiter: str = setting(",", "separator of cells")
    missing_values: tuple[str, ...] = setting(
        ("?",), "cells that stand for a missing value, besides empty ones"
    )
    numeric_transform: str = setting(
        "standardise", described(NUMERIC_TRANSFORMS), choices=NUMERIC_TRANSFORMS
    )
    frequency_limit: int = setting(
        1, "values that occur in fewer training rows share id 0", least=1
    )
    test_fraction: float = setting(0.2, "share of the rows to choose at random for testing")
    seed: int = setting(
        12345, "seed of the choice of test rows and of the order of the other rows", least=0
    )
    chunk_size: int = setting(65536, "number of rows parsed at a time", least=1)
    feature_spec_out: str = setting(layout.FEATURE_SPEC, "name of the specification to write")

    def __post_init__(self) -> None:
        if not self.numerical and not self.categorical:
            raise ValueError("--numerical, --categorical: expected one column at least, got none")
        used = [self.label, *self.numerical, *self.categorical]
        if repeated := sorted({name for name in used if used.count(name) > 1}):
            raise ValueError(
                f"--label, --numerical, --categorical: columns named twice: {', '.join(repeated)}"
            )
        check_settings(self)
        self.options()  # checks the others

    def options(self, **others: Any) -> TableOptions:
        """Returns these options as options of the pipeline, with other ones."""
        schema = Schema(
            Label(self.label, self.positive, any_negative=self.positive is not None),
            tuple(NumericalField(name, self.numeric_transform) for name in self.numerical),
            tuple(
                CategoricalField(name, frequency_limit=self.frequency_limit)
                for name in self.categorical
            ),
            self.missing_values,
        )
        return TableOptions(
            schema,
            SplitConfig(test_fraction=self.test_fraction, seed=self.seed),
            TextFormat(self.columns, self.header, self.delimiter, chunk_rows=self.chunk_size),
            feature_spec_out=self.feature_spec_out,
            **others,
        )


@dataclass
class Report:
    """The results of a transcoding.

    Attributes:
        rows: samples of each split.
        positives: samples with label 1 of each split.
        cardinalities: categorical feature -> rows of its table.
        clamped: values whose logarithm's argument was clamped to 1.
        negatives: value of the label other than `positive` -> samples, the most frequent first.
    """

    rows: dict[str, int] = field(default_factory=dict)
    positives: dict[str, int] = field(default_factory=dict)
    cardinalities: dict[str, int] = field(default_factory=dict)
    clamped: int = 0
    negatives: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_result(cls, options: TableOptions, result: dict[str, Any]) -> "Report":
        """Returns the report on what `prepare_tables` returns."""
        totals, names = result["totals"], options.schema.categorical_names
        positives = options.schema.label.positives
        return cls(
            {name: total.get("rows", 0) for name, total in totals.items()},
            {name: total.get("clicks", 0) for name, total in totals.items()},
            dict(zip(names, result["cardinalities"], strict=True)),
            sum(total.get("clamped", 0) for total in totals.values()),
            {text: n for text, n in result["labels"].items() if text not in positives},
        )


def transcode_csv(
    config: CsvConfig, cores: int | None = None, restart: bool = False, **options: Any
) -> Report:
    """Writes a split-binary dataset from CSV files, or nothing.

    Args:
        config: the files and columns.
        cores, restart: see `prepare_preset`.
        options: further fields of `TableOptions`.

    Raises:
        FileNotFoundError, FileExistsError: there is no input, or the output exists.
        ValueError: the input is bad; the message has file, line, column and value.
    """
    files, made = find_tables([config.input]), config.options(**options)
    if not files[0].kind.delimited:
        raise ValueError(f"{files[0].path}: expected CSV, got {files[0].kind}")
    output = Path(config.output)
    return Report.from_result(
        made, prepare_preset(made, {"train": files}, output, cores, restart=restart)
    )
