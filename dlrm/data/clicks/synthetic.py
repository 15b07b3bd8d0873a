"""Synthetic samples, made in memory for every batch or written to disk once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import WEIGHTS_DTYPE, Jagged
from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.prefetch import BatchedRows
from dlrm.files import check_owned, staged_directory
from dlrm.limits import check_disk

POWER_LAW_EXPONENT = 1.45  # that of NVIDIA's generator of synthetic Criteo data
_ROWS_PER_WRITE = 65536
_IDS_PER_BLOCK = 8192


class SyntheticDataset(BatchedRows):
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
        subset: fraction of the batches to use.

    Raises:
        ValueError: a table is too large, or the hotness has another number of tables.
    """

    poolings: tuple[str | None, ...] | None = None
    field_tables: tuple[int, ...] | None = None
    targets: tuple[int | None, ...] | None = None

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
        subset: float = 1.0,
    ) -> None:
        super().__init__(num_samples, batch_size, subset)
        self.table_sizes = spec.cardinalities
        self.categorical_names = list(spec.categorical)
        self.num_numerical = len(spec.numerical)
        for name, size in zip(self.categorical_names, self.table_sizes, strict=True):
            if size > 2**31:
                raise ValueError(f"feature {name}: expected at most 2**31 rows, got {size}")
        if hotness is None and spec.lists:
            longest = {name: field.max_length for name, field in spec.lists.items()}
            hotness = [longest.get(name, 1) for name in self.categorical_names]
        if hotness is not None and len(hotness) not in (1, len(self.table_sizes)):
            raise ValueError(
                "--synthetic_dataset_hotness: expected one number, or one for each of "
                f"{len(self.table_sizes)} tables, got {len(hotness)}"
            )
        self.one_id_each = hotness is None
        self._hotness = None
        if hotness is not None:
            self._hotness = np.broadcast_to(np.array(hotness, np.uint64), len(self.table_sizes))
        self._fixed_lengths = fixed_lengths
        self._seed = (seed, layout.SPLITS.index(split))
        self._power_law = ids == "power_law"
        self._device = torch.device(device)

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`."""
        start, stop = self.rows(index)
        seed = [*self._seed, index]
        if self._device.type == "cpu":
            return self._make_with_numpy(stop - start, seed)
        return self._make_with_torch(stop - start, seed)

    def _make_with_numpy(self, num_samples: int, seed: list[int]) -> Batch:
        # Not torch: its CPU generator is half as fast, and it starts threads in each reader.
        random = np.random.Generator(np.random.SFC64(seed))
        sizes = np.array(self.table_sizes, np.float64 if self._power_law else np.uint64)
        draw = _draw_power_law_ids if self._power_law else _draw_uniform_ids
        lengths = None
        if self._hotness is not None:
            lengths = np.empty((num_samples, len(sizes)), np.int32)
            if self._fixed_lengths:
                lengths[:] = self._hotness
            else:
                _draw_uniform_ids(random, self._hotness, lengths)
                lengths += 1
            sizes = np.tile(sizes, num_samples).repeat(lengths.ravel())
        ids = np.empty((num_samples, len(sizes)) if lengths is None else len(sizes), np.int32)
        # In blocks whose temporaries fit the nearest cache and are reused by the allocator.
        if lengths is None:
            rows = max(2, _IDS_PER_BLOCK // max(1, len(sizes)) & -2)
            for start in range(0, num_samples, rows):
                draw(random, sizes, ids[start : start + rows])
        else:
            for start in range(0, len(ids), _IDS_PER_BLOCK):
                block = slice(start, start + _IDS_PER_BLOCK)
                draw(random, sizes[block], ids[block])
        numerical = random.random((num_samples, self.num_numerical), np.float32)
        labels = random.integers(0, 2, num_samples, np.uint8).astype(np.float32)
        return Batch(
            torch.from_numpy(numerical),
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            None if lengths is None else torch.from_numpy(lengths),
        )

    def _make_with_torch(self, num_samples: int, seed: list[int]) -> Batch:
        device = self._device
        random = torch.Generator(device)
        random.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
        shape: tuple[int, ...] = (num_samples, len(self.table_sizes))
        sizes = torch.tensor(self.table_sizes, device=device)
        lengths = None
        if self._hotness is not None:
            most = torch.tensor(self._hotness.tolist(), device=device)
            if self._fixed_lengths:
                lengths = most.int().repeat(num_samples, 1)
            else:
                fraction = torch.randint(2**32, shape, generator=random, device=device)
                lengths = (fraction * most >> 32).int() + 1
            sizes = sizes.repeat(num_samples).repeat_interleave(lengths.flatten())
            shape = tuple(sizes.shape)
        if self._power_law:
            uniform = torch.rand(shape, generator=random, dtype=torch.float64, device=device)
            ids = torch.minimum(_power_law(uniform, sizes.double()), sizes.double()).int() - 1
        else:
            fraction = torch.randint(2**32, shape, generator=random, device=device)
            ids = (fraction * sizes >> 32).int()
        numerical = torch.rand(num_samples, self.num_numerical, generator=random, device=device)
        labels = torch.randint(2, (num_samples,), generator=random, device=device).float()
        return Batch(numerical, ids, labels, lengths)


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
    directory: str | os.PathLike,
    spec: FeatureSpec,
    num_samples: int,
    *,
    seed: int,
    ids: str,
    fixed_lengths: bool = False,
) -> FeatureSpec:
    """Writes a synthetic dataset unless it exists already, and returns its specification.

    Raises:
        FileExistsError: something other than a synthetic dataset is there, and is kept.
    """
    directory = Path(directory)
    check_owned(directory)
    wanted = _describe(spec, num_samples, seed, ids, fixed_lengths)
    if directory.is_dir() and (manifest := layout.read_dataset_manifest(directory)):
        facts = manifest["transform"]
        if facts == wanted:
            return FeatureSpec.load(directory)
        if "synthetic" not in facts:
            raise FileExistsError(
                f"{directory}: expected a synthetic dataset or nothing, got a dataset of other "
                "origin, which is not replaced (--synthetic_dataset_dir)"
            )
    return write_synthetic_dataset(
        directory,
        spec,
        num_samples,
        seed=seed,
        ids=ids,
        fixed_lengths=fixed_lengths,
        replace_existing=True,
    )


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
        seed: 0 or more.
        ids: "uniform" or "power_law".
        fixed_lengths: every row of a list has the maximum number of ids, not 1 to that many.
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
    with staged_directory(directory, replace_existing) as staging:
        staged = replace(spec, path=staging / layout.FEATURE_SPEC, metadata={})
        for split in staged.splits:
            samples = SyntheticDataset(
                staged,
                split,
                num_samples,
                _ROWS_PER_WRITE,
                seed=seed,
                ids=ids,
                fixed_lengths=fixed_lengths,
            )
            with SplitWriter(staged, split) as writer:
                for index in range(len(samples)):
                    batch = samples.batch(index)
                    labels = batch.labels.numpy()
                    writer.write(labels, batch.numerical.numpy(), _columns(staged, batch))
                    if on_write is not None:
                        on_write(len(labels))
        staged.save()
        layout.write_model_size(staging, staged.cardinalities)
        layout.write_dataset_manifest(
            staging,
            dict.fromkeys(staged.splits, num_samples),
            staged.cardinalities,
            _describe(spec, num_samples, seed, ids, fixed_lengths),
        )
    return FeatureSpec.load(directory)


def _row_bytes(spec: FeatureSpec) -> int:
    """Returns the maximum bytes of a row."""
    total = sum(spec.dtype(name).itemsize for name in spec.feature_spec)
    for name, field in spec.lists.items():
        each = spec.dtype(name).itemsize + field.weighted * WEIGHTS_DTYPE.itemsize
        total += field.lengths_dtype.itemsize + field.max_length * each
    return total


def _columns(spec: FeatureSpec, batch: Batch) -> list[np.ndarray | Jagged]:
    """Returns the ids of a batch in the form that `SplitWriter` takes."""
    ids = batch.categorical.numpy()
    if batch.lengths is None:
        return list(ids.T)
    lengths = batch.lengths.numpy()
    tables = np.tile(np.arange(lengths.shape[1]), len(lengths)).repeat(lengths.ravel())
    columns: list[np.ndarray | Jagged] = []
    for table, name in enumerate(spec.categorical):
        table_ids = ids[tables == table]
        if (field := spec.lists.get(name)) is None:
            columns.append(table_ids)
            continue
        weights = np.ones(len(table_ids), WEIGHTS_DTYPE) if field.weighted else None
        columns.append(Jagged(table_ids, lengths[:, table], weights))
    return columns


def _describe(
    spec: FeatureSpec, num_samples: int, seed: int, ids: str, fixed_lengths: bool
) -> dict[str, Any]:
    """Describes the origin of a synthetic dataset; equal descriptions mean equal bytes."""
    return {
        "synthetic": {
            "num_samples": num_samples,
            "seed": seed,
            "ids": ids,
            **({"fixed_lengths": True} if fixed_lengths else {}),
            "feature_spec": spec.feature_spec,
            "source_spec": spec.source_spec,
            "channel_spec": spec.channel_spec,
        }
    }
