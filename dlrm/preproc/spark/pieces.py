"""The rows of a dataset in pieces, which executors write and then join to its files.

A piece has consecutive rows of a target: those of its first file, then those of the next one. Where
a piece belongs is known once all are written, and then each is copied to its place; in a store it
stays an object, of which the manifest says what it has.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dlrm.data.clicks import bags
from dlrm.data.clicks.bags import starts_within
from dlrm.locks import new_suffix
from dlrm.manifest import JoinedChecksum, slice_sums
from dlrm.preproc.engine import FACTS, ROWS, Engine, facts_batch, slices
from dlrm.preproc.packing import Files, Layout, PackJob, layouts_of
from dlrm.remote.store import open_store
from dlrm.remote.transfer import remove_all, write_at
from dlrm.remote.uri import Uri


class Piece(NamedTuple):
    """A piece and its place.

    Attributes:
        name: name of its file or object.
        target: number of its target.
        rows: number of rows.
        values: number of values of each list field.
        first_row, first_values: those before it.
        is_last: whether it has the last rows of its target.
    """

    name: str
    target: int
    rows: int
    values: Sequence[int]
    first_row: int = 0
    first_values: Sequence[int] = ()
    is_last: bool = False


class Pieces:
    """Writes a dataset in pieces, like `Files`.

    Args:
        engine: runs what writes.
        job: the rows.
        folder: folder for the pieces, or its URI if executors have no common folder.
        dataset: directory of the dataset; with a URI its files get their sizes only.
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
        self._found: list[tuple[int, int, Piece]] = []
        self.slices: dict[str, list[tuple[str, int, int]]] = {}
        self.write = partial(write_piece, job=job, folder=folder)

    def add(self, target: int, key: int, facts: dict[str, Any]) -> None:
        """Notes what `write` says of a piece."""
        self._found.append((target, key, Piece(target=target, **facts)))

    def finish(self) -> dict[str, str]:
        """Joins the pieces; returns the checksum of each file."""
        pieces = list(self._placed())
        with_rows = {piece.target for piece in pieces}
        empty = [one for place, one in enumerate(self._layouts) if place not in with_rows]
        sums = Files(self._dataset, empty).finish()
        Files(self._dataset, self._layouts)
        joined: dict[str, JoinedChecksum] = {}
        dataset = None if isinstance(self._folder, Uri) else self._dataset
        task = partial(join_piece, job=self._job, folder=self._folder, dataset=dataset)
        for found in self._engine.map(task, pieces):
            for name, parts in found.items():
                for file, place, size, crcs in parts:
                    joined.setdefault(file, JoinedChecksum(file)).add(place, size, crcs)
                if isinstance(self._folder, Uri):
                    place = f"{Path(self._folder.key).name}/{name}"
                    self.slices[place] = [part[:3] for part in parts]
        if isinstance(self._folder, Uri):
            for file, total in joined.items():
                os.truncate(self._dataset / file, total.size)
            self._remove_others(self._folder)
        else:
            shutil.rmtree(self._folder)
        return sums | {file: str(total) for file, total in joined.items()}

    def _placed(self) -> Iterator[Piece]:
        """Yields the pieces in order, with what is before each."""
        before: dict[int, tuple[int, Sequence[int]]] = {}
        order = sorted(self._found, key=lambda one: one[:2])
        last = {target: number for number, (target, _, _) in enumerate(order)}
        for number, (target, _, piece) in enumerate(order):
            rows, values = before.get(target, (0, [0] * len(piece.values)))
            yield piece._replace(
                first_row=rows, first_values=values, is_last=number == last[target]
            )
            after = [a + b for a, b in zip(values, piece.values, strict=True)]
            before[target] = rows + piece.rows, after

    def _remove_others(self, folder: Uri) -> None:
        """Removes the objects of attempts that do not count."""
        store = open_store(folder)
        kept = {folder.below(Path(name).name).key for name in self.slices}
        keys = {entry.key for entry in store.entries(folder.below(_prefix(self._job)).key)}
        remove_all(store, sorted(keys - kept))


def write_piece(
    batches: Iterator[pa.RecordBatch], job: PackJob, folder: Path | Uri
) -> Iterator[pa.RecordBatch]:
    """Writes consecutive rows of a target; yields facts about them, or those about parts."""
    parts: list[dict[str, np.ndarray]] = []
    rows, target, key = 0, FACTS, 0
    for place, batch in slices(batches):
        if place == FACTS:
            yield batch
            continue
        if not parts:
            target, key = place, batch.column(1)[0].as_py()
            layout = layouts_of(job)[target]
        parts.append(layout.unpack(batch.column(2)))
        rows += len(batch)
    if not parts:
        return
    name = f"{_prefix(job)}{new_suffix()}"
    columns = [part[file] for file, *_ in layout.widths for part in parts]
    content = b"".join(
        np.ascontiguousarray(column).reshape(-1).view(np.uint8).data for column in columns
    )
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
    piece: Piece, job: PackJob, folder: Path | Uri, dataset: Path | None
) -> dict[str, list[tuple[str, int, int, list[int]]]]:
    """Copies a piece to its place in the files of a dataset, or says what its object has.

    Returns:
        Names of objects and their slices: file, place, size, and sums.
    """
    content = _content(folder, piece.name)
    layout, found, begin = layouts_of(job)[piece.target], [], 0
    lengths: dict[str, np.ndarray] = {}
    for file, width, list_field in layout.widths:
        count, first = piece.rows, piece.first_row
        if list_field is not None:
            count, first = piece.values[list_field], piece.first_values[list_field]
        data = content[begin : begin + count * width]
        begin += len(data)
        found.append((file, first * width, data))
        if file in dict(layout.lists):
            lengths[file] = np.frombuffer(data, layout.dtypes[file])
    slices_of = {piece.name: _written(found, dataset)}
    starts: list[tuple[str, int, Any]] = []
    for i, file in enumerate(layout.starts):
        before, of_rows = piece.first_values[i], lengths[layout.lists[i][0]]
        first, places = starts_within(of_rows, piece.first_row, before)
        if piece.is_last:
            places = np.append(places, before + piece.values[i])
        of_starts = memoryview(places.astype(bags.STARTS_DTYPE).tobytes())
        starts.append((file, first * bags.STARTS_DTYPE.itemsize, of_starts))
    if any(len(data) for *_, data in starts) and isinstance(folder, Uri):
        name = f"{piece.name}.starts"
        open_store(folder).write(folder.below(name).key, b"".join(data for *_, data in starts))
        slices_of[name] = _written(starts, None)
    else:
        slices_of[piece.name] += _written(starts, dataset)
    return slices_of


def _prefix(job: PackJob) -> str:
    return f"rows-{job.targets[0].name}-"


def _content(folder: Path | Uri, name: str) -> memoryview:
    if isinstance(folder, Uri):
        store = open_store(folder)
        return memoryview(store.read(store.entry(folder.below(name).key)))
    return memoryview((folder / name).read_bytes())


def _written(
    found: Sequence[tuple[str, int, memoryview]], dataset: Path | None
) -> list[tuple[str, int, int, list[int]]]:
    found = [one for one in found if len(one[2])]
    for file, place, data in found:
        if dataset is not None:
            with open(dataset / file, "r+b", buffering=0) as opened:
                write_at(opened.fileno(), data, place)
    return [(file, place, len(data), slice_sums(place, data)) for file, place, data in found]
