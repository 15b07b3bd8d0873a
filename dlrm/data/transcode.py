"""CSV to split-binary: how users bring data of their own.

`transcode_csv` takes the columns of any CSV: text becomes ids through a dictionary, numbers are
transformed, rows are shuffled and divided into train and test. What is fitted (dictionaries, means)
is fitted on the training rows, and kept in the dataset for serving. `transcode_spec` takes NVIDIA's
feature specification with chunks of type csv, whose ids are integers already. Either way the input
is parsed once, into a temporary file a column, and the columns are then encoded one at a time.
"""

import bisect
import csv
import gzip
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.feature_spec import CHANNELS, FeatureSpec, read_sections
from dlrm.data.transform import Parsed, log_numerical
from dlrm.files import staged_directory, write_atomically

TRANSFORM = "transform/csv.json"
NUMERIC_TRANSFORMS = ("log", "standardise", "none")
_MOST_LISTED = 20  # labels or columns in an error message


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
        missing_values: cells that mean "missing", besides empty ones.
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
    """

    rows: dict[str, int] = field(default_factory=dict)
    positives: dict[str, int] = field(default_factory=dict)
    cardinalities: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, dict[str, int]] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CsvTransform:
    """A fitted transform from the text of columns to a model's inputs; serving applies the same.

    Attributes:
        numeric_transform: "log", "standardise" or "none".
        scales: numerical feature -> its mean and standard deviation (standardise only).
        dictionaries: categorical feature -> the values that have the ids 1, 2, ...
        missing_values: cells that mean "missing", besides empty ones.
    """

    numeric_transform: str
    scales: dict[str, tuple[float, float]]
    dictionaries: dict[str, list[str]]
    missing_values: tuple[str, ...]

    def __call__(
        self, columns: Mapping[str, Sequence[str]]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns numericals, float16 `[rows, num_numerical]`, and the ids `[rows]` of each table.

        Raises:
            KeyError: a column is missing.
            ValueError: a numerical cell is no number, or too large for float16.
        """
        parse = _number_parser(self.missing_values)
        numerical = []
        for name in self.scales:
            try:
                numbers, _ = self.numbers(name, parse([cell.strip() for cell in columns[name]]))
            except _BadCellError as error:
                raise ValueError(
                    f"column {name}, row {error.index}: expected {error.expected}, got "
                    f"{columns[name][error.index]!r}"
                ) from None
            if (row := _first_overflow(numbers)) is not None:
                raise ValueError(_overflow(f"column {name}, row {row}", columns[name][row]))
            numerical.append(numbers)
        ids = {}
        for name, values in self.dictionaries.items():
            lookup = {value: i for i, value in enumerate(values, 1)}
            encoded = [lookup.get(cell.strip(), 0) for cell in columns[name]]
            ids[name] = np.array(encoded, layout.id_dtype(len(values) + 1))
        rows = len(next(iter(columns.values())))
        return np.stack(numerical, 1) if numerical else np.empty((rows, 0), np.float16), ids

    def numbers(self, name: str, values: np.ndarray) -> tuple[np.ndarray, int]:
        """Transforms a numerical column, NaN being missing.

        Returns:
            The float16 values, infinite where they overflow, and how many arguments of the
            logarithm were raised to 1.
        """
        missing = np.isnan(values)
        if self.numeric_transform == "log":
            return log_numerical(Parsed(np.where(missing, 0.0, values), missing))
        mean, deviation = self.scales[name]
        scaled = np.where(missing, 0.0, (values - mean) / deviation)
        with np.errstate(over="ignore"):
            return scaled.astype(np.float32).astype(layout.NUMERICAL_DTYPE), 0

    def save(self, directory: Path) -> None:
        """Writes `transform/csv.json` into a dataset."""
        path = directory / TRANSFORM
        path.parent.mkdir()
        text = json.dumps({"version": 1, **vars(self)}, indent=1, ensure_ascii=False)
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, directory: Path) -> "CsvTransform":
        """Reads what `save` wrote into a dataset.

        Raises:
            FileNotFoundError: the dataset has no such transform.
            ValueError: the file is not one; it is named.
        """
        path = directory / TRANSFORM
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["version"] != 1:
                raise ValueError(f"expected version 1, got {facts['version']}")
            return cls(
                facts["numeric_transform"],
                {name: (mean, deviation) for name, (mean, deviation) in facts["scales"].items()},
                facts["dictionaries"],
                tuple(facts["missing_values"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a fitted transform ({error!r})") from error


def transcode_csv(config: CsvConfig) -> Report:
    """Writes a split-binary dataset from CSV files.

    Raises:
        FileNotFoundError, FileExistsError: no input, or something stands at the output.
        ValueError: bad input; the file, line, column and value are named.
    """
    files = _input_files(Path(config.input))
    with staged_directory(config.output) as staging:
        columns = _Columns(staging / "columns")
        dictionaries = _parse(config, files, columns)
        orders = _divide(columns.num_rows, config)
        train = orders["train"]

        codes_to_ids = {}
        transform = CsvTransform(config.numeric_transform, {}, {}, config.missing_values)
        for name in config.numerical:
            transform.scales[name] = _fit_scale(columns.load(name)[train], config.numeric_transform)
        for name in config.categorical:
            codes_to_ids[name], transform.dictionaries[name] = _fit_ids(
                columns.load(name)[train], list(dictionaries[name]), config.frequency_limit
            )

        cardinalities = {name: len(d) + 1 for name, d in transform.dictionaries.items()}
        report = Report(cardinalities=cardinalities)
        spec = _describe(
            staging / config.feature_spec_out, config.label, config.numerical, cardinalities, orders
        )
        for split, order in orders.items():
            ids = {name: codes_to_ids[name][columns.load(name)[order]] for name in cardinalities}
            report.unknown[split] = {name: int((ids[name] == 0).sum()) for name in ids}
            _write_split(spec, split, order, columns, ids, transform, report)
        transform.save(staging)
        options = {
            "numeric_transform": config.numeric_transform,
            "frequency_limit": config.frequency_limit,
            "test_fraction": config.test_fraction,
            "seed": config.seed,
            "positive": config.positive,
        }
        shutil.rmtree(staging / "columns")
        _finish(spec, report, options)
    return report


def transcode_spec(
    input: str,
    output: str,
    feature_spec_in: str = layout.FEATURE_SPEC,
    feature_spec_out: str = layout.FEATURE_SPEC,
    chunk_size: int = 65536,
) -> Report:
    """Writes a split-binary dataset from the CSV files (no header) of a feature specification.

    Ids are integers and stay as they are; a cardinality "auto" is the greatest id of all splits
    plus one, a declared one must hold every id. Numbers stay as they are, a missing one becomes 0.
    Columns that no channel has are passed over.

    Raises: as `transcode_csv`.
    """
    path = Path(input) / feature_spec_in
    sections = read_sections(path)
    label, numerical, declared = _check_csv_spec(path, sections)
    with staged_directory(output) as staging:
        splits = {}
        for split, chunks in sections["source_spec"].items():
            splits[split] = columns = _Columns(staging / "columns" / split)
            parsers: dict[str, _Parser] = {
                label: _label_parser(),
                **{name: _number_parser(()) for name in numerical},
                **{name: _id_parser(size) for name, size in declared.items()},
            }
            for chunk in chunks:
                csv_format = _CsvFormat(chunk["features"], chunk_size=chunk_size)
                files = [path.parent / file for file in chunk["files"]]
                used = {name: parsers[name] for name in chunk["features"] if name in parsers}
                columns.append_part(files, csv_format, used)
            if not columns.num_rows:
                raise ValueError(f"{path}: split {split}: its files have no rows")
        report = Report()
        for name, size in declared.items():
            greatest = max(int(c.load(name).max(initial=0)) for c in splits.values())
            report.cardinalities[name] = size or greatest + 1

        transform = CsvTransform("none", dict.fromkeys(numerical, (0.0, 1.0)), {}, ())
        spec = _describe(staging / feature_spec_out, label, numerical, report.cardinalities, splits)
        for split, columns in splits.items():
            ids = {name: columns.load(name) for name in declared}
            order = np.arange(columns.num_rows)
            _write_split(spec, split, order, columns, ids, transform, report)
        shutil.rmtree(staging / "columns")
        _finish(spec, report, {"numeric_transform": "none"})
    return report


def _check_csv_spec(
    path: Path, sections: dict[str, Any]
) -> tuple[str, list[str], dict[str, int | None]]:
    """Returns label, numericals, and each categorical's cardinality, None where it is "auto"."""
    channels = sections["channel_spec"]
    if set(channels) != set(CHANNELS) or len(channels["label"]) != 1:
        raise ValueError(
            f"{path}: channel_spec: expected categorical, numerical and label, with one label, got "
            f"{channels}"
        )
    if not {"train", "test"} <= set(sections["source_spec"]) <= set(layout.SPLITS):
        raise ValueError(
            f"{path}: source_spec: expected the splits train and test, and possibly validation, "
            f"got {list(sections['source_spec'])}"
        )
    for split, chunks in sections["source_spec"].items():
        found = []
        for chunk in chunks:
            if chunk.get("type") != "csv" or not chunk.get("files"):
                raise ValueError(
                    f"{path}: source_spec {split}: expected chunks of type csv with files, got "
                    f"{chunk}"
                )
            found += chunk["features"]
        for name in [name for names in channels.values() for name in names]:
            if found.count(name) != 1:
                raise ValueError(
                    f"{path}: source_spec {split}: expected feature {name} once, got it "
                    f"{found.count(name)} times"
                )
    cardinalities: dict[str, int | None] = {}
    for name in channels["categorical"]:
        size = sections["feature_spec"].get(name, {}).get("cardinality")
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f'{path}: feature {name}: expected a cardinality of 1 or more, or "auto", got '
                f"{size!r}"
            )
        cardinalities[name] = None if size == "auto" else size
    return channels["label"][0], channels["numerical"], cardinalities


def _input_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or directory (--input)")
    files = sorted(f for f in path.iterdir() if f.name.endswith((".csv", ".csv.gz")))
    if not files:
        raise FileNotFoundError(f"{path}: no *.csv or *.csv.gz in it (--input)")
    return files


def _parse(config: CsvConfig, files: list[Path], columns: "_Columns") -> dict[str, dict[str, int]]:
    """Parses every column that is used; returns the values of the categorical ones as codes."""
    header = not config.columns if config.header is None else config.header
    csv_format = _CsvFormat(config.columns, header, config.delimiter, config.chunk_size)
    dictionaries: dict[str, dict[str, int]] = {name: {} for name in config.categorical}
    labels: set[str] = set()
    parsers: dict[str, _Parser] = {
        config.label: _label_parser()
        if config.positive is None
        else _positive_parser(config.positive, labels),
        **{name: _number_parser(config.missing_values) for name in config.numerical},
        **{
            name: _code_parser(dictionaries[name], config.missing_values)
            for name in config.categorical
        },
    }
    columns.append_part(files, csv_format, parsers)
    if columns.num_rows and config.positive is not None and not columns.load(config.label).any():
        raise ValueError(
            f"{config.input}: column {config.label}: no row has the label {config.positive!r} "
            f"(--positive); found {', '.join(map(repr, sorted(labels)))}"
        )
    return dictionaries


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
    return float(present.mean()), float(present.std()) or 1.0


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


def _describe(
    path: Path,
    label: str,
    numerical: Sequence[str],
    cardinalities: dict[str, int],
    splits: Collection[str],
) -> FeatureSpec:
    """Returns a specification with the users' feature names and NVIDIA's file names."""
    categorical = list(cardinalities)
    features: dict[str, dict[str, Any]] = {
        name: {"dtype": str(layout.id_dtype(size)), "cardinality": size}
        for name, size in cardinalities.items()
    }
    features |= {name: {"dtype": str(layout.NUMERICAL_DTYPE)} for name in numerical}
    features[label] = {"dtype": str(layout.LABEL_DTYPE)}
    chunks = [(list(numerical), "numerical.bin")] if numerical else []
    chunks += [([label], "label.bin")]
    chunks += [([name], layout.categorical_name(i)) for i, name in enumerate(categorical)]
    return FeatureSpec(
        feature_spec=features,
        source_spec={
            split: [
                {"type": "split_binary", "features": names, "files": [f"{split}/{file}"]}
                for names, file in chunks
            ]
            for split in splits
        },
        channel_spec={
            "categorical": categorical,
            "numerical": list(numerical),
            "label": [label],
        },
        path=path,
    )


def _write_split(
    spec: FeatureSpec,
    split: str,
    order: np.ndarray,
    columns: "_Columns",
    ids: dict[str, np.ndarray],
    transform: CsvTransform,
    report: Report,
) -> None:
    (spec.directory / split).mkdir()
    labels = columns.load(spec.label)[order]
    labels.tofile(spec.file(split, spec.label))
    report.rows[split], report.positives[split] = len(labels), int(labels.sum())
    for name, column in ids.items():
        column.astype(spec.dtype(name)).tofile(spec.file(split, name))
    numerical = np.empty((len(order), len(spec.numerical)), layout.NUMERICAL_DTYPE)
    for index, name in enumerate(spec.numerical):
        values = columns.load(name)[order]
        numerical[:, index], raised = transform.numbers(name, values)
        if raised:
            report.raised[name] = report.raised.get(name, 0) + raised
        if (row := _first_overflow(numerical[:, index])) is not None:
            raise ValueError(_overflow(columns.where(name, order[row]), values[row]))
    if spec.numerical:
        numerical.tofile(spec.file(split, spec.numerical[0]))


def _first_overflow(numbers: np.ndarray) -> int | None:
    wrong = ~np.isfinite(numbers)
    return int(wrong.argmax()) if wrong.any() else None


def _overflow(where: str, value: Any) -> str:
    greatest = np.finfo(layout.NUMERICAL_DTYPE).max
    return (
        f"{where}: {value} is beyond float16 (up to {greatest:.0f}), in which numerical features "
        "are stored; choose --numeric_transform log or standardise, or scale the column"
    )


def _finish(spec: FeatureSpec, report: Report, options: dict[str, Any]) -> None:
    spec.save()
    layout.write_model_size(spec.directory, spec.cardinalities)
    layout.write_dataset_manifest(
        spec.directory, report.rows, spec.cardinalities, {"transcode": options}
    )


class _BadCellError(Exception):
    """A cell that its parser refuses; whoever knows the file, line and column names them."""

    def __init__(self, index: int, expected: str) -> None:
        super().__init__(index, expected)
        self.index, self.expected = index, expected


_Parser = Callable[[Sequence[str]], np.ndarray]  # stripped cells of a column -> their values


def _number_parser(missing: Collection[str]) -> _Parser:
    """Numbers as float64, missing ones as NaN."""
    missing = {"", *missing}

    def parse(cells: Sequence[str]) -> np.ndarray:
        try:
            values = np.array(list(map(float, cells)), np.float64)
        except ValueError:
            values = np.array([to_number(index, cell) for index, cell in enumerate(cells)])
        for index in np.flatnonzero(~np.isfinite(values)).tolist():
            if cells[index] not in missing:
                raise _BadCellError(index, "a finite number")
            values[index] = np.nan
        return values

    def to_number(index: int, cell: str) -> float:
        if cell in missing:
            return np.nan
        try:
            return float(cell)
        except ValueError:
            raise _BadCellError(index, "a number") from None

    return parse


def _code_parser(dictionary: dict[str, int], missing: Collection[str]) -> _Parser:
    """Values as places in `dictionary`, which grows, missing ones as -1."""
    missing = {"", *missing}

    def parse(cells: Sequence[str]) -> np.ndarray:
        codes = [
            -1 if cell in missing else dictionary.setdefault(cell, len(dictionary))
            for cell in cells
        ]
        return np.array(codes, np.int32)

    return parse


def _label_parser() -> _Parser:
    known = {"0": False, "1": True, "0.0": False, "1.0": True}

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell not in known:
                raise _BadCellError(
                    index, "a label of 0 or 1 (--positive names any other value that counts as 1)"
                )
        return np.array([known[cell] for cell in cells], layout.LABEL_DTYPE)

    return parse


def _positive_parser(positive: str, seen: set[str]) -> _Parser:
    """Labels as whether they are `positive`; some of those that occur are kept in `seen`."""

    def parse(cells: Sequence[str]) -> np.ndarray:
        if "" in cells:
            raise _BadCellError(cells.index(""), "a label")
        if len(seen) < _MOST_LISTED:
            seen.update(sorted(set(cells))[:_MOST_LISTED])
        return np.array([cell == positive for cell in cells], layout.LABEL_DTYPE)

    return parse


def _id_parser(cardinality: int | None) -> _Parser:
    """Integer ids as they are; `cardinality` None allows every one that a table can have."""
    limit = cardinality or np.iinfo(np.int32).max - 1

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if not (cell.isascii() and cell.isdecimal() and int(cell) < limit):
                name = "its cardinality, " if cardinality else ""
                raise _BadCellError(index, f"an integer id from 0 and less than {name}{limit}")
        return np.array([int(cell) for cell in cells], np.int64)

    return parse


@dataclass(frozen=True)
class _CsvFormat:
    """How the records of a file are read.

    Attributes:
        columns: their names; without them those of the header, or 0, 1, ...
        header: whether the first line is one.
    """

    columns: Sequence[str] = ()
    header: bool = False
    delimiter: str = ","
    chunk_size: int = 65536

    def chunks(self, path: Path) -> Iterator[tuple[list[str], list[int], list[list[str]]]]:
        """Yields the columns' names, and the line numbers and cells of up to `chunk_size` rows.

        A file without rows yields its names once, with no rows, if they are known.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a text, or a row has another number of cells than there are columns.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self.delimiter, skipinitialspace=True)
            records = ((reader.line_num, record) for record in reader if record)  # no blank lines
            try:
                first = next(records, None) if self.header else None
                names = [name.strip() for name in self.columns or (first[1] if first else ())]
                while rows := list(islice(records, self.chunk_size)):
                    names = names or [str(index) for index in range(len(rows[0][1]))]
                    for line, record in rows:
                        if len(record) != len(names):
                            raise ValueError(
                                f"{path}, line {line}: expected {len(names)} columns "
                                f"({_listed(names)}), got {len(record)}"
                            )
                    yield names, [line for line, _ in rows], [record for _, record in rows]
            except (csv.Error, UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{path}, line {reader.line_num + 1}: not CSV in UTF-8 ({error})"
                ) from error


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


class _Columns:
    """Parsed columns of a split, each in a file of its own, in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.num_rows = 0
        self._directory = directory
        self._parts: list[tuple[str, list[int], list[Path]]] = []  # lines, first rows, their files
        self._stored: dict[str, tuple[Path, np.dtype]] = {}
        self._part_of: dict[str, int] = {}

    def append_part(
        self, files: Sequence[Path], csv_format: _CsvFormat, parsers: Mapping[str, _Parser]
    ) -> None:
        """Parses the columns that `parsers` name; a later part must have as many rows.

        Raises:
            ValueError: a column or a cell is wrong; file, line and column are named.
        """
        lines_name, first_rows, num_rows = f"lines of part {len(self._parts)}", [], 0
        for file in files:
            first_rows.append(num_rows)
            for names, lines, records in csv_format.chunks(file):
                _check_names(file, names, csv_format, parsers)
                columns = dict(zip(names, zip(*records, strict=True), strict=True))
                for name, parse in parsers.items():
                    cells = [cell.strip() for cell in columns[name]]
                    try:
                        self._append(name, parse(cells))
                    except _BadCellError as error:
                        raise ValueError(
                            f"{file}, line {lines[error.index]}, column {name}: expected "
                            f"{error.expected}, got {cells[error.index]!r}"
                        ) from None
                self._append(lines_name, np.array(lines))
                num_rows += len(lines)
        if self._parts and num_rows != self.num_rows:
            raise ValueError(
                f"{files[0]}: expected {self.num_rows} rows, as the files of the features before "
                f"it have, got {num_rows}"
            )
        self.num_rows = num_rows
        self._part_of |= dict.fromkeys(parsers, len(self._parts))
        self._parts.append((lines_name, first_rows, list(files)))

    def _append(self, name: str, values: np.ndarray) -> None:
        path, _ = self._stored.setdefault(
            name, (self._directory / f"{len(self._stored)}.bin", values.dtype)
        )
        with open(path, "ab") as file:
            values.tofile(file)

    def load(self, name: str) -> np.ndarray:
        """Returns the values of a column in all rows."""
        return np.fromfile(*self._stored[name]) if name in self._stored else np.empty(0)

    def where(self, name: str, row: int) -> str:
        """Says in which file and line a row of a column stood."""
        lines, first_rows, files = self._parts[self._part_of[name]]
        file = files[bisect.bisect_right(first_rows, row) - 1]
        return f"{file}, line {self.load(lines)[row]}, column {name}"


def _check_names(
    file: Path, names: Sequence[str], csv_format: _CsvFormat, wanted: Collection[str]
) -> None:
    if missing := [name for name in wanted if name not in names]:
        source = "its header" if csv_format.header else "a file without a header"
        hint = "" if csv_format.columns else f" ({source}; --columns or --noheader say otherwise)"
        raise ValueError(
            f"{file}: no column {missing[0]!r}; the columns are {_listed(names)}{hint}"
        )
    if repeated := [name for name in wanted if list(names).count(name) > 1]:
        raise ValueError(f"{file}: two columns are called {repeated[0]!r}")
