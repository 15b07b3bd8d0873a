"""Names the row of a dataset with an id outside its table, or a score that is NaN or infinite."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dlrm.data.clicks.datasets import Datasets
from dlrm.data.layout import field_of
from dlrm.distributed import agreed
from dlrm.metrics.table import unscored_text
from dlrm.tasks.recommendation import Recommendation

_OF_AN_ID = re.compile("embedding(_bag)?: id ")


@contextmanager
def bad_ids_named(datasets: Datasets, name: str) -> Iterator[None]:
    """Names the row of the dataset in an error about an id outside its table.

    Raises:
        ValueError: instead of an operator's RuntimeError, if the dataset has such an id.
    """
    try:
        yield
    except RuntimeError as error:
        where = _bad_id(datasets, name) if _OF_AN_ID.search(str(error)) else None
        if where is None:
            raise
        raise ValueError(where) from error


def _bad_id(datasets: Datasets, name: str) -> str | None:
    for split, data in datasets.named().items():
        for index in range(len(data)):
            batch = data.batch(index)
            ids, sizes = batch.categorical.flatten().cpu(), torch.tensor(data.table_sizes)
            # The sample and table of each id: one id each, or as many as the lengths say.
            place = torch.arange(batch.num_samples * len(sizes))
            if batch.lengths is not None:
                place = place.repeat_interleave(batch.lengths.flatten().cpu().long())
            wrong = ((ids < 0) | (ids >= sizes[place % len(sizes)])).nonzero()
            if len(wrong):
                first = int(wrong[0])
                row, table = divmod(int(place[first]), len(sizes))
                within = ""
                if batch.lengths is not None and batch.lengths[row, table] > 1:
                    within = f", place {first - int((place < place[first]).sum())} of the list"
                field = field_of(data.categorical_names[table], table)
                return (
                    f"{name}: {datasets.row_text(split, index * data.batch_size + row)}, field "
                    f"{field}{within}: expected an id from 0 to "
                    f"{data.table_sizes[table] - 1}, got {ids[first].item()}. "
                    "--hash_indices takes ids modulo the size of their table"
                )
    return None


def check_scores(task: Recommendation, datasets: Datasets, name: str, split: str) -> None:
    """Raises an error if the last evaluation had a score that is NaN or infinite.

    Args:
        task: the evaluated task, on all ranks.

    Raises:
        ValueError: on rank 0, naming the first such row.
        OtherRankError: on the other ranks.
    """
    with agreed(task.world, ValueError):
        if task.unscored and task.world.rank == 0:
            row, score = task.unscored
            raise ValueError(f"{name}: {datasets.row_text(split, row)}: {unscored_text(score)}")
