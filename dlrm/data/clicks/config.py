"""The data that a training reads, as a configuration without torch."""

from dataclasses import dataclass
from functools import partial

from dlrm.data import names
from dlrm.data.choices import VERIFY_DATA
from dlrm.limits import check_features, check_memory
from dlrm.settings import check_settings, setting

_WITH_SHAPES = ("synthetic_gpu", "synthetic_disk")
_SYNTHETIC = ("synthetic_gpu", "synthetic_random", "synthetic_disk")
# Each type and its reader; "memmap" is NVIDIA's name of 2020, "parametric" that of 2021.
DATASET_TYPES = dict.fromkeys(("split", "memmap", "parametric"), "split")
DATASET_TYPES |= {name: name for name in ("binary", *_SYNTHETIC)}
IDS = ("uniform", "power_law")
_DEFAULT_TABLE_SIZES = (100_000,) * 26
# DLRM-DCNv2 of MLPerf Training: the arguments of materialize_synthetic_multihot_dataset.py in
# mlcommons/training, recommendation_v2/torchrec_dlrm.
_MLPERF_SIZES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000),
    *(3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000),
    *(40_000_000, 590_152, 12_973, 108, 36),
)
_MLPERF_HOTNESS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
_synthetic_setting = partial(setting, topic="Synthetic data")


@dataclass(frozen=True)
class DataConfig:
    """The data to read, and the way to read them; field names are those of the flags.

    Attributes:
        device: device on which synthetic_gpu makes its batches.

    Raises:
        ValueError: an impossible value; the message names the flag, the expectation and the value.
    """

    dataset: str | None = setting(None, "Directory of the dataset", resumable=True, uri="read")
    dataset_type: str = setting(
        "split",
        "Type of the dataset; memmap and parametric are other names of split. synthetic_random "
        "has fractions instead of clicks as targets",
        choices=DATASET_TYPES,
    )
    feature_spec: str = setting(
        names.FEATURE_SPEC, "Name of the file in --dataset that describes its features"
    )
    batch_size: int = setting(32768, "Samples of a training batch, all processes together", least=1)
    test_batch_size: int = setting(
        32768,
        "Samples of a test or validation batch, all processes together",
        resumable=True,
        least=1,
    )
    shuffle_batch_order: bool = setting(
        False, "Read the training batches in random order", short_name="shuffle"
    )
    dataset_subset: float | None = setting(
        None, "Fraction of the training batches to use, in (0,1]; default: all", above=0, most=1
    )
    set_aside: float = setting(
        0.0,
        "Share of the training rows, the last ones, that choose the best weights instead of "
        "training, for a dataset without validation rows, whose test rows then report; default: "
        "0, or 0.1 with --recipe auto",
        least=0,
        below=1,
    )
    seed: int = setting(12345, "Random seed", topic="Run", least=0, most=2**63 - 1)
    num_numerical_features: int = setting(
        13,
        "Number of numerical features of a binary or synthetic dataset; ignored for others, which "
        "state theirs",
        least=0,
    )
    synthetic_dataset_dir: str = _synthetic_setting(
        "/tmp/dlrm_sythetic_dataset",
        "Directory that --dataset_type synthetic_disk writes to",
        resumable=True,
    )
    synthetic_dataset_table_sizes: tuple[int, ...] = _synthetic_setting(
        _DEFAULT_TABLE_SIZES,
        "Rows of each embedding table of the synthetic dataset",
        least=1,
        most=names.MAX_CARDINALITY,
    )
    synthetic_dataset_num_entries: int = _synthetic_setting(
        2**25, "Samples per epoch of the synthetic dataset", topic="Synthetic data", least=1
    )
    synthetic_dataset_numerical_features: int | None = _synthetic_setting(
        None,
        "Number of numerical features of the synthetic dataset; default: --num_numerical_features",
        least=0,
    )
    synthetic_dataset_use_feature_spec: bool = _synthetic_setting(
        False, "Take the shapes of the synthetic dataset from --dataset and --feature_spec"
    )
    synthetic_dataset: str | None = _synthetic_setting(
        None,
        "Use the table sizes and the ids per sample of a published dataset, for synthetic_gpu and "
        "synthetic_disk; mlperf: MLPerf's DLRM-DCNv2",
        choices=("mlperf",),
    )
    synthetic_dataset_max_table_size: int | None = _synthetic_setting(
        None, "Maximum rows of a synthetic table; default: no limit", least=1
    )
    synthetic_dataset_hotness: tuple[int, ...] | None = _synthetic_setting(
        None,
        "Maximum ids per sample and synthetic table, one number for all tables or one per table; "
        "each sample draws 1 to this many; default: always one id",
        least=1,
    )
    synthetic_ids: str = _synthetic_setting(
        "uniform", "Distribution of the ids of the synthetic dataset", choices=IDS
    )
    device: str = "cpu"
    verify_data: str = setting(
        "first",
        "Compare the dataset's files with its checksums: first, before their first use; always, "
        "in every run; never",
        choices=VERIFY_DATA,
        resumable=True,
    )
    allow_links: bool = setting(
        False,
        "Allow files of the dataset to be symbolic links to files outside its directory",
        resumable=True,
    )
    sample_weights: bool = setting(
        True, "Weight samples in the loss and in test metrics, if the dataset has weights"
    )

    def __post_init__(self) -> None:
        for flag in ("synthetic_dataset_table_sizes", "synthetic_dataset_hotness"):
            if (sizes := getattr(self, flag)) is not None:
                # A list from the command line becomes a tuple: the configuration stays hashable.
                object.__setattr__(self, flag, tuple(sizes))
        check_settings(self)
        for flag in ("num_numerical_features", "synthetic_dataset_numerical_features"):
            check_features(f"--{flag}", getattr(self, flag) or 0)
        self._check_types()
        if self.dataset_type in _SYNTHETIC:
            self._check_memory()

    @property
    def synthetic_sizes(self) -> tuple[int, ...]:
        """Rows of each synthetic table."""
        limit = self.synthetic_dataset_max_table_size
        sizes = _MLPERF_SIZES if self.synthetic_dataset else self.synthetic_dataset_table_sizes
        return sizes if limit is None else tuple(min(size, limit) for size in sizes)

    @property
    def synthetic_hotness(self) -> tuple[int, ...] | None:
        """Returns the maximum ids of a synthetic sample, like `synthetic_dataset_hotness`."""
        return _MLPERF_HOTNESS if self.synthetic_dataset else self.synthetic_dataset_hotness

    @property
    def has_clicks(self) -> bool:
        """Returns whether labels are clicks, 0 or 1; fractions, the alternative, have no AUC."""
        return self.dataset_type != "synthetic_random"

    def _check_types(self) -> None:
        """Refuses settings that the type of the dataset does not take, or that contradict."""
        shape = {
            "table_sizes": self.synthetic_dataset_table_sizes != _DEFAULT_TABLE_SIZES,
            "hotness": self.synthetic_dataset_hotness is not None,
            "use_feature_spec": self.synthetic_dataset_use_feature_spec,
        }
        of_files = tuple(name for name in DATASET_TYPES if name not in _SYNTHETIC)
        of_clicks = tuple(name for name in DATASET_TYPES if name != "synthetic_random")
        for flag, given, types in (
            ("set_aside", self.set_aside > 0, of_files),
            ("synthetic_ids", self.synthetic_ids != "uniform", of_clicks),
            ("synthetic_dataset", bool(self.synthetic_dataset), _WITH_SHAPES),
            ("synthetic_dataset_hotness", shape["hotness"], _SYNTHETIC),
            ("synthetic_dataset_use_feature_spec", shape["use_feature_spec"], _SYNTHETIC),
        ):
            if given and self.dataset_type not in types:
                raise ValueError(
                    f"--{flag}: expected --dataset_type {', '.join(types[:-1])} or {types[-1]}, "
                    f"got {self.dataset_type}"
                )
        flags = [name for name, given in shape.items() if given]
        if self.synthetic_dataset and flags:
            raise ValueError(
                f"--synthetic_dataset {self.synthetic_dataset} contradicts "
                f"--synthetic_dataset_{flags[0]}; --synthetic_dataset_max_table_size limits its "
                "tables"
            )
        by_spec = shape["use_feature_spec"]
        if self.dataset is None and (by_spec or self.dataset_type in of_files):
            flag = f"--dataset_type {self.dataset_type}"
            reason = "--synthetic_dataset_use_feature_spec" if by_spec else flag
            raise ValueError(f"--dataset: expected the dataset's directory for {reason}, got none")

    def _check_memory(self) -> None:
        """Refuses random batches that are larger than the memory."""
        tables, bags = self.synthetic_sizes, self.synthetic_hotness or (1,)
        most = bags[0] * len(tables) if len(bags) == 1 else sum(bags)
        ids = most if self.synthetic_dataset else most / 2  # half of it on average
        samples = max(self.batch_size, self.test_batch_size)
        samples = min(samples, self.synthetic_dataset_num_entries)
        what = f"--synthetic_dataset_hotness {','.join(map(str, bags[:4]))}, {samples} samples"
        check_memory(int(4 * ids * samples), what)
