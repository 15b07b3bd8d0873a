"""The splits of a dataset in the roles that they have in a training."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.datasets import Datasets
from dlrm.tasks.recommendation import ClickLoader
from dlrm.train.reports.roles import OF_NVIDIA, Roles


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
    report = f"{reports} rows report and are never chosen on" if reports else "no rows report"
    use = (
        "choose the best weights and do not train"
        if keeps_best
        else "are tested during the training and do not train (--save_checkpoint_path keeps the "
        "weights that are best on them, otherwise the last weights are the result)"
    )
    return (
        f"set aside: the last {aside:,} of {datasets.train.num_samples + aside:,} training rows "
        f"{use}; {report}"
    )


def fingerprint(data: ClickDataset) -> dict[str, Any]:
    """Returns values that identify a data set, independent of its location and type."""
    ends = [data.batch(0), data.batch(len(data) - 1)] if len(data) else []
    tensors = [t for batch in ends for t in batch if isinstance(t, torch.Tensor)]
    content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)
    shapes: dict[str, Sequence[Any] | None] = {
        "poolings": data.poolings,
        "field tables": data.field_tables,
        "targets": data.targets,
    }
    return {
        "rows": data.num_samples,
        "table sizes": data.table_sizes,
        **{name: list(values) for name, values in shapes.items() if values is not None},
        "first and last batch": f"CRC-32 {zlib.crc32(content):08x}",
    }
