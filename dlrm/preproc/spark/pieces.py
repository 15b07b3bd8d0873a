"""The rows of a dataset in pieces, which executors write and then join to its files.

A piece has consecutive rows of a target: those of its first file, then those of the next one. Where
a piece belongs is known once all are written, and then each is copied to its place: by executors,
or, from a store, by the driver.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data import bags
from dlrm.data.bags import starts_within
from dlrm.locks import new_suffix
from dlrm.manifest import Checksum
from dlrm.preproc.engine import FACTS, ROWS, Engine, facts_batch, slices
from dlrm.preproc.packing import Files, Layout, PackJob, layouts_of
from dlrm.remote.objects import open_store, write_at
from dlrm.remote.uri import Uri

_AT_ONCE = 8  # pieces that the driver has in memory


class Piece(NamedTuple):
    """Rows of a target, and values of each list field, with the numbers of those before them."""

    target: int
    first_row: int
    first_values: Sequence[int]
    is_last: bool
    name: str
    rows: int
    values: Sequence[int]


class Pieces:
    """Writes a dataset in pieces, like `Files`.

    Args:
        engine: runs what writes.
        job: the rows.
        folder: folder for the pieces, or its URI if executors have no common folder.
        dataset: directory of the dataset.
    """

    def __init__(
        self,
        engine: Engine,
        job: PackJob,
        layouts: Sequence[Layout],
        folder: Path | Uri,
        dataset: Path,
    ) -> None:
        self._engine, self._job, self._layouts = engine, job, layouts
        self._folder, self._dataset = folder, dataset
        self._found: list[tuple[int, int, dict[str, Any]]] = []
        self.write = partial(write_piece, job=job, folder=folder)

    def add(self, target: int, key: int, facts: dict[str, Any]) -> None:
        """Notes what `write` says of a piece."""
        self._found.append((target, key, facts))

    def finish(self) -> dict[str, str]:
        """Joins the pieces; returns the checksum of each file."""
        sums, joined = Files(self._dataset, self._layouts).finish(), dict[str, Checksum]()
        task = partial(join_piece, job=self._job, folder=self._folder, dataset=self._dataset)
        placed = list(self._placed())
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            is_here = isinstance(self._folder, Path)
            found: Iterable = self._engine.map(task, placed) if is_here else pool.map(task, placed)
            for file, part in chain.from_iterable(found):
                joined.setdefault(file, Checksum()).join(part, file)
        if isinstance(self._folder, Path):
            shutil.rmtree(self._folder)
        return sums | {file: str(total) for file, total in joined.items()}

    def _placed(self) -> Iterator[Piece]:
        """Yields the pieces in order, with what is before each."""
        order = sorted(self._found, key=itemgetter(0, 1))
        for target, found in groupby(order, key=itemgetter(0)):
            rows, values = 0, [0] * len(self._layouts[target].lists)
            *_, (*_, last) = of_target = list(found)
            for *_, facts in of_target:
                yield Piece(target, rows, values, facts is last, **facts)
                rows += facts["rows"]
                values = [a + b for a, b in zip(values, facts["values"], strict=True)]


def write_piece(
    batches: Iterator[pa.RecordBatch], job: PackJob, folder: Path | Uri
) -> Iterator[pa.RecordBatch]:
    """Writes consecutive rows of a target; yields facts about them, or those about parts."""
    parts: list[dict[str, np.ndarray]] = []
    rows, target, key = 0, FACTS, 0
    for index, batch in slices(batches):
        if index == FACTS:
            yield batch
            continue
        if not parts:
            target, key = index, batch.column(1)[0].as_py()
            layout = layouts_of(job)[target]
        parts.append(layout.unpack(batch.column(2)))
        rows += len(batch)
    if not parts:
        return
    name = f"{_prefix(job)}{new_suffix()}"
    columns = (part[file] for file, *_ in layout.widths for part in parts)
    content = b"".join(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data for one in columns)
    if isinstance(folder, Uri):
        open_store(folder).write(folder.below(name).key, content)
    else:
        (folder / name).write_bytes(content)
    values = [
        sum(int(part[lengths].sum(dtype=np.int64)) for part in parts) for lengths, _ in layout.lists
    ]
    facts = facts_batch(ROWS, key, {"name": name, "rows": rows, "values": values})
    yield facts.set_column(0, ROWS[0], pa.array([target], ROWS[0].type))


def join_piece(
    piece: Piece, job: PackJob, folder: Path | Uri, dataset: Path
) -> list[tuple[str, Checksum]]:
    """Copies a piece to its position in the files of a dataset.

    Returns:
        Names of files, and the checksum of what it has of each.
    """
    if isinstance(folder, Uri):
        content = memoryview(open_store(folder).content(folder.below(piece.name).key))
    else:
        content = memoryview((folder / piece.name).read_bytes())
    layout, begin = layouts_of(job)[piece.target], 0
    found, starts = list[tuple[str, int, memoryview]](), list[tuple[str, int, memoryview]]()
    for file, width, i in layout.widths:
        first = piece.first_row if i is None else piece.first_values[i]
        size = width * (piece.rows if i is None else piece.values[i])
        found.append((file, first * width, content[begin : begin + size]))
        begin += size
    for i, (file, (lengths, _)) in enumerate(zip(layout.starts, layout.lists, strict=True)):
        (data,) = (data for name, _, data in found if name == lengths)
        before, of_rows = piece.first_values[i], np.frombuffer(data, layout.dtypes[lengths])
        first, indices = starts_within(of_rows, piece.first_row, before)
        if piece.is_last:
            indices = np.append(indices, before + piece.values[i])
        indices = indices.astype(bags.STARTS_DTYPE)
        starts.append((file, first * indices.itemsize, memoryview(indices.tobytes())))
    written = [one for one in found + starts if len(one[2])]
    for file, offset, data in written:
        with open(dataset / file, "r+b", buffering=0) as opened:
            write_at(opened.fileno(), data, offset)
    return [(file, _checksum(offset, data)) for file, offset, data in written]


def _checksum(offset: int, data: memoryview) -> Checksum:
    sums = Checksum(offset)
    sums.update(data)
    return sums


def _prefix(job: PackJob) -> str:
    return f"rows-{job.targets[0].name}-"
