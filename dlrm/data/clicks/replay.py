"""Batches of which a share of the rows is of earlier datasets, such as those of older days."""

import torch
from torch import Tensor

from dlrm.data.clicks.batch import Batch, ClickDataset, Derived
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


class Replayed(Derived):
    """The batches of a dataset, each with some rows of earlier ones at its end.

    Batch i has the rows of one of the earlier datasets' batches, which take turns in a random
    order; those that are too short are left out.

    Args:
        dataset: the dataset, whose batches leave room for the rows.
        earlier: the training rows of the earlier datasets, in batches of as many rows as are
            replayed.

    Raises:
        ValueError: an earlier dataset has other fields, more ids or too few rows.
    """

    def __init__(
        self, dataset: ClickDataset, earlier: dict[str, ClickDataset], seed: int = 0
    ) -> None:
        super().__init__(dataset)
        self._earlier = [*earlier.values()]
        for name, one in earlier.items():
            _check(name, one, dataset)
        self._rows = self._earlier[0].batch_size
        self._places = [
            (number, index)
            for number, one in enumerate(self._earlier)
            for index in range(one.num_samples // self._rows)
        ]
        self._order = batch_order(len(self._places), 0, seed, True)
        self.batch_size += self._rows
        self.num_samples += len(dataset) * self._rows

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`."""
        number, place = self._places[self._order[index % len(self._places)]]
        return _joined(self.dataset.batch(index), self._earlier[number].batch(place))

    def row_text(self, row: int) -> str:
        """Returns the words for a row of all batches."""
        index, place = divmod(row, self.batch_size)
        first = index * self.dataset.batch_size
        own = min(self.dataset.batch_size, self.dataset.num_samples - first)
        if place < own:
            return f"train row {first + place}"
        return f"row {place - own} of those replayed in batch {index}"


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

    def both(name: str, like: str) -> Tensor | None:
        """Joins factors, of which a batch that has none has 1."""
        pairs = [(getattr(batch, name), getattr(batch, like)) for batch in (first, second)]
        if all(factors is None for factors, _ in pairs):
            return None
        return torch.cat([torch.ones(len(one)) if f is None else f for f, one in pairs])

    lengths = None
    if first.lengths is not None and second.lengths is not None:
        lengths = torch.cat([first.lengths, second.lengths])
    weights = both("weights", "labels")
    return Batch(
        torch.cat([first.numerical, second.numerical]),
        torch.cat([first.categorical, second.categorical]),
        torch.cat([first.labels, second.labels]),
        lengths,
        id_weights=both("id_weights", "categorical"),
        weights=weights,
        total_weight=None if weights is None else weights.sum(dtype=torch.float64),
    )
