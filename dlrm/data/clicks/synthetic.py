"""Synthetic samples, made in memory for every batch or written to disk once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.data import layout
from dlrm.data.bags import WEIGHTS_DTYPE
from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.files import atomic_directory, check_owned
from dlrm.limits import check_disk

POWER_LAW_EXPONENT = 1.45  # that of NVIDIA's generator of synthetic Criteo data
_ROWS_PER_WRITE = 65536
_IDS_PER_BLOCK = 8192


class SyntheticDataset(ClickDataset):
    """Random samples: numericals uniform in [0, 1), labels 0 or 1 with even odds.

    Uniform ids cover each whole table. Power-law ids follow a Zipf-like law: the probability of id
    k is that of x^-1.45 between k + 1 and k + 2, so id 0 is the most frequent. With `hotness`, bag
    lengths are uniform over 1 to the table's hotness, or always equal to it.

    Batch `index` depends on (seed, split, index), the sizes and the kind of device alone. On the
    CPU 4096 samples of 26 tables take 0.5 ms with uniform, 0.9 ms with power-law ids (Zen 4, one
    thread).

    Args:
        spec: table sizes, feature names and number of numerical features.
        seed: 0 or more.
        ids: "uniform" or "power_law".
        hotness: maximum ids of a bag, one number for all tables or one per table; None: those of
            the specification's lists or, if it has none, batches without lengths, with one id for
            each table.
        fixed_lengths: whether every bag has the maximum number of ids.
        rows: `subset` and `part`, see `BatchedRows`.

    Raises:
        ValueError: a table is too large, or the hotness has another number of tables.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        split: str,
        num_samples: int,
        batch_size: int,
        *,
        seed: int,
        ids: str = "uniform",
        hotness: Sequence[int] | None = None,
        fixed_lengths: bool = False,
        device: str | torch.device = "cpu",
        **rows: Any,
    ) -> None:
        super().__init__(num_samples, batch_size, **rows)
        self.table_sizes, self.categorical_names = spec.cardinalities, list(spec.categorical)
        self.num_numerical = len(spec.numerical)
        for name, size in zip(self.categorical_names, self.table_sizes, strict=True):
            if size > 2**31:
                raise ValueError(f"feature {name}: expected at most 2**31 rows, got {size}")
        if hotness is None and spec.lists:
            longest = {name: field.max_length for name, field in spec.lists.items()}
            hotness = [longest.get(name, 1) for name in self.categorical_names]
        self.one_id_each, self._hotness = hotness is None, None
        if hotness is not None:
            self._hotness = np.array(each_hotness(hotness, len(self.table_sizes)), np.uint64)
        self._fixed_lengths, self._power_law = fixed_lengths, ids == "power_law"
        self._seed, self._device = (seed, layout.SPLITS.index(split)), torch.device(device)

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`."""
        start, stop = self.rows(index)
        seed = [*self._seed, index]
        if self._device.type == "cpu":
            return self._make_with_numpy(stop - start, np.random.Generator(np.random.SFC64(seed)))
        random = torch.Generator(self._device)
        random.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
        return self._make_with_torch(stop - start, random)

    def _make_with_numpy(self, num_samples: int, random: np.random.Generator) -> Batch:
        # Not torch: its CPU generator is half as fast, and it starts threads in each reader.
        ids, lengths = self._draw_ids(num_samples, random)
        numerical = random.random((num_samples, self.num_numerical), np.float32)
        return Batch.from_numpy(numerical, ids, self._draw_labels(num_samples, random), lengths)

    def _draw_labels(self, num_samples: int, random: np.random.Generator) -> np.ndarray:
        return random.integers(0, 2, num_samples, np.uint8).astype(np.float32)

    def _draw_ids(
        self, num_samples: int, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the ids, and the lengths of bags, if any; see `Batch`."""
        sizes = np.array(self.table_sizes, np.float64 if self._power_law else np.uint64)
        draw = _draw_power_law_ids if self._power_law else _draw_uniform_ids
        # In blocks whose temporaries fit the nearest cache and are reused by the allocator.
        if self._hotness is None:
            ids: np.ndarray = np.empty((num_samples, len(sizes)), np.int32)
            rows = max(2, _IDS_PER_BLOCK // max(1, len(sizes)) & -2)
            for start in range(0, num_samples, rows):
                draw(random, sizes, ids[start : start + rows])
            return ids, None
        lengths = np.empty((num_samples, len(sizes)), np.int32)
        if self._fixed_lengths:
            lengths[:] = self._hotness
        else:
            _draw_uniform_ids(random, self._hotness, lengths)
            lengths += 1
        sizes = np.tile(sizes, num_samples).repeat(lengths.ravel())
        ids = np.empty(len(sizes), np.int32)
        for start in range(0, len(ids), _IDS_PER_BLOCK):
            block = slice(start, start + _IDS_PER_BLOCK)
            draw(random, sizes[block], ids[block])
        return ids, lengths

    def _make_with_torch(self, num_samples: int, random: torch.Generator) -> Batch:
        options: dict[str, Any] = {"generator": random, "device": self._device}
        shape: tuple[int, ...] = (num_samples, len(self.table_sizes))
        sizes, lengths = torch.tensor(self.table_sizes, device=self._device), None
        if self._hotness is not None:
            most = torch.tensor(self._hotness.tolist(), device=self._device)
            if self._fixed_lengths:
                lengths = most.int().repeat(num_samples, 1)
            else:
                lengths = (torch.randint(2**32, shape, **options) * most >> 32).int() + 1
            sizes = sizes.repeat(num_samples).repeat_interleave(lengths.flatten())
            shape = tuple(sizes.shape)
        if self._power_law:
            uniform = torch.rand(shape, dtype=torch.float64, **options)
            ids = torch.minimum(_power_law(uniform, sizes.double()), sizes.double()).int() - 1
        else:
            ids = (torch.randint(2**32, shape, **options) * sizes >> 32).int()
        numerical = torch.rand(num_samples, self.num_numerical, **options)
        labels = torch.randint(2, (num_samples,), **options).float()
        return Batch(numerical, ids, labels, lengths)


class RandomDataset(SyntheticDataset):
    """The random samples of Meta's DLRM, which Habana's medium configuration is trained on.

    Numericals and targets are uniform in [0, 1), ids uniform over their table. With `hotness` a bag
    draws round(max(1, U * hotness)) ids, each round(U * (rows - 1)), where U is uniform in [0, 1).
    Repeated ids are kept once, in ascending order (facebookresearch/dlrm,
    `generate_uniform_input_batch`).

    Batches are made on the CPU, so that they are the same on every device. 512 samples of 1024
    numericals and one table of 3 million rows with a hotness of 38 take 1.3 ms (Xeon, one thread).

    The arguments are those of `SyntheticDataset`, except `ids` and `device`.
    """

    def _draw_labels(self, num_samples: int, random: np.random.Generator) -> np.ndarray:
        return random.random(num_samples, np.float32)

    def _draw_ids(
        self, num_samples: int, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray | None]:
        shape = (num_samples, len(self.table_sizes))
        last = np.broadcast_to(np.array(self.table_sizes, np.int64) - 1, shape)
        if self._hotness is None:
            return np.rint(random.random(shape) * last).astype(np.int32), None
        drawn = np.rint(np.maximum(1, random.random(shape) * self._hotness)).astype(np.int64)
        bags = np.arange(drawn.size).repeat(drawn.ravel())
        ids = np.rint(random.random(len(bags)) * last.ravel()[bags]).astype(np.int64)
        bags, ids = np.divmod(np.unique(bags << 32 | ids), 1 << 32)  # ids are below 2**31
        lengths = np.bincount(bags, minlength=drawn.size).reshape(shape)
        return ids.astype(np.int32), lengths.astype(np.int32)


def each_hotness(hotness: Sequence[int], num_tables: int) -> list[int]:
    """Returns the maximum number of ids of each table, from one number for all or one for each."""
    if len(hotness) not in (1, num_tables):
        raise ValueError(
            f"--synthetic_dataset_hotness: expected one number, or one for each of {num_tables} "
            f"tables, got {len(hotness)}"
        )
    return [*hotness] * num_tables if len(hotness) == 1 else [*hotness]


def _draw_uniform_ids(random: np.random.Generator, sizes: np.ndarray, out: np.ndarray) -> None:
    """Fills `out` with floor(word / 2**32 * size), with a random word of 32 bits for each id."""
    words = random.integers(0, 2**64, (out.size + 1) // 2, np.uint64).view(np.uint32)
    scaled = np.multiply(words[: out.size].reshape(out.shape), sizes, dtype=np.uint64)
    np.right_shift(scaled, np.uint64(32), out=out, casting="unsafe")


def _draw_power_law_ids(random: np.random.Generator, sizes: np.ndarray, out: np.ndarray) -> None:
    x = _power_law(random.random(out.shape), sizes)
    np.subtract(np.minimum(x, sizes, out=x).astype(np.int32), 1, out=out)


def _power_law(uniform: Any, sizes: Any) -> Any:
    """Inverts the distribution of x^-a on [1, size + 1); an id is x rounded down, minus 1."""
    a = 1 - POWER_LAW_EXPONENT
    return (1 - uniform * (1 - (sizes + 1) ** a)) ** (1 / a)


def ensure_synthetic_dataset(
    directory: str | os.PathLike, spec: FeatureSpec, num_samples: int, **options: Any
) -> FeatureSpec:
    """Writes a synthetic dataset unless it exists already, and returns its specification.

    Args:
        options: further arguments of `write_synthetic_dataset`.

    Raises:
        FileExistsError: something other than a synthetic dataset is there, and is kept.
    """
    directory = Path(directory)
    check_owned(directory)
    if directory.is_dir() and (manifest := layout.read_dataset_manifest(directory)):
        facts = manifest["transform"]
        if facts == _describe(spec, num_samples, **options):
            return FeatureSpec.load(directory)
        if "synthetic" not in facts:
            raise FileExistsError(
                f"{directory}: expected a synthetic dataset or nothing, got a dataset of other "
                "origin, which is not replaced (--synthetic_dataset_dir)"
            )
    return write_synthetic_dataset(directory, spec, num_samples, replace_existing=True, **options)


def write_synthetic_dataset(
    directory: str | os.PathLike,
    spec: FeatureSpec,
    num_samples: int,
    *,
    seed: int,
    ids: str = "uniform",
    fixed_lengths: bool = False,
    replace_existing: bool = False,
    on_write: Callable[[int], object] | None = None,
) -> FeatureSpec:
    """Writes a split-binary dataset of random samples and returns its specification.

    Args:
        directory: directory to write, which appears when the dataset is complete.
        spec: features and splits; names, dtypes and files are kept. Weights of ids are 1.
        seed, ids, fixed_lengths: see `SyntheticDataset`.
        replace_existing: whether a dataset of ours at `directory` may be replaced.
        on_write: called with the number of rows after each write.

    Raises:
        FileExistsError: `directory` exists and may not be replaced.
        PermissionError: it is another user's; see `check_owned`.
        ValueError: the disk has no room for it.
    """
    needed = num_samples * _row_bytes(spec) * len(spec.splits)
    check_disk(directory, needed, f"--synthetic_dataset_num_entries {num_samples}")
    check_owned(Path(directory))
    options: dict[str, Any] = {"seed": seed, "ids": ids, "fixed_lengths": fixed_lengths}
    with atomic_directory(directory, replace_existing) as staging:
        staged = replace(spec, path=staging / layout.FEATURE_SPEC, metadata={})
        for split in staged.splits:
            samples = SyntheticDataset(staged, split, num_samples, _ROWS_PER_WRITE, **options)
            with SplitWriter(staged, split) as writer:
                for index in range(len(samples)):
                    batch = samples.batch(index)
                    labels, numerical = batch.labels.numpy(), batch.numerical.numpy()
                    writer.write(labels, numerical, batch.columns(staged))
                    if on_write is not None:
                        on_write(batch.num_samples)
        staged.save()
        layout.write_model_size(staging, staged.cardinalities)
        rows = dict.fromkeys(staged.splits, num_samples)
        origin = _describe(spec, num_samples, **options)
        layout.write_dataset_manifest(staging, rows, staged.cardinalities, origin)
    return FeatureSpec.load(directory)


def _row_bytes(spec: FeatureSpec) -> int:
    """Returns the maximum bytes of a row."""
    total = sum(spec.dtype(name).itemsize for name in spec.feature_spec)
    for name, field in spec.lists.items():
        each = spec.dtype(name).itemsize + field.weighted * WEIGHTS_DTYPE.itemsize
        total += field.lengths_dtype.itemsize + field.max_length * each
    return total


def _describe(
    spec: FeatureSpec, num_samples: int, fixed_lengths: bool = False, **options: Any
) -> dict[str, Any]:
    """Describes the origin of a synthetic dataset; equal descriptions mean equal bytes."""
    described = {"num_samples": num_samples, **options}
    described |= {"fixed_lengths": True} if fixed_lengths else {}
    sections = ("feature_spec", "source_spec", "channel_spec")
    return {"synthetic": described | {name: getattr(spec, name) for name in sections}}
