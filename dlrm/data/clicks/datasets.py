"""Opens the dataset of clicks that a configuration names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlrm.data import layout
from dlrm.data.bags import ListField
from dlrm.data.clicks.batch import ClickDataset, Shard, Sharded
from dlrm.data.clicks.config import DATASET_TYPES, DataConfig
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import BINARY_FILES, BinaryDataset, SplitDataset, open_binary
from dlrm.data.clicks.synthetic import (
    RandomDataset,
    SyntheticDataset,
    each_hotness,
    ensure_synthetic_dataset,
)
from dlrm.data.verification import Verifier


@dataclass(frozen=True)
class Datasets:
    """The splits of a dataset.

    Attributes:
        train: the rows to train on.
        test: the rows of `test/`.
        validation: the rows of `validation/`; None if there is none.
        set_aside: the last training rows, which are not in `train`; None if none are set aside.
    """

    train: ClickDataset
    test: ClickDataset
    validation: ClickDataset | None = None
    set_aside: ClickDataset | None = None

    def named(self) -> dict[str, ClickDataset]:
        """Returns the splits that there are, by name."""
        return {name: dataset for name, dataset in vars(self).items() if dataset is not None}

    def row_text(self, split: str, row: int) -> str:
        """Returns the words for a row of a split; a row set aside has its number in the file."""
        if split != "set_aside":
            return f"{split} row {row}"
        assert self.set_aside is not None
        return f"train row {self.set_aside.rows(0)[0] + row} (set aside)"

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each split, by name."""
        return {name: dataset.num_samples for name, dataset in self.named().items()}


class Source:
    """An opened dataset, which is divided into splits and batches without opening it again.

    Args:
        config: the data to open. Descriptions of a dataset are compared with its checksums as
            `verify_data` says.

    Raises:
        FileNotFoundError, NotADirectoryError: a directory or file is missing.
        ValueError: a specification breaks a rule, or a description is damaged.
    """

    def __init__(self, config: DataConfig) -> None:
        openers = {"split": _split, "synthetic_disk": _split, "binary": _binary}
        self._open_split = openers.get(DATASET_TYPES[config.dataset_type], _in_memory)(config)

    def splits(
        self, config: DataConfig, shard: Shard | None = None, verified: bool = True
    ) -> Datasets:
        """Returns the splits of the dataset, and checks their files' sizes.

        Args:
            config: the data as it was opened, with any sizes of batches and shares of rows.
            shard: part of every batch that this process reads; None is everything.
            verified: whether files are compared with the checksums before they are read.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file has a wrong size or is damaged, or there are no training rows.
        """
        open_split = partial(self._open_split, shard=shard, verified=verified)
        subset, share, size = config.dataset_subset or 1.0, config.set_aside, config.test_batch_size
        datasets = Datasets(
            open_split("train", batch_size=config.batch_size, subset=subset, part=(0.0, 1 - share)),
            open_split("test", batch_size=size),
            open_split("validation", batch_size=size),
            open_split("train", batch_size=size, part=(1 - share, 1.0)) if share else None,
        )
        rows = datasets.rows()
        if share and not (rows["train"] and rows["set_aside"]):
            raise ValueError(
                f"--set_aside {share}: expected training rows to set aside and others to train on, "
                f"got {rows['set_aside']:,} and {rows['train']:,} in {config.dataset}"
            )
        if share and rows["test"] and rows.get("validation"):
            raise ValueError(
                f"--set_aside {share}: expected a dataset without test or without validation rows, "
                f"got {config.dataset}, whose test rows choose the best weights and whose "
                "validation rows report"
            )
        if not rows["train"]:
            raise ValueError(f"{config.dataset}: the training split has no rows")
        return datasets


def open_datasets(config: DataConfig, shard: Shard | None = None) -> Datasets:
    """Opens the splits of the dataset that `config` describes; see `Source`, also for errors.

    Args:
        config: the data to open.
        shard: part of every batch that this process reads; None is everything.
    """
    return Source(config).splits(config, shard)


def fitted_directory(config: DataConfig) -> Path | None:
    """Returns the directory of a dataset's rows and fitted transform; None if rows are synthetic.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such dataset.
    """
    dataset_type = DATASET_TYPES[config.dataset_type]
    if dataset_type == "split":
        return (_dataset_directory(config) / config.feature_spec).parent
    return Path(config.dataset) if dataset_type == "binary" and config.dataset else None


# Takes a split's name, `shard`, `verified`, and `batch_size`, `subset` and `part`.
_Opener = Callable[..., Any]


def _split(config: DataConfig) -> _Opener:
    if (directory := fitted_directory(config)) is not None:
        verifier = _verifier(directory, config)
        spec = _load_spec(config)
    else:
        spec = ensure_synthetic_dataset(
            config.synthetic_dataset_dir,
            _synthetic_spec(config),
            config.synthetic_dataset_num_entries,
            seed=config.seed,
            ids=config.synthetic_ids,
            fixed_lengths=config.synthetic_dataset is not None,
        )
        verifier = _verifier(spec.directory, config)
    _check_manifest(spec)

    def open_split(
        split: str, shard: Shard | None, verified: bool, **options: Any
    ) -> SplitDataset | None:
        if split not in spec.splits:
            return None
        options |= {"shard": shard or Shard(), "verifier": verifier if verified else None}
        return SplitDataset(spec, split, sample_weights=config.sample_weights, **options)

    return open_split


def _binary(config: DataConfig) -> _Opener:
    directory = _dataset_directory(config)
    verifier = _verifier(directory, config)

    def open_split(
        split: str, shard: Shard | None, verified: bool, **options: Any
    ) -> BinaryDataset | None:
        options |= {"shard": shard or Shard(), "verifier": verifier if verified else None}
        links, numerical = config.allow_links, config.num_numerical_features
        return open_binary(directory, split, numerical, allow_links=links, **options)

    return open_split


def _in_memory(config: DataConfig) -> _Opener:
    spec, num_samples = _synthetic_spec(config), config.synthetic_dataset_num_entries
    options: dict[str, Any] = {"seed": config.seed, "hotness": config.synthetic_hotness}
    dataset_class: type[SyntheticDataset] = RandomDataset
    if config.dataset_type == "synthetic_gpu":
        dataset_class = SyntheticDataset
        options |= {"ids": config.synthetic_ids, "device": config.device}
        options |= {"fixed_lengths": config.synthetic_dataset is not None}

    def open_split(
        split: str, shard: Shard | None, verified: bool, **others: Any
    ) -> ClickDataset | None:
        if split == "validation":
            return None
        dataset = dataset_class(spec, split, num_samples, **options, **others)
        return dataset if shard is None else Sharded(dataset, shard)

    return open_split


def _verifier(directory: Path, config: DataConfig) -> Verifier:
    """Checks a dataset's description, and returns the verifier of its rows."""
    verifier = Verifier(directory, layout.KIND, config.verify_data, config.allow_links)
    spec = Path(config.feature_spec).name
    verifier.check_names(spec, layout.MODEL_SIZE, layout.TRANSFORM)
    return verifier


def _check_manifest(spec: FeatureSpec) -> None:
    """Compares our own datasets with their manifests."""
    manifest = layout.read_dataset_manifest(spec.directory, spec.allow_links)
    if manifest is None:
        return
    rows = {split: spec.num_rows(split) for split in spec.splits}
    for name, got in (("rows", rows), ("cardinalities", spec.cardinalities)):
        if manifest[name] != got:
            raise ValueError(
                f"{spec.path}: expected the {name} of the manifest, {manifest[name]}, got {got}"
            )


def _load_spec(config: DataConfig) -> FeatureSpec:
    directory = _dataset_directory(config)
    path = directory / config.feature_spec
    if path.is_file():
        return FeatureSpec.load(path, config.allow_links)
    if config.feature_spec == layout.FEATURE_SPEC and (directory / layout.MODEL_SIZE).is_file():
        return FeatureSpec.load(directory, config.allow_links)
    hint = ""
    if (directory / BINARY_FILES["train"][0]).is_file():
        hint = "; it has train_data.bin: --dataset_type binary reads that"
    elif (below := directory / "binary_dataset").is_dir():  # of the commands for logs
        hint = f"; the dataset is {below}"
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


def _synthetic_spec(config: DataConfig) -> FeatureSpec:
    if config.synthetic_dataset_use_feature_spec:
        return _load_spec(config)
    num_numerical, sizes = config.synthetic_dataset_numerical_features, config.synthetic_sizes
    if num_numerical is None:
        num_numerical = config.num_numerical_features
    lists = dict[int, ListField]()
    if config.synthetic_hotness is not None and config.dataset_type == "synthetic_disk":
        longest = enumerate(each_hotness(config.synthetic_hotness, len(sizes)))
        lists = {table: ListField(most) for table, most in longest if most > 1}
    return FeatureSpec.default(config.synthetic_dataset_dir, num_numerical, sizes, lists=lists)
