"""Interface of datasets to the rest of the package: batches, each a pure function of its index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm.data.bags import Ids, Jagged
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.prefetch import BatchedRows
from dlrm.distributed import World, part


class Batch(NamedTuple):
    """Samples as the model takes them; ids and numericals keep the dtypes they are stored in.

    With several processes, numericals and labels are those of a process's own samples, and ids are
    those of its own tables for all samples; see `Shard`.

    Attributes:
        numerical: `[batch, num_numerical]`, float16 (as on disk) or float32.
        categorical: `[batch, tables]`, int8 to int64, one id for each table; with `lengths`,
            `[total]`, the ids bag after bag as `ops.joint_embedding` takes them.
        labels: `[batch]`, float32, 0 or 1.
        lengths: ids of each sample and table, `[batch, tables]`, int8 to int64; None is one each.
        global_size: samples of the batch that this is a part of; None for a whole batch.
        samples_by_rank: samples of this part by rank; None is `World.part`.
        id_weights: a factor for the vector of each id, `[total]` float32; None is 1 for each.
        weights: of the samples in the loss and in metrics, `[batch]` float32; None is 1 for each.
        total_weight: sum of the weights of the whole batch, over all processes, `[]` float64.
    """

    numerical: Tensor
    categorical: Tensor
    labels: Tensor
    lengths: Tensor | None = None
    global_size: int | None = None
    samples_by_rank: tuple[int, ...] | None = None
    id_weights: Tensor | None = None
    weights: Tensor | None = None
    total_weight: Tensor | None = None

    @classmethod
    def from_numpy(cls, *arrays: np.ndarray | None, **others: np.ndarray | None) -> "Batch":
        """Returns a batch of arrays, without names in the order of its fields; memory is shared."""
        named: dict[str, Any] = {n: torch.from_numpy(a) for n, a in others.items() if a is not None}
        tensors: Any = [None if array is None else torch.from_numpy(array) for array in arrays]
        return cls(*tensors, **named)

    @property
    def num_samples(self) -> int:
        """Returns the number of samples of all processes."""
        return len(self.categorical if self.lengths is None else self.lengths)

    def columns(self, spec: FeatureSpec) -> list[Ids]:
        """Returns the ids of each table as arrays, in the form that `SplitWriter` takes."""
        ids = self.categorical.numpy()
        if self.lengths is None:
            return list(ids.T)
        lengths, columns = self.lengths.numpy(), list[Ids]()
        tables = np.tile(np.arange(lengths.shape[1]), len(lengths)).repeat(lengths.ravel())
        for table, name in enumerate(spec.categorical):
            own, weights = tables == table, None
            if name not in spec.lists:
                columns.append(ids[own])
                continue
            if spec.lists[name].weighted:
                factors = self.id_weights
                weights = np.ones(own.sum(), "f4") if factors is None else factors.numpy()[own]
            columns.append(Jagged(ids[own], lengths[:, table], weights))
        return columns

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Returns the batch with `function` applied to each tensor that it has."""
        return Batch(*(function(v) if isinstance(v, Tensor) else v for v in self))  # type: ignore[arg-type]

    def split(self, parts: int, world: World = World()) -> list["Batch"]:
        """Splits the batch into `parts`, or fewer if no process has that many samples.

        Each process splits its own samples, and ids follow the samples. With `lengths` this waits
        for the device, since they determine where ids are split.
        """
        whole = self.num_samples
        slices = [part(whole, rank, world.size) for rank in range(world.size)]
        sizes = [own.stop - own.start for own in slices]
        parts = min(parts, max(sizes))
        if parts <= 1:
            return [self]
        result = []
        for index in range(parts):
            cuts = [part(size, index, parts) for size in sizes]
            rows = [
                slice(own.start + cut.start, own.start + cut.stop)
                for own, cut in zip(slices, cuts, strict=True)
            ]
            counts = tuple(own.stop - own.start for own in rows)
            own = self._part(cuts[world.rank], rows)
            size = self.global_size or whole
            result.append(own._replace(global_size=size, samples_by_rank=counts))
        return result

    def samples(self, own: slice) -> "Batch":
        """Returns some samples of a whole batch, with their ids, as a batch of one process."""
        return self._part(own, [own])

    def _part(self, own: slice, rows: Sequence[slice]) -> "Batch":
        """Returns own samples, and the ids of the samples `rows` of all processes."""
        ids = rows
        if self.lengths is not None:
            ends = [0, *self.lengths.sum(1, dtype=torch.int64).cumsum(0).tolist()]
            ids = [slice(ends[some.start], ends[some.stop]) for some in rows]
        return self._replace(
            numerical=self.numerical[own],
            categorical=_joined(self.categorical, ids),
            labels=self.labels[own],
            lengths=None if self.lengths is None else _joined(self.lengths, rows),
            id_weights=None if self.id_weights is None else _joined(self.id_weights, ids),
            weights=None if self.weights is None else self.weights[own],
        )


def _joined(values: Tensor, slices: Sequence[slice]) -> Tensor:
    return torch.cat([values[some] for some in slices])


@dataclass(frozen=True)
class Shard:
    """The part of every batch that a process reads: some samples, and some tables of all samples.

    Attributes:
        world: the processes; numericals and labels are those of the samples `World.part(batch)`.
        tables: tables whose ids are read, for the batch of all processes; None is all tables.
    """

    world: World = World()
    tables: tuple[int, ...] | None = None

    def take(self, batch: Batch) -> Batch:
        """Cuts the shard out of a whole batch."""
        samples = self.world.part(len(batch.labels))
        own = batch._replace(
            numerical=batch.numerical[samples],
            labels=batch.labels[samples],
            weights=None if batch.weights is None else batch.weights[samples],
        )
        if self.tables is None:
            return own
        tables, lengths, id_weights = list(self.tables), batch.lengths, batch.id_weights
        if lengths is None:
            return own._replace(categorical=batch.categorical[:, tables])
        wanted = torch.zeros_like(lengths, dtype=torch.bool)
        wanted[:, tables] = True
        of_ids = wanted.flatten().repeat_interleave(lengths.flatten().long())
        return own._replace(
            categorical=batch.categorical[of_ids],
            lengths=lengths[:, tables],
            id_weights=None if id_weights is None else id_weights[of_ids],
        )


class ClickDataset(BatchedRows):
    """One split of a dataset.

    Attributes:
        table_sizes: rows of the table of each categorical feature.
        categorical_names: names of these features, in the same order.
        num_numerical: numerical features of a sample.
        one_id_each: whether every sample has one id for each feature, so that batches have no
            lengths.
        poolings: for each feature "sum", "mean" or "attention", if the dataset states how several
            ids of a sample become one vector, else None; None if it states none.
        field_tables: number of each feature's table; None is a table of its own for each.
        targets: for each feature whose pooling is "attention" the feature of its candidate, else
            None; None if no feature is attended.
    """

    table_sizes: list[int]
    categorical_names: list[str]
    num_numerical: int
    one_id_each: bool = True
    poolings: tuple[str | None, ...] | None = None
    field_tables: tuple[int, ...] | None = None
    targets: tuple[int | None, ...] | None = None

    def batch(self, index: int) -> Batch:
        """Returns a batch, which depends on `index` and not on earlier reads."""
        raise NotImplementedError


class Sharded(ClickDataset):
    """A dataset of which one process reads its shard."""

    def __init__(self, dataset: ClickDataset, shard: Shard) -> None:
        vars(self).update(vars(dataset))
        self.dataset, self._shard = dataset, shard

    def batch(self, index: int) -> Batch:
        """Returns this process's shard of a batch."""
        return self._shard.take(self.dataset.batch(index))
