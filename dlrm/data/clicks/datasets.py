"""Opens the dataset of clicks that a configuration names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import ListField
from dlrm.data.clicks.batch import Dataset, Shard, Sharded
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.random_samples import RandomDataset
from dlrm.data.clicks.readers import BINARY_FILES, SplitDataset, open_binary
from dlrm.data.clicks.synthetic import IDS, SHAPES, SyntheticDataset, ensure_synthetic_dataset
from dlrm.data.prefetch import BatchedRows
from dlrm.data.verification import VERIFY_DATA, Verifier
from dlrm.limits import check_features, check_memory

# Each type and its reader; "memmap" is NVIDIA's name of 2020, "parametric" that of 2021.
DATASET_TYPES = {
    "split": "split",
    "memmap": "split",
    "parametric": "split",
    "binary": "binary",
    "synthetic_gpu": "synthetic_gpu",
    "synthetic_random": "synthetic_random",
    "synthetic_disk": "synthetic_disk",
}
_MULTI_HOT = ("synthetic_random", "synthetic_gpu", "synthetic_disk")
_DEFAULT_TABLE_SIZES = (100_000,) * 26


class _Splits(NamedTuple):
    train: Dataset
    test: Dataset
    validation: Dataset | None


class Datasets(_Splits):
    """The splits of a dataset, a tuple of three.

    Attributes:
        train: the rows to train on.
        test: the rows of `test/`.
        validation: the rows of `validation/`; None if there is none.
        set_aside: the last training rows, which are not in `train`; None if none are set aside.
    """

    set_aside: Dataset | None

    def __new__(
        cls,
        train: Dataset,
        test: Dataset,
        validation: Dataset | None,
        set_aside: Dataset | None = None,
    ) -> "Datasets":
        made = super().__new__(cls, train, test, validation)
        made.set_aside = set_aside
        return made

    def named(self) -> dict[str, Dataset]:
        """Returns the splits that there are, by name."""
        splits = {**self._asdict(), "set_aside": self.set_aside}
        return {name: dataset for name, dataset in splits.items() if dataset is not None}

    def row_text(self, split: str, row: int) -> str:
        """Returns the words for a row of a split; a row set aside has its number in the file."""
        if split != "set_aside":
            return f"{split} row {row}"
        assert isinstance(self.set_aside, BatchedRows)
        return f"train row {self.set_aside.rows(0)[0] + row} (set aside)"

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each split, by name."""
        return {name: dataset.num_samples for name, dataset in self.named().items()}


@dataclass(frozen=True)
class DataConfig:
    """The data to read, and the way to read them; field names are those of the flags.

    Attributes:
        dataset: the dataset's directory.
        dataset_type: a key of `DATASET_TYPES`.
        feature_spec: file in `dataset` that describes it; a `model_size.json` can take its place.
        batch_size: samples of a training batch.
        test_batch_size: samples of a test or validation batch.
        shuffle_batch_order: whether each epoch takes the training batches in a new order.
        dataset_subset: fraction of the training batches to use, in (0, 1]; None is all.
        set_aside: share of the training rows, the last ones, that choose the best weights instead
            of training; 0 leaves the choice to the test rows. It needs a dataset without test rows
            or without validation rows, since otherwise test chooses and validation reports.
        seed: seed of the order of batches and of the synthetic values.
        num_numerical_features: numerical features of a binary or synthetic dataset; others state
            theirs.
        synthetic_dataset_dir: directory that synthetic_disk writes to.
        synthetic_dataset_table_sizes: rows of each synthetic table.
        synthetic_dataset_num_entries: samples of each synthetic split.
        synthetic_dataset_numerical_features: overrides `num_numerical_features` where given.
        synthetic_dataset_use_feature_spec: take table sizes, names and the number of numerical
            features of synthetic data from `dataset` and `feature_spec`.
        synthetic_dataset: published dataset, one of `SHAPES`, that gives synthetic_gpu and
            synthetic_disk their table sizes and ids per sample; None leaves them to the fields
            below.
        synthetic_dataset_max_table_size: maximum rows of a synthetic table; None is no limit.
        synthetic_dataset_hotness: maximum ids per synthetic sample and table, one number for all
            tables or one per table; None is one id each, without lengths.
        synthetic_ids: "uniform" over each table, or "power_law", which synthetic_random does not
            support.
        device: device on which synthetic_gpu makes its batches.
        verify_data: "first" compares files with the dataset's checksums before they are first read,
            "always" in every run, "never" not at all.
        allow_links: whether files of the dataset may be symbolic links that lead out of it.
        sample_weights: weight samples in the loss and in test metrics by the dataset's
            `weight.bin`, if it has one.

    Raises:
        ValueError: an impossible value; the message names the flag, the expectation and the value.
    """

    dataset: str | None = None
    dataset_type: str = "split"
    feature_spec: str = layout.FEATURE_SPEC
    batch_size: int = 32768
    test_batch_size: int = 32768
    shuffle_batch_order: bool = False
    dataset_subset: float | None = None
    set_aside: float = 0.0
    seed: int = 12345
    num_numerical_features: int = 13
    synthetic_dataset_dir: str = "/tmp/dlrm_sythetic_dataset"
    synthetic_dataset_table_sizes: tuple[int, ...] = _DEFAULT_TABLE_SIZES
    synthetic_dataset_num_entries: int = 2**25
    synthetic_dataset_numerical_features: int | None = None
    synthetic_dataset_use_feature_spec: bool = False
    synthetic_dataset: str | None = None
    synthetic_dataset_max_table_size: int | None = None
    synthetic_dataset_hotness: tuple[int, ...] | None = None
    synthetic_ids: str = "uniform"
    device: str = "cpu"
    verify_data: str = "first"
    allow_links: bool = False
    sample_weights: bool = True

    def __post_init__(self) -> None:
        _expect("dataset_type", self.dataset_type, tuple(DATASET_TYPES))
        _expect("verify_data", self.verify_data, VERIFY_DATA)
        _expect("synthetic_ids", self.synthetic_ids, IDS)
        for flag in ("batch_size", "test_batch_size", "synthetic_dataset_num_entries"):
            _expect_at_least(flag, getattr(self, flag), 1)
        for flag in ("num_numerical_features", "synthetic_dataset_numerical_features", "seed"):
            if getattr(self, flag) is not None:
                _expect_at_least(flag, getattr(self, flag), 0)
        for flag in ("num_numerical_features", "synthetic_dataset_numerical_features"):
            check_features(f"--{flag}", getattr(self, flag) or 0)
        if self.dataset_subset is not None and not 0 < self.dataset_subset <= 1:
            raise ValueError(
                f"--dataset_subset: expected a fraction in (0, 1], got {self.dataset_subset}"
            )
        if not 0 <= self.set_aside < 1:
            raise ValueError(f"--set_aside: expected a share in [0, 1), got {self.set_aside}")
        for flag in ("synthetic_dataset_table_sizes", "synthetic_dataset_hotness"):
            if (sizes := getattr(self, flag)) is not None:
                # A list from the command line becomes a tuple: the configuration stays hashable.
                object.__setattr__(self, flag, tuple(sizes))
                for size in sizes:
                    _expect_at_least(flag, size, 1)
        for size in self.synthetic_dataset_table_sizes:
            if size > layout.MAX_CARDINALITY:
                raise ValueError(
                    "--synthetic_dataset_table_sizes: expected at most "
                    f"{layout.MAX_CARDINALITY}, got {size}"
                )
        self._check_named_shape()
        self._check_memory()
        self._check_dataset()

    @property
    def synthetic_sizes(self) -> tuple[int, ...]:
        """Rows of each synthetic table."""
        named, limit = (
            SHAPES.get(self.synthetic_dataset or ""),
            self.synthetic_dataset_max_table_size,
        )
        sizes = named.table_sizes if named else self.synthetic_dataset_table_sizes
        return sizes if limit is None else tuple(min(size, limit) for size in sizes)

    @property
    def synthetic_hotness(self) -> tuple[int, ...] | None:
        """Returns the maximum ids of a synthetic sample, like `synthetic_dataset_hotness`."""
        named = SHAPES.get(self.synthetic_dataset or "")
        return named.hotness if named else self.synthetic_dataset_hotness

    @property
    def has_clicks(self) -> bool:
        """Returns whether labels are clicks, 0 or 1; fractions, the alternative, have no AUC."""
        return self.dataset_type != "synthetic_random"

    def _check_named_shape(self) -> None:
        if (limit := self.synthetic_dataset_max_table_size) is not None:
            _expect_at_least("synthetic_dataset_max_table_size", limit, 1)
        if (name := self.synthetic_dataset) is None:
            return
        _expect("synthetic_dataset", name, tuple(SHAPES))
        if self.dataset_type not in ("synthetic_gpu", "synthetic_disk"):
            raise ValueError(
                f"--synthetic_dataset {name}: expected --dataset_type synthetic_gpu or "
                f"synthetic_disk, got {self.dataset_type}"
            )
        flags = {
            "table_sizes": self.synthetic_dataset_table_sizes != _DEFAULT_TABLE_SIZES,
            "hotness": self.synthetic_dataset_hotness is not None,
            "use_feature_spec": self.synthetic_dataset_use_feature_spec,
        }
        if given := [f"--synthetic_dataset_{flag}" for flag, is_set in flags.items() if is_set]:
            raise ValueError(
                f"--synthetic_dataset {name} contradicts {given[0]}; "
                "--synthetic_dataset_max_table_size limits its tables"
            )

    def _check_memory(self) -> None:
        """Refuses random batches that are larger than the memory."""
        tables, bags = self.synthetic_sizes, self.synthetic_hotness or (1,)
        most = bags[0] * len(tables) if len(bags) == 1 else sum(bags)
        ids = most if self.synthetic_dataset else most / 2  # half of it on average
        samples = max(self.batch_size, self.test_batch_size)
        if self.dataset_type.startswith("synthetic"):
            samples = min(samples, self.synthetic_dataset_num_entries)
            what = f"--synthetic_dataset_hotness {','.join(map(str, bags[:4]))}, {samples} samples"
            check_memory(int(4 * ids * samples), what)

    def _check_dataset(self) -> None:
        if self.synthetic_dataset_hotness is not None and self.dataset_type not in _MULTI_HOT:
            kinds = f"{', '.join(_MULTI_HOT[:-1])} or {_MULTI_HOT[-1]}"
            raise ValueError(
                f"--synthetic_dataset_hotness: expected --dataset_type {kinds}, got "
                f"{self.dataset_type}"
            )
        if self.dataset_type == "synthetic_random" and self.synthetic_ids != "uniform":
            raise ValueError(
                f"--synthetic_ids {self.synthetic_ids}: expected uniform for --dataset_type "
                "synthetic_random"
            )
        synthetic = self.dataset_type.startswith("synthetic")
        if synthetic and self.set_aside:
            raise ValueError(
                f"--set_aside {self.set_aside}: expected rows of a dataset, got --dataset_type "
                f"{self.dataset_type}"
            )
        if not synthetic and self.synthetic_dataset_use_feature_spec:
            raise ValueError(
                "--synthetic_dataset_use_feature_spec: expected --dataset_type synthetic_gpu, "
                f"synthetic_random or synthetic_disk, got {self.dataset_type}"
            )
        if self.dataset is None and (not synthetic or self.synthetic_dataset_use_feature_spec):
            reason = (
                "--synthetic_dataset_use_feature_spec"
                if synthetic
                else f"--dataset_type {self.dataset_type}"
            )
            raise ValueError(f"--dataset: expected the dataset's directory for {reason}, got none")


def _expect(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"--{flag}: expected one of {', '.join(choices)}, got {value!r}")


def _expect_at_least(flag: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"--{flag}: expected an integer of {least} or more, got {value!r}")


def open_datasets(config: DataConfig, shard: Shard | None = None) -> Datasets:
    """Opens the splits of the dataset that `config` describes, and checks their files' sizes.

    Args:
        config: the data to open.
        shard: part of every batch that this process reads; None is everything.

    Raises:
        FileNotFoundError, NotADirectoryError: a directory or file is missing.
        ValueError: a specification breaks a rule, a file has a wrong size or is damaged, or there
            are no training rows.
    """
    kind = DATASET_TYPES[config.dataset_type]
    if kind in ("split", "synthetic_disk"):  # files of columns, of which a shard reads its own
        if kind == "split":
            verifier = _verifier(described_directory(config), config)
            spec = _load_spec(config)
        else:
            spec = _synthetic_on_disk(config)
            verifier = _verifier(spec.directory, config)
        datasets = _split_datasets(spec, config, shard or Shard(), verifier)
    else:
        datasets = _open_binary(config) if kind == "binary" else _open_in_memory(config)
        if shard is not None:
            sharded = {name: Sharded(dataset, shard) for name, dataset in datasets.named().items()}
            others = sharded.get("validation"), sharded.get("set_aside")
            datasets = Datasets(sharded["train"], sharded["test"], *others)
    _check_rows(datasets, config)
    return datasets


def _check_rows(datasets: Datasets, config: DataConfig) -> None:
    rows, share = datasets.rows(), f"--set_aside {config.set_aside}"
    if config.set_aside and not (rows["train"] and rows["set_aside"]):
        raise ValueError(
            f"{share}: expected training rows to set aside and others to train on, got "
            f"{rows['set_aside']:,} and {rows['train']:,} in {config.dataset}"
        )
    if config.set_aside and rows["test"] and rows.get("validation"):
        raise ValueError(
            f"{share}: expected a dataset without test or without validation rows, got "
            f"{config.dataset}, whose test rows choose the best weights and whose validation rows "
            "report"
        )
    if not rows["train"]:
        raise ValueError(f"{config.dataset}: the training split has no rows")


def described_directory(config: DataConfig) -> Path:
    """Returns the directory of a split dataset's specification, rows and transform.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such dataset.
    """
    return (_dataset_directory(config) / config.feature_spec).parent


def fitted_directory(config: DataConfig) -> Path | None:
    """Returns the directory of a dataset's rows and fitted transform; None if rows are synthetic.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such dataset.
    """
    kind = DATASET_TYPES[config.dataset_type]
    if kind == "split":
        return described_directory(config)
    return Path(config.dataset) if kind == "binary" and config.dataset else None


def _verifier(directory: Path, config: DataConfig) -> Verifier:
    """Checks a dataset's description, and returns the verifier of its rows."""
    verifier = Verifier(directory, layout.KIND, config.verify_data, config.allow_links)
    spec = Path(config.feature_spec).name
    verifier.check_names(spec, layout.MODEL_SIZE, layout.TRANSFORM)
    return verifier


def _split_datasets(
    spec: FeatureSpec, config: DataConfig, shard: Shard, verifier: Verifier
) -> Datasets:
    _check_manifest(spec)
    size, subset = config.test_batch_size, config.dataset_subset or 1.0
    weights = config.sample_weights
    kept = 1 - config.set_aside
    reading = shard, verifier, weights
    train = SplitDataset(spec, "train", config.batch_size, subset, *reading, (0.0, kept))
    test, validation = (
        SplitDataset(spec, split, size, 1.0, *reading) if split in spec.splits else None
        for split in ("test", "validation")
    )
    assert test is not None
    aside = None
    if config.set_aside:
        aside = SplitDataset(spec, "train", size, 1.0, *reading, (kept, 1.0))
    return Datasets(train, test, validation, aside)


def _check_manifest(spec: FeatureSpec) -> None:
    """Compares our own datasets with their manifests; `num_rows` checks the sizes of others."""
    manifest = layout.read_dataset_manifest(spec.directory, spec.allow_links)
    if manifest is None:
        return
    rows = {split: spec.num_rows(split) for split in spec.splits}
    if manifest["rows"] != rows:
        raise ValueError(
            f"{spec.directory}: expected the rows of the manifest, {manifest['rows']}, got {rows}"
        )
    if manifest["cardinalities"] != spec.cardinalities:
        raise ValueError(
            f"{spec.path}: expected the cardinalities of the manifest, "
            f"{manifest['cardinalities']}, got {spec.cardinalities}"
        )


def _load_spec(config: DataConfig) -> FeatureSpec:
    directory = _dataset_directory(config)
    path = directory / config.feature_spec
    if path.is_file():
        return FeatureSpec.load(path, config.allow_links)
    if config.feature_spec == layout.FEATURE_SPEC and (directory / layout.MODEL_SIZE).is_file():
        return FeatureSpec.load(directory, config.allow_links)
    hint = (
        "; it has train_data.bin: --dataset_type binary reads that"
        if (directory / BINARY_FILES["train"][0]).is_file()
        else ""
    )
    raise FileNotFoundError(
        f"{directory}: expected {config.feature_spec} (or the {layout.MODEL_SIZE} of a dataset of "
        f"2020), found neither{hint}"
    )


def _dataset_directory(config: DataConfig) -> Path:
    assert config.dataset is not None
    directory = Path(config.dataset)
    if not directory.exists():
        raise FileNotFoundError(f"{directory}: no such dataset directory (--dataset)")
    if not directory.is_dir():
        raise NotADirectoryError(
            f"{directory}: expected a dataset directory (--dataset), got a file"
        )
    return directory


def _open_binary(config: DataConfig) -> Datasets:
    directory = _dataset_directory(config)
    verifier = _verifier(directory, config)
    kept, whole = 1 - config.set_aside, (0.0, 1.0)
    train, test, validation, aside = (
        open_binary(
            directory,
            split,
            config.num_numerical_features,
            size,
            subset,
            verifier,
            config.allow_links,
            part,
        )
        for split, size, subset, part in (
            ("train", config.batch_size, config.dataset_subset or 1.0, (0.0, kept)),
            ("test", config.test_batch_size, 1.0, whole),
            ("validation", config.test_batch_size, 1.0, whole),
            ("train", config.test_batch_size, 1.0, (kept, 1.0)),
        )
    )
    assert train is not None
    assert test is not None
    return Datasets(train, test, validation, aside if config.set_aside else None)


def _open_in_memory(config: DataConfig) -> Datasets:
    spec = _synthetic_spec(config)
    options: dict[str, Any] = {"seed": config.seed, "hotness": config.synthetic_hotness}
    kind: type[SyntheticDataset] = RandomDataset
    if config.dataset_type == "synthetic_gpu":
        kind = SyntheticDataset
        options |= {"ids": config.synthetic_ids, "device": config.device}
        options |= {"fixed_lengths": config.synthetic_dataset is not None}
    num_samples, subset = config.synthetic_dataset_num_entries, config.dataset_subset or 1.0
    train = kind(spec, "train", num_samples, config.batch_size, subset=subset, **options)
    test = kind(spec, "test", num_samples, config.test_batch_size, **options)
    return Datasets(train, test, None)


def _synthetic_on_disk(config: DataConfig) -> FeatureSpec:
    return ensure_synthetic_dataset(
        config.synthetic_dataset_dir,
        _synthetic_spec(config),
        config.synthetic_dataset_num_entries,
        seed=config.seed,
        ids=config.synthetic_ids,
        fixed_lengths=config.synthetic_dataset is not None,
    )


def _synthetic_spec(config: DataConfig) -> FeatureSpec:
    if config.synthetic_dataset_use_feature_spec:
        return _load_spec(config)
    num_numerical = config.synthetic_dataset_numerical_features
    if num_numerical is None:
        num_numerical = config.num_numerical_features
    sizes, hotness = config.synthetic_sizes, config.synthetic_hotness
    spec = FeatureSpec.default(config.synthetic_dataset_dir, num_numerical, sizes)
    if hotness is None or config.dataset_type != "synthetic_disk":
        return spec
    longest = hotness * len(sizes) if len(hotness) == 1 else hotness
    if len(longest) != len(sizes):
        raise ValueError(
            f"--synthetic_dataset_hotness: expected one number, or one for each of {len(sizes)} "
            f"tables, got {len(longest)}"
        )
    lists = {
        name: ListField(most)
        for name, most in zip(spec.categorical, longest, strict=True)
        if most > 1
    }
    cardinalities = dict(zip(spec.categorical, sizes, strict=True))
    numerical, splits = spec.numerical, spec.splits
    return FeatureSpec.named(spec.path, spec.label, numerical, cardinalities, splits, lists=lists)
