"""The splits of a dataset in a training: their roles, and rows that it cannot use."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.datasets import Datasets
from dlrm.data.layout import field_of
from dlrm.distributed import agreed
from dlrm.metrics.table import unscored_text
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.reports.roles import OF_NVIDIA, Roles

_OF_AN_ID = re.compile("embedding(_bag)?: id ")


class SplitBatches(NamedTuple):
    """The batches of a dataset in their roles; the arguments of `Trainer.fit`.

    Attributes:
        train: the rows to train on.
        chooses: the rows that choose the best weights.
        reports: the rows that are evaluated once, at the end; None if there are none.
        roles: names of the latter two.
    """

    train: ClickLoader
    chooses: ClickLoader
    reports: ClickLoader | None
    roles: Roles = OF_NVIDIA


def roles_of(datasets: Datasets) -> Roles:
    """Returns the roles of the rows: those that choose, and those that report.

    Rows that are set aside choose, or else those of `test/`. The others report: those of
    `validation/`, or else of `test/`.
    """
    rows = datasets.rows()
    chooses = "test" if datasets.set_aside is None else "set_aside"
    others = (name for name in ("validation", "test") if name != chooses and rows.get(name))
    return Roles(chooses, next(others, None))


def set_aside_note(datasets: Datasets, keeps_best: bool) -> str | None:
    """Returns a line about rows that are set aside, or None if there are none.

    Args:
        keeps_best: whether the best weights are kept; otherwise the last ones are the result.
    """
    if datasets.set_aside is None:
        return None
    aside, reports = datasets.set_aside.num_samples, roles_of(datasets).reports
    rows = f"the last {aside:,} of {datasets.train.num_samples + aside:,} training rows"
    report = f"{reports} rows are hold-out rows" if reports else "no rows report"
    if keeps_best:
        return f"set aside: {rows} choose the best weights and do not train; {report}"
    return (
        f"set aside: {rows} are tested during the training and do not train "
        "(--save_checkpoint_path keeps the weights that are best on them, otherwise the last "
        f"weights are the result); {report}"
    )


def fingerprint(data: ClickDataset) -> dict[str, Any]:
    """Returns values that identify a data set, independent of its location and type."""
    ends = [data.batch(0), data.batch(len(data) - 1)] if len(data) else []
    tensors = [t for batch in ends for t in batch if isinstance(t, torch.Tensor)]
    content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)
    facts: dict[str, Any] = {"rows": data.num_samples, "table sizes": data.table_sizes}
    for name in ("poolings", "field_tables", "targets"):
        if (values := getattr(data, name)) is not None:
            facts[name.replace("_", " ")] = list(values)
    return facts | {"first and last batch": f"CRC-32 {zlib.crc32(content):08x}"}


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
    """Raises, on all ranks, an error if the last evaluation had a score that is NaN or infinite.

    Raises:
        ValueError: on rank 0, naming the first such row.
        OtherRankError: on the other ranks.
    """
    with agreed(task.world, ValueError):
        if task.unscored and task.world.rank == 0:
            row, score = task.unscored
            raise ValueError(f"{name}: {datasets.row_text(split, row)}: {unscored_text(score)}")
