"""Turns CSV into a dataset by flags only, which name the columns and give the schema.

It is `dlrm.preproc.prepare_tables` with flags; `dlrm.scripts.prepare` takes
a schema and any table. `dlrm.preproc.transcode_spec` is for NVIDIA's specifications of CSV.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm.data.tables.files import find_tables
from dlrm.preproc.csv_config import CsvConfig
from dlrm.preproc.preset import prepare_preset
from dlrm.preproc.tables.options import TableOptions


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
