"""Batches of which a share of the rows is of earlier datasets, such as those of older days."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.data.clicks.config import DataConfig
from dlrm.data.prefetch import batch_order
from dlrm.remote.cache import with_uris


def replayed_rows(batch_size: int, share: float) -> int:
    """Returns the number of rows of a batch that are replayed.

    Raises:
        ValueError: the share leaves no row to replay, or none of the dataset.
    """
    rows = round(share * batch_size)
    if not 0 < rows < batch_size:
        raise ValueError(
            f"--replay {share}: expected at least one row of each kind in a batch, got {rows} of "
            f"--batch_size {batch_size} that are replayed"
        )
    return rows


def replay_note(config: DataConfig) -> str | None:
    """Returns a line about the rows that a training replays, or None."""
    if not config.replay:
        return None
    rows = replayed_rows(config.batch_size, config.replay)
    return (
        f"replay: {rows:,} of the {config.batch_size:,} rows of each training batch are of "
        f"{', '.join(map(with_uris, config.replay_data or ()))}"
    )


class Replayed:
    """The batches of a dataset, each with some rows of earlier ones at its end.

    Batch i has the rows of one of the earlier datasets' batches, which take turns in a random
    order; those that are too short are left out.

    Args:
        dataset: the dataset, whose batches leave room for the rows.
        earlier: the training rows of the earlier datasets, in batches of as many rows as are
            replayed.
        seed: seed of the order.

    Raises:
        ValueError: an earlier dataset has other fields, more ids or too few rows.
    """

    def __init__(
        self, dataset: ClickDataset, earlier: dict[str, ClickDataset], seed: int = 0
    ) -> None:
        self._dataset, self._earlier = dataset, [*earlier.values()]
        for name, one in earlier.items():
            _check(name, one, dataset)
        self._rows = self._earlier[0].batch_size
        self._places = [
            (number, index)
            for number, one in enumerate(self._earlier)
            for index in range(one.num_samples // self._rows)
        ]
        self._order = batch_order(len(self._places), 0, seed, True)
        self.table_sizes, self.num_numerical = dataset.table_sizes, dataset.num_numerical
        self.categorical_names = dataset.categorical_names
        self.batch_size = dataset.batch_size + self._rows
        self.num_samples = dataset.num_samples + len(dataset) * self._rows
        self.one_id_each, self.poolings = dataset.one_id_each, dataset.poolings
        self.field_tables, self.targets = dataset.field_tables, dataset.targets
        self.field_dims = dataset.field_dims

    @property
    def dataset(self) -> ClickDataset:
        """Returns the dataset alone."""
        return self._dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`."""
        number, place = self._places[self._order[index % len(self._places)]]
        return _joined(self._dataset.batch(index), self._earlier[number].batch(place))

    def row_text(self, row: int) -> str:
        """Returns the words for a row of all batches."""
        index, place = divmod(row, self.batch_size)
        own = min(
            self._dataset.batch_size, self._dataset.num_samples - index * self._dataset.batch_size
        )
        if place < own:
            return f"train row {index * self._dataset.batch_size + place}"
        return f"row {place - own} of those replayed in batch {index}"

    def ahead(self, order: Sequence[int]) -> Iterable[int]:
        """Returns an order in which batches will be read; see `ClickDataset.ahead`."""
        return self._dataset.ahead(order)

    def check_files(self) -> None:
        """Checks the files of all datasets; see `ClickDataset.check_files`."""
        for one in (self._dataset, *self._earlier):
            one.check_files()


def _check(name: str, earlier: ClickDataset, dataset: ClickDataset) -> None:
    what = f"--replay_data {name}"
    for kind, theirs, own in (
        ("numerical fields", earlier.num_numerical, dataset.num_numerical),
        ("categorical fields", earlier.categorical_names, dataset.categorical_names),
    ):
        if theirs != own:
            raise ValueError(f"{what}: expected the {kind} of --dataset, {own}, got {theirs}")
    sizes = zip(dataset.categorical_names, earlier.table_sizes, dataset.table_sizes, strict=True)
    for field, theirs, own in sizes:
        if theirs > own:
            raise ValueError(
                f"{what}: {field}: expected at most the {own} ids of --dataset, got {theirs}"
            )
    if earlier.num_samples < earlier.batch_size:
        raise ValueError(
            f"{what}: expected at least the {earlier.batch_size} rows that a batch replays, got "
            f"{earlier.num_samples}"
        )


def _joined(first: Batch, second: Batch) -> Batch:
    """Returns the samples of two whole batches as one."""

    def both(one: Tensor | None, other: Tensor | None, like: str) -> Tensor | None:
        """Joins factors, of which a batch that has none has 1."""
        if one is None and other is None:
            return None
        parts = [
            torch.ones(len(getattr(batch, like))) if tensor is None else tensor
            for batch, tensor in ((first, one), (second, other))
        ]
        return torch.cat(parts)

    lengths = None
    if first.lengths is not None and second.lengths is not None:
        lengths = torch.cat([first.lengths, second.lengths])
    weights = both(first.weights, second.weights, "labels")
    return Batch(
        torch.cat([first.numerical, second.numerical]),
        torch.cat([first.categorical, second.categorical]),
        torch.cat([first.labels, second.labels]),
        lengths,
        id_weights=both(first.id_weights, second.id_weights, "categorical"),
        weights=weights,
        total_weight=None if weights is None else weights.sum(dtype=torch.float64),
    )
