"""CSV to split-binary: how users bring data of their own.

`transcode_csv` takes the columns of any CSV: text becomes ids through a dictionary, numbers are
transformed, rows are shuffled and divided into train and test. What is fitted (dictionaries, means)
is fitted on the training rows, and kept in the dataset for serving. The input is parsed once, into
a temporary file a column, and the columns are then encoded one at a time.
`dlrm.preproc.transcode_spec` is for NVIDIA's specifications of CSV.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.sources.csv_cells import (
    MOST_LISTED,
    Parser,
    code_parser,
    label_parser,
    number_parser,
    positive_parser,
)
from dlrm.data.sources.csv_columns import Columns, CsvFormat
from dlrm.data.transform.csv_transform import (
    NUMERIC_TRANSFORMS,
    CsvTransform,
    first_overflow,
    overflow_text,
)
from dlrm.files import staged_directory

_MOST_NEGATIVES = 100  # labels other than the positive one that are kept with the transform
_ROUNDING = 8 * np.finfo(np.float64).eps  # spread of a constant column, relative to its values


@dataclass(frozen=True)
class CsvConfig:
    """A CSV file (or a directory of them) and what its columns mean; fields are flag names.

    Attributes:
        input: a file, or a directory whose `*.csv` and `*.csv.gz` are read in order of their names.
        output: the dataset's directory; it must not exist, or be empty.
        label: column of the label.
        numerical: columns of numbers, in the order of the model's inputs.
        categorical: columns of anything, a table each.
        positive: value of the label that counts as 1, any other being 0; without it labels must be
            0 or 1.
        header: whether the first line names the columns; None means unless `columns` does.
        columns: names of the columns; without header and names they are 0, 1, ...
        delimiter: one character.
        missing_values: cells that mean "missing", besides empty ones; "nan" and "inf" are refused
            in numerical columns unless they are among them.
        numeric_transform: "log" is ln(x + 2), where an argument under 1 is raised to 1 and missing
            counts as x = 0; "standardise" subtracts the mean and divides by the standard deviation
            of the training rows, missing being 0 afterwards; "none" keeps x, missing being 0.
        frequency_limit: values that fewer training rows have become id 0.
        test_fraction: part of the rows, chosen at random, that the test split gets.
        seed: of that choice and of the order of the training rows.
        chunk_size: rows parsed at a time.
        feature_spec_out: name of the specification that is written.

    Raises:
        ValueError: an impossible value; the flag is named.
    """

    input: str
    output: str
    label: str
    numerical: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    positive: str | None = None
    header: bool | None = None
    columns: tuple[str, ...] = ()
    delimiter: str = ","
    missing_values: tuple[str, ...] = ("?",)
    numeric_transform: str = "standardise"
    frequency_limit: int = 1
    test_fraction: float = 0.2
    seed: int = 12345
    chunk_size: int = 65536
    feature_spec_out: str = layout.FEATURE_SPEC

    def __post_init__(self) -> None:
        if not self.numerical and not self.categorical:
            raise ValueError("--numerical, --categorical: expected one column at least, got none")
        used = [self.label, *self.numerical, *self.categorical]
        if repeated := sorted({name for name in used if used.count(name) > 1}):
            raise ValueError(
                f"--label, --numerical, --categorical: columns named twice: {', '.join(repeated)}"
            )
        if self.numeric_transform not in NUMERIC_TRANSFORMS:
            raise ValueError(
                f"--numeric_transform: expected one of {', '.join(NUMERIC_TRANSFORMS)}, got "
                f"{self.numeric_transform!r}"
            )
        if not 0 <= self.test_fraction < 1:
            raise ValueError(
                f"--test_fraction: expected a number in [0, 1), got {self.test_fraction}"
            )
        if len(self.delimiter) != 1:
            raise ValueError(f"--delimiter: expected one character, got {self.delimiter!r}")
        layout.check_spec_name(self.feature_spec_out)
        for flag, least in (("frequency_limit", 1), ("seed", 0), ("chunk_size", 1)):
            if (value := getattr(self, flag)) < least:
                raise ValueError(f"--{flag}: expected {least} or more, got {value}")


@dataclass
class Report:
    """What a transcoding did.

    Attributes:
        rows: samples of each split.
        positives: samples with label 1 of each split.
        cardinalities: categorical feature -> rows of its table.
        unknown: split -> categorical feature -> samples with id 0: missing, rare or unseen.
        raised: numerical feature -> values whose logarithm's argument was raised to 1.
        negatives: value of the label other than `positive` -> samples, the most frequent first.
    """

    rows: dict[str, int] = field(default_factory=dict)
    positives: dict[str, int] = field(default_factory=dict)
    cardinalities: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, dict[str, int]] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    negatives: dict[str, int] = field(default_factory=dict)


def transcode_csv(config: CsvConfig) -> Report:
    """Writes a split-binary dataset from CSV files.

    Raises:
        FileNotFoundError, FileExistsError: no input, or something stands at the output.
        ValueError: bad input; the file, line, column and value are named.
    """
    files = _input_files(Path(config.input))
    with staged_directory(config.output) as staging:
        columns = Columns(staging / "columns")
        dictionaries, labels = _parse(config, files, columns)
        orders = _divide(columns.num_rows, config)
        train = orders["train"]

        codes_to_ids = {}
        negatives = {text: n for text, n in labels.most_common() if text != config.positive}
        label = (config.label, config.positive, _kept(negatives))
        transform = CsvTransform(config.numeric_transform, {}, {}, config.missing_values, *label)
        for name in config.numerical:
            try:
                transform.scales[name] = _fit_scale(
                    columns.load(name)[train], config.numeric_transform
                )
            except OverflowError as error:
                raise ValueError(f"{config.input}: column {name}: {error}") from None
        for name in config.categorical:
            codes_to_ids[name], transform.dictionaries[name] = _fit_ids(
                columns.load(name)[train], list(dictionaries[name]), config.frequency_limit
            )

        cardinalities = {name: len(d) + 1 for name, d in transform.dictionaries.items()}
        report = Report(cardinalities=cardinalities, negatives=negatives)
        spec = FeatureSpec.named(
            staging / config.feature_spec_out, config.label, config.numerical, cardinalities, orders
        )
        for split, order in orders.items():
            ids = {name: codes_to_ids[name][columns.load(name)[order]] for name in cardinalities}
            report.unknown[split] = {name: int((ids[name] == 0).sum()) for name in ids}
            write_split(spec, split, order, columns, ids, transform, report)
        transform.save(staging)
        options = {
            "numeric_transform": config.numeric_transform,
            "frequency_limit": config.frequency_limit,
            "test_fraction": config.test_fraction,
            "seed": config.seed,
            "positive": config.positive,
        }
        shutil.rmtree(staging / "columns")
        finish_dataset(spec, report, options)
    return report


def _kept(negatives: dict[str, int]) -> tuple[str, ...] | None:
    """Returns the labels that a later one is compared with, unless there are none or too many."""
    return tuple(sorted(negatives)) if 0 < len(negatives) <= _MOST_NEGATIVES else None


def _input_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or directory (--input)")
    files = sorted(f for f in path.iterdir() if f.name.endswith((".csv", ".csv.gz")))
    if not files:
        raise FileNotFoundError(f"{path}: no *.csv or *.csv.gz in it (--input)")
    return files


def _parse(
    config: CsvConfig, files: list[Path], columns: Columns
) -> tuple[dict[str, dict[str, int]], Counter[str]]:
    """Parses every column that is used.

    Returns:
        The codes of the values of categorical columns, and with `positive` the counts of labels.
    """
    header = not config.columns if config.header is None else config.header
    csv_format = CsvFormat(config.columns, header, config.delimiter, config.chunk_size)
    dictionaries: dict[str, dict[str, int]] = {name: {} for name in config.categorical}
    labels: Counter[str] = Counter()
    parsers: dict[str, Parser] = {
        config.label: label_parser()
        if config.positive is None
        else positive_parser(config.positive, config.missing_values, labels),
        **{name: number_parser(config.missing_values) for name in config.numerical},
        **{
            name: code_parser(dictionaries[name], config.missing_values)
            for name in config.categorical
        },
    }
    columns.append_part(files, csv_format, parsers)
    if columns.num_rows and config.positive is not None and not columns.load(config.label).any():
        raise ValueError(
            f"{config.input}: column {config.label}: no row has the label {config.positive!r} "
            f"(--positive); found {', '.join(map(repr, sorted(labels)[:MOST_LISTED]))}"
        )
    return dictionaries, labels


def _divide(num_rows: int, config: CsvConfig) -> dict[str, np.ndarray]:
    """Returns the rows of each split: the training rows shuffled, as readers shuffle no rows."""
    order = np.argsort(np.random.SFC64([config.seed]).random_raw(num_rows), kind="stable")
    num_test = int(num_rows * config.test_fraction)
    if num_rows == num_test or (config.test_fraction and not num_test):
        raise ValueError(
            f"{config.input}: {num_rows} rows are too few for --test_fraction "
            f"{config.test_fraction}: a split would be empty"
        )
    return {"train": order[num_test:], "test": np.sort(order[:num_test])}


def _fit_scale(values: np.ndarray, numeric_transform: str) -> tuple[float, float]:
    present = values[~np.isnan(values)]
    if numeric_transform != "standardise" or not len(present):
        return 0.0, 1.0
    greatest = float(abs(present).max())
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # Rounding has no deviation to be divided by; the magnitude brings what is near to 0.
        if np.ptp(present) <= _ROUNDING * greatest:
            return float(present[0]), max(greatest, 1.0)
        mean, deviation = float(present.mean()), float(present.std())
    if not (np.isfinite(mean) and 0 < deviation < np.inf):
        raise OverflowError(
            f"its standard deviation is beyond float64 (values up to {greatest:g}); choose "
            "--numeric_transform log, or scale the column"
        )
    return mean, deviation


def _fit_ids(
    codes: np.ndarray, values: list[str], frequency_limit: int
) -> tuple[np.ndarray, list[str]]:
    """Returns the id of each code, code -1 included, and the values that have the ids 1, 2, ...

    The most frequent value is first, and equally frequent ones are in the order of their text.
    """
    counts = np.bincount(codes[codes >= 0], minlength=len(values))
    frequent = np.flatnonzero(counts >= frequency_limit).tolist()
    kept = sorted(frequent, key=lambda code: (-counts[code], values[code]))
    ids = np.zeros(len(values) + 1, np.int64)
    ids[kept] = np.arange(1, len(kept) + 1)
    return ids, [values[code] for code in kept]


def write_split(
    spec: FeatureSpec,
    split: str,
    order: np.ndarray,
    columns: Columns,
    ids: dict[str, np.ndarray],
    transform: CsvTransform,
    report: Report,
) -> None:
    """Writes the files of a split and notes in `report` what is in them.

    Args:
        spec: names, dtypes and files.
        split: the split to write.
        order: its rows among those of `columns`.
        columns: labels and numbers as they were parsed.
        ids: of each table, in channel order, for the rows of the split.
        transform: of the numbers.
        report: gets rows, positives and raised values.

    Raises:
        ValueError: a number is too large for float16; its file, line and column are named.
    """
    labels = columns.load(spec.label)[order]
    report.rows[split], report.positives[split] = len(labels), int(labels.sum())
    numerical = np.empty((len(order), len(spec.numerical)), layout.NUMERICAL_DTYPE)
    for index, name in enumerate(spec.numerical):
        values = columns.load(name)[order]
        numerical[:, index], raised = transform.numbers(name, values)
        if raised:
            report.raised[name] = report.raised.get(name, 0) + raised
        if (row := first_overflow(numerical[:, index])) is not None:
            where = columns.where(name, order[row])
            problem = overflow_text(values[row], transform.numeric_transform)
            raise ValueError(f"{where}: {problem}")
    with SplitWriter(spec, split) as writer:
        writer.write(labels, numerical, [ids[name] for name in spec.categorical])


def finish_dataset(spec: FeatureSpec, report: Report, options: dict[str, Any]) -> None:
    """Writes the files that say what is in a dataset; the manifest last."""
    spec.save()
    layout.write_model_size(spec.directory, spec.cardinalities)
    layout.write_dataset_manifest(
        spec.directory, report.rows, spec.cardinalities, {"transcode": options}
    )
