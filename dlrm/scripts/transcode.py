"""Turns CSV files into a split-binary dataset that `dlrm.scripts.main` trains on.

Any CSV with a header; dictionaries and means are fitted to its columns:

    python -m dlrm.scripts.transcode --input logs.csv --output dataset --label clicked \\
        --numerical age,price --categorical user,item,country

or as in NVIDIA's program: `--input` is a directory with CSV files without headers and the feature
specification `--feature_spec_in` (chunk type csv, integer ids, cardinality "auto" or declared).
"""

from dataclasses import fields
from typing import Any

from absl import flags

from dlrm.data.clicks.layout import FEATURE_SPEC, one_class_note
from dlrm.data.transform.numeric_transforms import NUMERIC_TRANSFORMS, described
from dlrm.preproc.transcode import CsvConfig, Report, transcode_csv
from dlrm.preproc.transcode_spec import transcode_spec
from dlrm.scripts.common import table_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.table_flags import define_preparation_flags, table_options

FLAGS = flags.FLAGS
_MOST_NEGATIVES = 10  # values in the summary

_CSV_FLAGS = (  # without effect with a feature specification
    *("positive", "numerical", "categorical", "header", "columns", "delimiter", "missing_values"),
    *("numeric_transform", "frequency_limit", "test_fraction", "seed"),
)


def define_flags() -> None:
    flags.DEFINE_string("input", None, "CSV file, or directory of CSV files", required=True)
    flags.DEFINE_string("output", "/data", "directory to write the dataset to, new or empty")
    flags.DEFINE_string(
        "feature_spec_in", FEATURE_SPEC, "file in --input that describes it; not used with --label"
    )
    flags.DEFINE_string("feature_spec_out", FEATURE_SPEC, "name of the specification to write")
    flags.DEFINE_boolean(
        "allow_links",
        False,
        "allow files of --feature_spec_in to be symbolic links to files outside its directory",
    )
    flags.DEFINE_integer("chunk_size", 65536, "number of rows parsed at a time", lower_bound=1)
    flags.DEFINE_string(
        "label",
        None,
        "column of the label; if given, flags name the columns instead of --feature_spec_in",
    )
    flags.DEFINE_string(
        "positive", None, "value of the label that counts as 1; default: labels are 0 or 1"
    )
    flags.DEFINE_list("numerical", [], "columns of numbers")
    flags.DEFINE_list(
        "categorical", [], "columns of any other values, with one embedding table each"
    )
    flags.DEFINE_boolean(
        "header",
        None,
        "files begin with a line of column names; default: yes unless --columns is given",
    )
    flags.DEFINE_list(
        "columns", [], "names of all columns of the file; default: those of its header"
    )
    flags.DEFINE_string("delimiter", ",", "separator of cells")
    flags.DEFINE_list(
        "missing_values", ["?"], "cells that stand for a missing value, besides empty ones"
    )
    flags.DEFINE_enum(
        "numeric_transform",
        CsvConfig.numeric_transform,
        NUMERIC_TRANSFORMS,
        described(NUMERIC_TRANSFORMS),
    )
    flags.DEFINE_integer(
        "frequency_limit", 1, "values that occur in fewer training rows share id 0", lower_bound=1
    )
    flags.DEFINE_float("test_fraction", 0.2, "share of the rows to choose at random for testing")
    flags.DEFINE_integer(
        "seed", 12345, "seed of the choice of test rows and of the order of the other rows"
    )
    define_preparation_flags()
    flags.adopt_module_key_flags(table_flags)


def main(argv: list[str]) -> None:
    no_arguments(argv)
    print(_summary(_transcode()))


def _transcode() -> Report:
    if FLAGS.label is None:
        if given := [name for name in _CSV_FLAGS if FLAGS[name].present]:
            raise ValueError(f"--{given[0]}: expected --label too, got none")
        return transcode_spec(
            FLAGS.input,
            FLAGS.output,
            FLAGS.feature_spec_in,
            FLAGS.feature_spec_out,
            FLAGS.chunk_size,
            FLAGS.allow_links,
            FLAGS.cores,
            FLAGS.restart,
            **table_options(),
        )
    if FLAGS["feature_spec_in"].present:
        raise ValueError("--feature_spec_in: expected no --label beside it, got both")
    values: dict[str, Any] = {field.name: FLAGS[field.name].value for field in fields(CsvConfig)}
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    config = CsvConfig(**values)
    return transcode_csv(config, FLAGS.cores, FLAGS.restart, **table_options())


def _summary(report: Report) -> str:
    lines = [f"dataset: {FLAGS.output}"]
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
    define_flags()
    run_command(main, hint="the same command resumes the run")
