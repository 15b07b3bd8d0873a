"""Interface of datasets to the rest of the package: batches, each a pure function of its index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlrm.distributed import World, part


class Batch(NamedTuple):
    """Samples as the model takes them; ids and numericals keep the dtypes they are stored in.

    With several processes, numericals and labels are those of a process's own samples, and ids are
    those of its own tables for all samples; see `Shard`.

    Attributes:
        numerical: `[batch, num_numerical]`, float16 (as on disk) or float32.
        categorical: `[batch, tables]`, int8 to int64, one id for each table; with `lengths`,
            `[total]`, the ids bag after bag as `ops.joint_embedding_bag` takes them.
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

    @property
    def one_id_each(self) -> bool:
        """Returns whether every sample has one id for each table, so that there are no lengths."""
        return self.lengths is None

    @property
    def num_samples(self) -> int:
        """Returns the number of samples of all processes."""
        return len(self.categorical if self.lengths is None else self.lengths)

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
        sizes = [ranges.stop - ranges.start for ranges in slices]
        parts = min(parts, max(sizes))
        if parts <= 1:
            return [self]
        result = []
        for index in range(parts):
            cuts = [part(size, index, parts) for size in sizes]
            bounds = [
                (o.start + c.start, o.start + c.stop) for o, c in zip(slices, cuts, strict=True)
            ]
            counts = tuple(end - begin for begin, end in bounds)
            own = self._part(cuts[world.rank], bounds)
            size = self.global_size or whole
            result.append(own._replace(global_size=size, samples_by_rank=counts))
        return result

    def samples(self, own: slice) -> "Batch":
        """Returns some samples of a whole batch, with their ids, as a batch of one process."""
        return self._part(own, [(own.start, own.stop)])

    def _part(self, own: slice, bounds: Sequence[tuple[int, int]]) -> "Batch":
        """Returns own samples, and the ids of those from `begin` to `end` for each pair."""
        categorical, lengths, id_weights = self._ids_of(bounds)
        return self._replace(
            numerical=self.numerical[own],
            categorical=categorical,
            labels=self.labels[own],
            lengths=lengths,
            id_weights=id_weights,
            weights=None if self.weights is None else self.weights[own],
        )

    def _ids_of(
        self, bounds: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids, lengths and id weights of samples from `begin` to `end`, for each pair of them."""
        if self.lengths is None:
            return torch.cat([self.categorical[begin:end] for begin, end in bounds]), None, None
        ends = [0, *self.lengths.sum(1, dtype=torch.int64).cumsum(0).tolist()]

        def of_ids(values: Tensor) -> Tensor:
            return torch.cat([values[ends[begin] : ends[end]] for begin, end in bounds])

        lengths = torch.cat([self.lengths[begin:end] for begin, end in bounds])
        weights = None if self.id_weights is None else of_ids(self.id_weights)
        return of_ids(self.categorical), lengths, weights


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
        categorical, lengths, id_weights = batch.categorical, batch.lengths, batch.id_weights
        if self.tables is not None:
            tables = list(self.tables)
            if lengths is None:
                categorical = categorical[:, tables]
            else:
                wanted = torch.zeros_like(lengths, dtype=torch.bool)
                wanted[:, tables] = True
                of_ids = wanted.flatten().repeat_interleave(lengths.flatten().long())
                categorical, lengths = categorical[of_ids], lengths[:, tables]
                id_weights = None if id_weights is None else id_weights[of_ids]
        return Batch(
            batch.numerical[samples],
            categorical,
            batch.labels[samples],
            lengths,
            id_weights=id_weights,
            weights=None if batch.weights is None else batch.weights[samples],
            total_weight=batch.total_weight,
        )


class Sharded:
    """A dataset of which one process reads its shard."""

    def __init__(self, dataset: "ClickDataset", shard: Shard) -> None:
        self.dataset, self._shard = dataset, shard
        self.table_sizes, self.num_numerical = dataset.table_sizes, dataset.num_numerical
        self.categorical_names = dataset.categorical_names
        self.num_samples, self.batch_size = dataset.num_samples, dataset.batch_size
        self.one_id_each, self.poolings = dataset.one_id_each, dataset.poolings
        self.field_tables, self.targets = dataset.field_tables, dataset.targets

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: int) -> Batch:
        """Returns this process's shard of a batch."""
        return self._shard.take(self.dataset.batch(index))


class ClickDataset(Protocol):
    """One split of a dataset.

    Attributes:
        table_sizes: rows of the table of each categorical feature.
        categorical_names: names of these features, in the same order.
        num_numerical: numerical features of a sample.
        num_samples: samples in all batches together.
        batch_size: samples of every batch but possibly the last.
        one_id_each: whether every sample has one id for each feature; see `Batch.one_id_each`.
        poolings: for each feature "sum", "mean" or "attention", if the dataset states how several
            ids of a sample become one vector, else None; None if it states none.
        field_tables: number of each feature's table; None is a table of its own for each.
        targets: for each feature whose pooling is "attention" the feature of its candidate, else
            None; None if no feature is attended.
    """

    table_sizes: list[int]
    categorical_names: list[str]
    num_numerical: int
    num_samples: int
    batch_size: int
    one_id_each: bool
    poolings: tuple[str | None, ...] | None
    field_tables: tuple[int, ...] | None
    targets: tuple[int | None, ...] | None

    def __len__(self) -> int:
        """Returns the number of batches, the short last one included."""
        ...

    def batch(self, index: int) -> Batch:
        """Returns a batch, which depends on `index` and not on earlier reads."""
        ...
