"""Turns CSV files into a split-binary dataset that `dlrm train` trains on.

Any CSV with a header; dictionaries and means are fitted to its columns:

    dlrm transcode --input logs.csv --output dataset --label clicked \\
        --numerical age,price --categorical user,item,country

or as in NVIDIA's program: `--input` is a directory with CSV files without headers and the feature
specification `--feature_spec_in` (chunk type csv, integer ids, cardinality "auto" or declared).
`python -m dlrm.scripts.transcode` works alike.
"""

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.data.clicks.names import FEATURE_SPEC
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.csv_config import CsvConfig
from dlrm.preproc.stages.options import RunConfig
from dlrm.scripts.common.table_flags import NOT_OPTIONS, PREPARATION, preparation
from dlrm.settings import REQUIRED, setting, settings_of

if TYPE_CHECKING:
    from dlrm.preproc.transcode import Report

_MOST_NEGATIVES = 10  # values in the summary
_COMMAS = "dlrm schema --decimal , drafts a schema for such numbers, which dlrm prepare reads"
# Flags that have no effect with a feature specification.
_CSV_FLAGS = settings_of(CsvConfig).keys() - {"chunk_size", "feature_spec_out"}


@dataclass(frozen=True)
class TranscodeConfig:
    """The files, and the origin of their columns; field names are those of the flags."""

    input: str = setting(REQUIRED, "CSV file, or directory of CSV files", uri="read")
    output: str = setting("/data", "directory to write the dataset to, new or empty", uri="write")
    feature_spec_in: str = setting(
        FEATURE_SPEC, "file in --input that describes it; not used with --label"
    )
    allow_links: bool = setting(
        False,
        "allow files of --feature_spec_in to be symbolic links to files outside its directory",
    )
    label: str | None = setting(
        None,
        "column of the label; if given, flags name the columns instead of --feature_spec_in",
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    configs = [("Files", TranscodeConfig), ("Columns", CsvConfig), *PREPARATION]
    line = ConfigFlags(configs, without=NOT_OPTIONS)
    hint = "the same command resumes the run"
    return run_command(line, _run, __doc__, arguments, hint=hint)


def _run(values: Values) -> None:
    print(_summary(_transcode(values), values["output"]))


def _transcode(values: Values) -> "Report":
    from dlrm.preproc.transcode import transcode_csv
    from dlrm.preproc.transcode_spec import transcode_spec

    own, run = values.config(TranscodeConfig), values.config(RunConfig)
    if own.label is not None:
        if "feature_spec_in" in values.given:
            raise ValueError("--feature_spec_in: expected no --label beside it, got both")
        config = values.config(CsvConfig)
        try:
            return transcode_csv(config, run.num_cores, run.restart, **preparation(values))
        except ValueError as error:
            if re.search(r"expected a number, got '[+-]?[\d.]*\d,\d+'", str(error)):
                raise ValueError(f"{error}; {_COMMAS}") from error
            raise
    for name in settings_of(CsvConfig):
        if name in _CSV_FLAGS & values.given:
            raise ValueError(f"--{name}: expected --label too, got none")
    return transcode_spec(
        own.input,
        own.output,
        own.feature_spec_in,
        values["feature_spec_out"],
        values["chunk_size"],
        own.allow_links,
        run.num_cores,
        run.restart,
        **preparation(values),
    )


def _summary(report: "Report", output: str) -> str:
    from dlrm.data.clicks.layout import one_class_note

    lines = [f"dataset: {output}"]
    for split, rows in report.rows.items():
        share = f" ({report.positives[split] / rows:.1%})" if rows else ""
        lines.append(f"{split}: {rows} rows, {report.positives[split]} positive{share}")
        if note := one_class_note(split, rows, report.positives[split]):
            lines.append(note)
    if report.negatives:
        values = [f"{value!r} ({n} rows)" for value, n in report.negatives.items()]
        hidden = len(values) - _MOST_NEGATIVES
        more = f" and {hidden} values more" if hidden > 0 else ""
        lines.append(f"labels counted as 0: {', '.join(values[:_MOST_NEGATIVES])}{more}")
    lines += [f"table {name}: {size} rows" for name, size in report.cardinalities.items()]
    if report.clamped:
        lines.append(f"the argument of {report.clamped} logarithms was clamped to 1")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
