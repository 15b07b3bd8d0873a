"""`feature_spec.yaml`: the features of a dataset, their files, and the inputs of the model.

The format is NVIDIA's, with four sections: `feature_spec` (dtype and cardinality of each feature),
`source_spec` (the files of each split), `channel_spec` (label, numerical, categorical) and a free
`metadata`. A dataset with only `model_size.json` is read into the same object.

The file lists the splits train and test, since NVIDIA's reader refuses any other. Validation is
found by its directory, `validation/` or `val/`, whose files are named like those in `train/`.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from dlrm.data import bags, layout
from dlrm.data.bags import ListField, ListFiles
from dlrm.documents import brief, read_yaml
from dlrm.files import check_relative, within, write_atomically
from dlrm.limits import check_features

CHANNELS = ("categorical", "numerical", "label")
_SECTIONS = ("feature_spec", "source_spec", "channel_spec", "metadata")
_VALIDATION_FOLDERS = ("validation", "val")  # what we and NVIDIA call it, and NVIDIA in 2020


@dataclass(frozen=True)
class FeatureSpec:
    """The features of a dataset, checked when it is made.

    Attributes:
        feature_spec: feature name -> {"dtype": numpy dtype name, "cardinality": rows of its table,
            "list": for several ids per row, see `ListField`; "table": name of the table, if other
            features have the same}.
        source_spec: split -> list of chunks {"type", "features", "files"}.
        channel_spec: channel -> feature names; their order is that of the model's inputs.
        metadata: any content.
        path: the yaml file; the files of the chunks are relative to its directory and within it.
        allow_links: whether these files may be symbolic links that lead out of the directory.

    Raises:
        ValueError: a rule is broken; the message names the file, the rule and the value found.
    """

    feature_spec: dict[str, dict[str, Any]]
    source_spec: dict[str, list[dict[str, Any]]]
    channel_spec: dict[str, list[str]]
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path = Path(layout.FEATURE_SPEC)
    allow_links: bool = False

    def __post_init__(self) -> None:
        channels, splits = self.channel_spec, self.source_spec
        expected = "the splits train and test, and possibly validation"
        known = {"train", "test"} <= set(splits) <= set(layout.SPLITS)
        self._require(known, "source_spec", expected, sorted(splits))
        valid = set(channels) == set(CHANNELS) and all(map(is_list_of_text, channels.values()))
        valid = valid and len(channels["label"]) == 1
        expected = "categorical, numerical and label, with one label"
        self._require(valid, "channel_spec", expected, channels)
        inputs = [*self.numerical, *self.categorical]
        expected = "at least one numerical or categorical feature"
        self._require(inputs, "channel_spec", expected, channels)
        self._require_each_once("channel_spec", [*inputs, self.label])
        self._check_dtype(self.label, layout.LABEL_DTYPE)
        for name in self.numerical:
            self._check_dtype(name, layout.NUMERICAL_DTYPE)
        for name in self.categorical:
            self._check_categorical(name)
        self._check_tables()
        for split, chunks in splits.items():
            where = f"source_spec {split}"
            self._require(isinstance(chunks, list), where, "a list of chunks", chunks)
            for number, chunk in enumerate(chunks):
                self._check_chunk(f"{where} chunk {number}", chunk)
            self._require_each_once(where, [n for chunk in chunks for n in chunk["features"]])

    def _require(self, holds: object, where: str, expected: str, got: object) -> None:
        if not holds:
            raise ValueError(f"{self.path}: {where}: expected {expected}, got {brief(got)}")

    def _require_each_once(self, where: str, names: Sequence[str]) -> None:
        counts, features = Counter(names), self.feature_spec
        missing = [name for name in features if name not in counts]
        wrong = [name for name in counts if name not in features or counts[name] > 1]
        if missing or wrong:
            raise ValueError(
                f"{self.path}: {where}: expected every feature once; missing {brief(missing)}, "
                f"unknown or repeated {brief(wrong)}"
            )

    def _check_dtype(self, name: str, expected: np.dtype | None = None) -> np.dtype:
        facts, where = self.feature_spec[name], f"feature {name}"
        try:
            dtype = np.dtype(facts["dtype"] + "")  # no list, map or None, which numpy takes, too
        except (KeyError, TypeError, ValueError, SyntaxError):
            self._require(False, where, "a numpy dtype", facts)
            raise
        self._require(expected in (None, dtype), where, f"dtype {expected}", str(dtype))
        return dtype

    def _check_categorical(self, name: str) -> None:
        dtype, where = self._check_dtype(name), f"feature {name}"
        facts = self.feature_spec[name]
        table, size = facts.get("table"), cast(int, facts.get("cardinality"))
        self._require(type(size) is int and size >= 1, where, "a cardinality >= 1", size)
        fits = dtype.kind == "i" and size - 1 <= np.iinfo(dtype).max
        self._require(fits, where, f"a signed integer dtype for {size} ids", str(dtype))
        self._require(table is None or isinstance(table, str), f"{where}: table", "a name", table)
        if "list" in facts:
            ListField.from_dict(facts["list"], f"{self.path}: {where}: list: ")

    def _check_tables(self) -> None:
        tables, first = self.shared_tables, dict[str, str]()
        for name, table in tables.items():
            other = first.setdefault(table, name)
            size, rows = (self.feature_spec[n]["cardinality"] for n in (name, other))
            expected = f"the cardinality of {other}, {rows}, which shares table {table!r}"
            self._require(size == rows, f"feature {name}", expected, size)
        for name, own in self.lists.items():
            if (target := own.target) is not None:
                table = tables.get(name, "")
                holds = bool(table) and tables.get(target) == table and target not in self.lists
                expected = f"a feature of table {table!r} with one id a row"
                self._require(holds, f"feature {name}: target", expected, target)

    def _check_chunk(self, where: str, chunk: dict[str, Any]) -> None:
        valid = isinstance(chunk, dict) and {"type", "features", "files"} <= set(chunk)
        valid = valid and all(is_list_of_text(chunk[name]) for name in ("features", "files"))
        self._require(valid, where, "type, features and files", chunk)
        features, files = chunk["features"], chunk["files"]
        alone = len(features) == 1 and features[0] not in self.numerical
        valid = alone or bool(features and features == self.numerical)
        expected = "the label, one categorical feature, or all numerical ones in channel order"
        self._require(valid, where, expected, features)
        field = self.lists.get(features[0])
        type_, count = ("split_binary", 1) if field is None else (bags.CHUNK, 3 + field.weighted)
        expected = f"type {type_} and {count} file{'s' * (count > 1)}"
        self._require((chunk["type"], len(files)) == (type_, count), where, expected, chunk)
        for file in files:
            check_relative(file, self.path)

    @classmethod
    def load(cls, path: str | os.PathLike, allow_links: bool = False) -> "FeatureSpec":
        """Reads a feature specification, or that of a dataset directory, and finds validation.

        A directory without `feature_spec.yaml` but with `model_size.json` is read by the latter:
        its tables are `cat_0.bin`, `cat_1.bin`, ... and the files' sizes give the widths of ids.
        """
        path = Path(path)
        if path.is_dir():
            if not (path / layout.FEATURE_SPEC).exists() and (path / layout.MODEL_SIZE).exists():
                return _from_model_size(path, allow_links)
            path = path / layout.FEATURE_SPEC
        return _with_validation(cls(**read_sections(path), path=path, allow_links=allow_links))

    @classmethod
    def default(
        cls,
        directory: str | os.PathLike,
        num_numerical: int,
        cardinalities: Sequence[int],
        splits: Sequence[str] = ("train", "test"),
        metadata: dict[str, Any] | None = None,
        lists: Mapping[int, ListField] | None = None,
    ) -> "FeatureSpec":
        """Describes a dataset with NVIDIA's default feature and file names; see `named`."""
        check_features("--num_numerical_features", num_numerical)
        check_features("number of tables", len(cardinalities))
        label, numerical, names = layout.default_names(num_numerical, len(cardinalities))
        sizes = dict(zip(names, map(int, cardinalities), strict=True))
        path = Path(directory) / layout.FEATURE_SPEC
        fields = {names[table]: field for table, field in (lists or {}).items()}
        return cls.named(path, label, numerical, sizes, splits, metadata, fields)

    @classmethod
    def named(
        cls,
        path: Path,
        label: str,
        numerical: Sequence[str],
        cardinalities: Mapping[str, int],
        splits: Iterable[str],
        metadata: dict[str, Any] | None = None,
        lists: Mapping[str, ListField] | None = None,
        tables: Mapping[str, str] | None = None,
    ) -> "FeatureSpec":
        """Describes a dataset with NVIDIA's default file names and given feature names.

        Args:
            path: the specification (nothing is written; see `save`).
            numerical: names of features in the order of the model's inputs.
            cardinalities: categorical feature -> rows of its table, in that order too.
            lists: the categorical features with several ids a row.
            tables: the categorical features that share tables, with the names of these.
        """
        lists, tables = lists or {}, tables or {}
        chunks = [(list(numerical), [layout.NUMERICAL_FILE])] if numerical else []
        chunks.append(([label], [layout.LABEL_FILE]))
        features: dict[str, dict[str, Any]] = {}
        for number, (name, size) in enumerate(cardinalities.items()):
            features[name] = {"dtype": str(layout.id_dtype(size)), "cardinality": size}
            files = [layout.categorical_name(number)]
            if name in lists:
                features[name]["list"] = lists[name].to_dict()
                files = bags.file_names(number, lists[name].weighted)
            if name in tables:
                features[name]["table"] = tables[name]
            chunks.append(([name], files))
        features |= {name: {"dtype": str(layout.NUMERICAL_DTYPE)} for name in numerical}
        features[label] = {"dtype": str(layout.LABEL_DTYPE)}
        sources = {
            split: [
                {
                    "type": "split_binary" if len(files) == 1 else bags.CHUNK,
                    "features": [*names],
                    "files": [f"{split}/{file}" for file in files],
                }
                for names, files in chunks
            ]
            for split in splits
        }
        channels = {"categorical": [*cardinalities], "numerical": [*numerical], "label": [label]}
        return cls(features, sources, channels, metadata or {}, path)

    def save(self) -> None:
        """Writes the four sections to `path`, without validation if its directory describes it."""
        sources = dict(self.source_spec)
        if sources.get("validation") == _moved(sources["train"], _VALIDATION_FOLDERS[0]):
            del sources["validation"]
        sections = {name: getattr(self, name) for name in _SECTIONS} | {"source_spec": sources}
        write_atomically(self.path, yaml.safe_dump(sections, sort_keys=False))

    @property
    def directory(self) -> Path:
        """The dataset's directory, to which the files of the chunks are relative."""
        return self.path.parent

    @property
    def splits(self) -> list[str]:
        """Splits of the dataset, in the order train, test, validation."""
        return [split for split in layout.SPLITS if split in self.source_spec]

    @property
    def numerical(self) -> list[str]:
        """Names of the numerical features, in the order of the model's inputs."""
        return self.channel_spec["numerical"]

    @property
    def categorical(self) -> list[str]:
        """Names of the categorical features, in the order of the model's tables."""
        return self.channel_spec["categorical"]

    @property
    def label(self) -> str:
        """Name of the label."""
        return self.channel_spec["label"][0]

    @property
    def cardinalities(self) -> list[int]:
        """Rows of each feature's table, in the order of the categorical channel."""
        return [self.feature_spec[name]["cardinality"] for name in self.categorical]

    @cached_property
    def lists(self) -> dict[str, ListField]:
        """The categorical features with several ids a row, in the order of their channel."""
        return {
            name: ListField.from_dict(self.feature_spec[name]["list"])
            for name in self.categorical
            if "list" in self.feature_spec[name]
        }

    @property
    def shared_tables(self) -> dict[str, str]:
        """The categorical features that name their table, which others may have, with its name."""
        named = {name: self.feature_spec[name].get("table") for name in self.categorical}
        return {name: table for name, table in named.items() if table is not None}

    @property
    def field_tables(self) -> tuple[int, ...] | None:
        """Number of each categorical feature's table; None if no table has several features."""
        shared = self.shared_tables
        keys = [(shared.get(name, name), name in shared) for name in self.categorical]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return None if len(numbers) == len(keys) else tuple(numbers[key] for key in keys)

    @property
    def poolings(self) -> tuple[str | None, ...] | None:
        """Pooling of each feature: "sum", "mean", "attention" or None; None if none has one.

        If all lists have the same pooling, features with one id per row, which no pooling changes,
        get it too.
        """
        poolings = {name: field.pooling for name, field in self.lists.items()}
        different = set(poolings.values())
        if different <= {None}:
            return None
        if len(different) == 1 and different != {bags.ATTENTION}:
            return tuple(different) * len(self.categorical)
        return tuple(poolings.get(name) for name in self.categorical)

    @property
    def targets(self) -> tuple[int | None, ...] | None:
        """Feature of each attended feature's candidate, by number; None if none is attended."""
        targets = {name: field.target for name, field in self.lists.items() if field.target}
        numbers = {name: number for number, name in enumerate(self.categorical)}
        every = tuple(numbers.get(targets.get(name, "")) for name in self.categorical)
        return every if targets else None

    def dtype(self, feature: str) -> np.dtype:
        """Returns the dtype that a feature has in its file."""
        return np.dtype(self.feature_spec[feature]["dtype"])

    def file(self, split: str, feature: str) -> Path:
        """Returns the file that holds a feature of a split (the numerical features share one)."""
        return self.files(split, feature)[0]

    def list_files(self, split: str, feature: str) -> ListFiles:
        """Returns the files of a feature of `lists`."""
        return ListFiles(*self.files(split, feature))

    def files(self, split: str, feature: str) -> list[Path]:
        """Returns the files that hold a feature of a split; several for a feature of `lists`."""
        if split not in self.source_spec:
            raise ValueError(f"{self.path}: no split {split!r}, only {', '.join(self.splits)}")
        if (names := self._file_names.get((split, feature))) is None:
            raise ValueError(f"{self.path}: no feature {feature!r} in split {split!r}")
        return [self._within(name) for name in names]

    @cached_property
    def _file_names(self) -> dict[tuple[str, str], list[str]]:
        return {
            (split, name): chunk["files"]
            for split, chunks in self.source_spec.items()
            for chunk in chunks
            for name in chunk["features"]
        }

    def weights_file(self, split: str) -> Path | None:
        """Returns the file of the sample weights of a split; None if it has none."""
        label = Path(self._file_names[split, self.label][0])
        name = label.with_name(layout.WEIGHT_FILE).as_posix()
        return self._within(name) if (self.directory / name).is_file() else None

    def num_rows(self, split: str) -> int:
        """Returns the number of samples of a split, by the size of its label file.

        Raises:
            FileNotFoundError: it is missing.
        """
        return _size(self.file(split, self.label))

    def _within(self, name: str) -> Path:
        return within(self.directory, name, self.path, self.allow_links)


def read_sections(path: Path) -> dict[str, Any]:
    """Reads the four sections of a specification without checking their content.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not yaml, or not the four sections.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such feature specification")
    sections = read_yaml(path)
    if not set(_SECTIONS[:3]) <= set(sections) <= set(_SECTIONS):
        listed = brief(sorted(map(str, sections)))
        raise ValueError(f"{path}: expected the sections {sorted(_SECTIONS)}, got {listed}")
    sections["metadata"] = sections.get("metadata") or {}
    for name, section in sections.items():
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            raise ValueError(
                f"{path}: section {name}: expected a map with texts as keys, got {brief(section)}"
            )
    return sections


def is_list_of_text(value: Any) -> bool:
    """Returns whether a value is a list of strings, or empty."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _from_model_size(directory: Path, allow_links: bool) -> FeatureSpec:
    """Describes a dataset of 2020, whose numericals and id widths follow from its file sizes.

    NVIDIA's writer and reader differed by one in the cardinality at which ids need a wider type, so
    the width is taken from the files.
    """
    cardinalities, train = layout.read_model_size(directory), directory / "train"
    rows = _size(train / layout.LABEL_FILE)

    def width(name: str) -> int:
        size = _size(train / name) if rows else 0
        if rows and (size % rows or not size):
            raise ValueError(
                f"{train / name}: {size} bytes are no whole number of bytes for each of {rows} rows"
            )
        return size // max(rows, 1)

    spec = FeatureSpec.default(directory, width(layout.NUMERICAL_FILE) // 2, cardinalities)
    for name in spec.categorical:
        if num_bytes := width(name):
            spec.feature_spec[name]["dtype"] = f"int{8 * num_bytes}"
    return _with_validation(replace(spec, allow_links=allow_links))


def _with_validation(spec: FeatureSpec) -> FeatureSpec:
    """Adds a validation split whose directory exists and which the specification does not list."""
    for folder in _VALIDATION_FOLDERS if "validation" not in spec.source_spec else ():
        chunks = _moved(spec.source_spec["train"], folder)
        if any((spec.directory / chunk["files"][0]).is_file() for chunk in chunks):
            return replace(spec, source_spec={**spec.source_spec, "validation": chunks})
    return spec


def _moved(train: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Returns the chunks of train/ moved to another directory; none if they are not in train/."""
    moved = []
    for chunk in train:
        names = [Path(file).parts for file in chunk["files"]]
        if any(len(parts) < 2 or parts[0] != "train" for parts in names):
            return []
        files = [Path(folder, *parts[1:]).as_posix() for parts in names]
        moved.append({**chunk, "files": files})
    return moved


def _size(file: Path) -> int:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    return file.stat().st_size
