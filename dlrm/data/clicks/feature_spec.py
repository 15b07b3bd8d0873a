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
from typing import Any

import numpy as np
import yaml

from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import ListField, ListFiles
from dlrm.documents import brief, read_yaml
from dlrm.files import check_relative, within, write_atomically
from dlrm.limits import check_features

CHANNELS = ("categorical", "numerical", "label")
_REQUIRED_SPLITS, _OPTIONAL_SPLITS = {"train", "test"}, {"validation"}
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
        _check_sections(self)
        _check_channels(self)
        _check_features(self)
        _check_splits(self)

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
    ) -> "FeatureSpec":
        """Describes a dataset with NVIDIA's default feature and file names; see `named`."""
        check_features("--num_numerical_features", num_numerical)
        check_features("number of tables", len(cardinalities))
        return cls.named(
            Path(directory) / layout.FEATURE_SPEC,
            layout.LABEL,
            [layout.numerical_name(i) for i in range(num_numerical)],
            {layout.categorical_name(i): int(size) for i, size in enumerate(cardinalities)},
            splits,
            metadata,
        )

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
            label: name of the label.
            numerical: names of the numerical features, in the order of the model's inputs.
            cardinalities: categorical feature -> rows of its table, in that order too.
            splits: "train" and "test", and possibly "validation".
            metadata: stored as it is.
            lists: the categorical features with several ids a row.
            tables: the categorical features that share tables, with the names of these.
        """
        lists = lists or {}
        features: dict[str, dict[str, Any]] = {
            name: {"dtype": str(layout.id_dtype(size)), "cardinality": size}
            for name, size in cardinalities.items()
        }
        for name, list_field in lists.items():
            features[name]["list"] = list_field.to_dict()
        for name, table in (tables or {}).items():
            features[name]["table"] = table
        features |= {name: {"dtype": str(layout.NUMERICAL_DTYPE)} for name in numerical}
        features[label] = {"dtype": str(layout.LABEL_DTYPE)}
        channels = {
            "categorical": list(cardinalities),
            "numerical": list(numerical),
            "label": [label],
        }
        return cls(
            feature_spec=features,
            source_spec={split: _default_chunks(split, channels, lists) for split in splits},
            channel_spec=channels,
            metadata=metadata or {},
            path=path,
        )

    def save(self) -> None:
        """Writes the four sections to `path`, without validation if its directory describes it."""
        sources = dict(self.source_spec)
        if sources.get("validation") == _moved(sources["train"], _VALIDATION_FOLDERS[0]):
            del sources["validation"]
        sections = {
            "feature_spec": self.feature_spec,
            "source_spec": sources,
            "channel_spec": self.channel_spec,
            "metadata": self.metadata,
        }
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
        shared, numbers = self.shared_tables, dict[tuple[str, bool], int]()
        for name in self.categorical:
            key = (shared.get(name, name), name in shared)
            numbers.setdefault(key, len(numbers))
        if len(numbers) == len(self.categorical):
            return None
        return tuple(numbers[shared.get(name, name), name in shared] for name in self.categorical)

    @property
    def poolings(self) -> tuple[str | None, ...] | None:
        """Pooling of each feature: "sum", "mean", "attention" or None; None if none has one.

        If all lists have the same pooling, features with one id per row, which no pooling changes,
        get it too.
        """
        said = {field.pooling for field in self.lists.values()}
        if said <= {None}:
            return None
        if len(said) == 1 and said != {bags.ATTENTION}:
            return tuple(said) * len(self.categorical)
        of_lists = {name: field.pooling for name, field in self.lists.items()}
        return tuple(of_lists.get(name) for name in self.categorical)

    @property
    def targets(self) -> tuple[int | None, ...] | None:
        """Feature of each attended feature's candidate, by number; None if none is attended."""
        of_lists = {name: field.target for name, field in self.lists.items()}
        if not any(of_lists.values()):
            return None
        numbers = {name: number for number, name in enumerate(self.categorical)}
        named = (of_lists.get(name) for name in self.categorical)
        return tuple(None if target is None else numbers[target] for target in named)

    def dtype(self, feature: str) -> np.dtype:
        """Returns the dtype that a feature has in its file."""
        return np.dtype(self.feature_spec[feature]["dtype"])

    def file(self, split: str, feature: str) -> Path:
        """Returns the file that holds a feature of a split (the numerical features share one)."""
        return self._files(split, feature)[0]

    def list_files(self, split: str, feature: str) -> ListFiles:
        """Returns the files of a feature of `lists`."""
        return ListFiles(*self._files(split, feature))

    def weights_file(self, split: str) -> Path | None:
        """Returns the file of the sample weights of a split; None if it has none."""
        path = self.file(split, self.label).with_name(layout.WEIGHT_FILE)
        if not path.is_file():
            return None
        return self._within(os.path.relpath(path, self.directory))

    def _files(self, split: str, feature: str) -> list[Path]:
        if split not in self.source_spec:
            raise ValueError(f"{self.path}: no split {split!r}, only {', '.join(self.splits)}")
        if feature not in self._names[split]:
            raise ValueError(f"{self.path}: no feature {feature!r} in split {split!r}")
        return [self._within(name) for name in self._names[split][feature]]

    @cached_property
    def _names(self) -> dict[str, dict[str, list[str]]]:
        """The names of the files of each feature, by split."""
        return {
            split: {name: chunk["files"] for chunk in chunks for name in chunk["features"]}
            for split, chunks in self.source_spec.items()
        }

    def num_rows(self, split: str) -> int:
        """Returns the number of samples of a split, after checking the size of every file.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file does not have as many rows as the label file.
        """
        rows = _size(self.file(split, self.label))
        for chunk in self.source_spec[split]:
            if chunk["type"] != bags.CHUNK:
                width = sum(self.dtype(name).itemsize for name in chunk["features"])
                layout.check_rows(self._within(chunk["files"][0]), rows, width)
        for name in self.lists:
            self._check_list(split, name, rows)
        return rows

    def _check_list(self, split: str, name: str, rows: int) -> None:
        """Raises ValueError if the files of a list field do not match."""
        files, list_field = self.list_files(split, name), self.lists[name]

        def check(path: Path, count: int, of: str, dtype: np.dtype) -> None:
            if (size := _size(path)) != count * dtype.itemsize:
                raise ValueError(
                    f"{path}: expected {count * dtype.itemsize} bytes ({count} {of} of "
                    f"{dtype.itemsize} bytes), got {size}"
                )

        check(files.lengths, rows, "lengths, one a row,", list_field.lengths_dtype)
        check(files.starts, bags.num_starts(rows), "starts", bags.STARTS_DTYPE)
        with open(files.starts, "rb") as file:
            file.seek(-bags.STARTS_DTYPE.itemsize, os.SEEK_END)
            total = int(np.frombuffer(file.read(), bags.STARTS_DTYPE)[0])
        most = list_field.max_length
        if not 0 <= total <= rows * most:
            raise ValueError(
                f"{files.starts}: expected up to {rows * most} ids ({rows} rows of up to {most}), "
                f"got {total}"
            )
        check(files.values, total, "ids", self.dtype(name))
        if files.weights is not None:
            check(files.weights, total, "weights", bags.WEIGHTS_DTYPE)

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
    expected = {"feature_spec", "source_spec", "channel_spec", "metadata"}
    if not expected - {"metadata"} <= set(sections) <= expected:
        listed = brief(sorted(map(str, sections)))
        raise ValueError(f"{path}: expected the sections {sorted(expected)}, got {listed}")
    sections["metadata"] = sections.get("metadata") or {}
    for name in expected:
        if not isinstance(sections[name], dict):
            raise ValueError(f"{path}: section {name}: expected a map, got {brief(sections[name])}")
        if wrong := [key for key in sections[name] if not isinstance(key, str)]:
            raise ValueError(
                f"{path}: section {name}: expected texts as names, got {brief(wrong[0])}"
            )
    return sections


def _default_chunks(
    folder: str, channels: dict[str, list[str]], lists: Mapping[str, ListField]
) -> list[dict]:
    chunks = [(channels["numerical"], [layout.NUMERICAL_FILE])] if channels["numerical"] else []
    chunks += [(channels["label"], [layout.LABEL_FILE])]
    for i, name in enumerate(channels["categorical"]):
        of_lists = lists.get(name)
        one_file = [layout.categorical_name(i)]
        names = one_file if of_lists is None else bags.file_names(i, of_lists.weighted)
        chunks.append(([name], names))
    return [
        {
            "type": "split_binary" if len(files) == 1 else bags.CHUNK,
            "features": list(features),
            "files": [f"{folder}/{file}" for file in files],
        }
        for features, files in chunks
    ]


def _from_model_size(directory: Path, allow_links: bool) -> FeatureSpec:
    """Describes a dataset of 2020, whose numericals and id widths follow from its file sizes.

    NVIDIA's writer and reader differed by one in the cardinality at which ids need a wider type, so
    the width is taken from the files.
    """
    cardinalities = layout.read_model_size(directory)
    rows = _size(directory / "train" / layout.LABEL_FILE)
    num_numerical = _width(directory / "train" / layout.NUMERICAL_FILE, rows) // 2 if rows else 0
    spec = FeatureSpec.default(directory, num_numerical, cardinalities)
    spec = replace(spec, allow_links=allow_links)
    features = dict(spec.feature_spec)
    for name in spec.categorical:
        width = _width(spec.file("train", name), rows)
        features[name] = {**features[name], "dtype": f"int{8 * width}"} if width else features[name]
    return _with_validation(replace(spec, feature_spec=features))


def _with_validation(spec: FeatureSpec) -> FeatureSpec:
    """Adds a validation split whose directory exists and which the specification does not list."""
    for folder in _VALIDATION_FOLDERS if "validation" not in spec.source_spec else ():
        chunks = _moved(spec.source_spec["train"], folder)
        if any((spec.directory / chunk["files"][0]).is_file() for chunk in chunks):
            return replace(spec, source_spec={**spec.source_spec, "validation": chunks})
    return spec


def _moved(train: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Returns the chunks of train/ moved to another directory; none if they are not in train/."""
    parts = [[Path(file).parts for file in chunk["files"]] for chunk in train]
    if not all(len(names) > 1 and names[0] == "train" for files in parts for names in files):
        return []
    return [
        {**chunk, "files": [Path(folder, *names[1:]).as_posix() for names in files]}
        for chunk, files in zip(train, parts, strict=True)
    ]


def _width(file: Path, rows: int) -> int:
    size = _size(file)
    if rows and (size % rows or not size):
        raise ValueError(
            f"{file}: {size} bytes are no whole number of bytes for each of {rows} rows"
        )
    return size // rows if rows else 0


def _size(file: Path) -> int:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    return file.stat().st_size


def _fail(spec: FeatureSpec, message: str) -> None:
    raise ValueError(f"{spec.path}: {message}")


def is_list_of_text(value: Any) -> bool:
    """Returns whether a value is a list of strings, or empty."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _check_sections(spec: FeatureSpec) -> None:
    splits = set(spec.source_spec)
    if not _REQUIRED_SPLITS <= splits <= _REQUIRED_SPLITS | _OPTIONAL_SPLITS:
        _fail(
            spec,
            "source_spec: expected the splits train and test, and possibly validation, "
            f"got {brief(sorted(splits))}",
        )
    if set(spec.channel_spec) != set(CHANNELS):
        _fail(
            spec,
            f"channel_spec: expected the channels {list(CHANNELS)}, got "
            f"{brief(list(spec.channel_spec))}",
        )
    for channel, names in spec.channel_spec.items():
        if not is_list_of_text(names):
            _fail(spec, f"channel {channel}: expected a list of feature names, got {brief(names)}")


def _check_channels(spec: FeatureSpec) -> None:
    if len(spec.channel_spec["label"]) != 1:
        _fail(spec, f"channel label: expected one feature, got {brief(spec.channel_spec['label'])}")
    used = [name for names in spec.channel_spec.values() for name in names]
    if repeated := [name for name, count in Counter(used).items() if count > 1]:
        _fail(spec, f"channel_spec: features used twice: {brief(repeated)}")
    if set(used) != set(spec.feature_spec):
        _fail(
            spec,
            "feature_spec and channel_spec name different features: only in feature_spec "
            f"{brief(sorted(set(spec.feature_spec) - set(used)))}, only in channel_spec "
            f"{brief(sorted(set(used) - set(spec.feature_spec)))}",
        )
    if not spec.numerical and not spec.categorical:
        _fail(spec, "channel_spec: expected at least one numerical or categorical feature")


def _check_features(spec: FeatureSpec) -> None:
    for name, facts in spec.feature_spec.items():
        try:
            dtype = np.dtype(facts["dtype"] + "")  # no list, map or None, which numpy takes, too
        except (KeyError, TypeError, ValueError, SyntaxError, AttributeError):
            _fail(spec, f"feature {name}: expected a numpy dtype, got {brief(facts)}")
        if name in spec.categorical:
            size = facts.get("cardinality")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"{spec.path}: feature {name}: expected a cardinality >= 1, got {brief(size)}"
                )
            if dtype.kind != "i":
                _fail(spec, f"feature {name}: expected a signed integer dtype, got {dtype}")
            if size - 1 > np.iinfo(dtype).max:
                _fail(spec, f"feature {name}: cardinality {size} does not fit dtype {dtype}")
            try:
                ListField.from_dict(facts.get("list", {"max_length": 1}))
            except ValueError as error:
                _fail(spec, f"feature {name}: {error}")
            _check_table(spec, name)
            if name in spec.lists:
                _check_target(spec, name)
        expected = {
            **dict.fromkeys(spec.numerical, layout.NUMERICAL_DTYPE),
            spec.label: layout.LABEL_DTYPE,
        }
        if name in expected and dtype != expected[name]:
            _fail(spec, f"feature {name}: expected dtype {expected[name]}, got {dtype}")


def _check_table(spec: FeatureSpec, name: str) -> None:
    """Checks the name of a feature's table, and its rows against those of its other features."""
    table = spec.feature_spec[name].get("table")
    if table is not None and not isinstance(table, str):
        _fail(spec, f"feature {name}: table: expected a name, got {brief(table)}")
    size = spec.feature_spec[name]["cardinality"]
    for other in spec.categorical if table is not None else ():
        facts = spec.feature_spec[other]
        if facts.get("table") == table and facts.get("cardinality") != size:
            found = brief(facts.get("cardinality"))
            _fail(
                spec,
                f"feature {name}: expected the cardinality of {other}, {found}, which shares table "
                f"{table!r}, got {size}",
            )


def _check_target(spec: FeatureSpec, name: str) -> None:
    """Checks the candidate of an attended feature."""
    target = spec.lists[name].target
    if target is None:
        return
    own = spec.feature_spec[name].get("table")
    there = spec.feature_spec.get(target, {}) if target in spec.categorical else {}
    if target in spec.lists or own is None or there.get("table") != own:
        _fail(
            spec,
            f"feature {name}: target: expected a feature of table {brief(own)} with one id a row, "
            f"got {brief(target)}",
        )


def _check_splits(spec: FeatureSpec) -> None:
    for split, chunks in spec.source_spec.items():
        if not isinstance(chunks, list):
            _fail(spec, f"source_spec {split}: expected a list of chunks, got {brief(chunks)}")
        covered: list[str] = []
        for number, chunk in enumerate(chunks):
            where = f"source_spec {split} chunk {number}"
            _check_chunk(spec, chunk, where)
            covered += chunk["features"]
        counts = Counter(covered)
        missing = sorted(set(spec.feature_spec) - set(counts))
        wrong = sorted(n for n in counts if n not in spec.feature_spec or counts[n] > 1)
        if missing or wrong:
            _fail(
                spec,
                f"source_spec {split}: expected every feature once; missing {brief(missing)}, "
                f"unknown or repeated {brief(wrong)}",
            )


def _check_chunk(spec: FeatureSpec, chunk: Any, where: str) -> None:
    if not isinstance(chunk, dict) or not {"type", "features", "files"} <= set(chunk):
        _fail(spec, f"{where}: expected type, features and files, got {brief(chunk)}")
    features, files = chunk["features"], chunk["files"]
    if not is_list_of_text(features) or not features:
        _fail(spec, f"{where}: expected one feature or more, got {brief(features)}")
    of_list = features[0] in spec.lists
    expected = bags.CHUNK if of_list else "split_binary"
    if chunk["type"] != expected:
        _fail(spec, f"{where}: expected type {expected}, got {brief(chunk['type'])}")
    count = 3 + spec.lists[features[0]].weighted if of_list else 1
    if not is_list_of_text(files) or len(files) != count:
        wanted = f"{count} files" if of_list else "one file"
        _fail(spec, f"{where}: expected {wanted}, got {brief(files)}")
    for file in files:
        check_relative(file, spec.path)
    if set(features) & set(spec.numerical):
        if features != spec.numerical:
            _fail(
                spec,
                f"{where}: expected all numerical features in channel order, "
                f"{brief(spec.numerical)}, got {brief(features)}",
            )
    elif len(features) != 1:
        _fail(
            spec,
            f"{where}: expected the label or one categorical feature alone, got {brief(features)}",
        )
