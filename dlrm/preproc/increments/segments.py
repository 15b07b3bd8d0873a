"""Tasks that write the dictionaries of a day: segments of earlier days, linked, and new ones.

A new segment takes in the ones before it while they are less than twice as long, so that a
dictionary has few segments, and each value is written a logarithmic number of times.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.dictionaries import (
    Dictionary,
    checksum,
    open_dictionary,
    segment_name,
)
from dlrm.data.transform.lookup import IdLookup
from dlrm.files import link_or_copy, staged_file
from dlrm.locks import sync
from dlrm.mapped_files import map_file, map_npy
from dlrm.preproc.increments.candidates import joined
from dlrm.preproc.increments.known import GROWS, KnownValues
from dlrm.preproc.stages.dictionary_merge import write_directory
from dlrm.remote.task_files import fetch

DAY = "day.json"  # in `chain/` of a dataset, written last
_LEAST_SEGMENT = 1 << 12  # values; shorter segments are always taken in
_SORTED_AT_ONCE = 1 << 22
_ARRAYS = ("dictionary", "texts", "ends")


class SegmentJob(NamedTuple):
    """The arguments of `write_segments` besides its dictionaries.

    Attributes:
        kinds: type of the fields of each dictionary.
        parent: directory of the parent's transform; "" without a parent.
        crcs: checksums of the parent's dictionaries.
        known: what is known of earlier days.
        new: number of the new values of each dictionary.
        left: candidates of each bucket and dictionary; see `KnownValues.left`.
        rooms: bytes for the candidates of each dictionary.
        grown: folder of the dictionaries of new values, and of their lookups.
        transform, chain: directories to write to.
        lookups: the folder of the run's lookups, which get links to those of `chain`.
    """

    kinds: list[str]
    parent: str
    crcs: list[list[str]]
    known: KnownValues
    new: list[int]
    left: list[list[list[int]]]
    rooms: list[int]
    grown: str
    transform: str
    chain: str
    lookups: str


def write_segments(places: Sequence[int], job: SegmentJob) -> dict[str, Any]:
    """Writes dictionaries, their lookups and their candidates.

    Returns:
        For each dictionary, by its index: `segments`, their sizes; `crcs`, the checksums of their
        arrays; `linked`, file -> the parent's; `candidates`; and `forgotten`, the number of those
        that had no room.
    """
    facts = dict[str, Any]()
    for place in places:
        segments, crcs, linked = [], [], dict[str, str]()
        if job.kinds[place] != "id":
            for k, group in enumerate(groups_of(job.known.sizes[place], job.new[place])):
                made, size = _write(place, k, group, job)
                for path in IdLookup.paths(job.chain, segment_name(place, k)):
                    _link(path, Path(job.lookups, path.name))
                segments.append(size)
                crcs += made["crcs"]
                linked |= made["linked"]
        facts[str(place)] = {"segments": segments, "crcs": crcs, "linked": linked}
        facts[str(place)] |= _write_candidates(place, job)
    for folder in (job.transform, job.chain):
        sync(Path(folder))
    return facts


def groups_of(sizes: Sequence[int], new: int) -> list[list[int]]:
    """Returns the segments that become one, by index; the last index is that of new values."""
    if not sizes:
        return [[0]]
    groups = [[k] for k in range(len(sizes))]
    if not new:
        return groups
    last, total = [len(sizes)], new
    while groups and sizes[groups[-1][0]] < max(2 * total, _LEAST_SEGMENT):
        total += sizes[groups[-1][0]]
        last = groups.pop() + last
    return [*groups, last]


class _Source(NamedTuple):
    """A segment that is taken in: its arrays and lookup, and the number of values before it."""

    arrays: Dictionary
    lookup: IdLookup
    before: int  # not in its ids


def _write(place: int, k: int, group: list[int], job: SegmentJob) -> tuple[dict[str, Any], int]:
    """Writes a segment; returns its checksums and links, and its size."""
    sizes, new = job.known.sizes[place], len(job.known.sizes[place])
    names = _ARRAYS if job.kinds[place] == "string" else _ARRAYS[:1]
    if group[0] != new and len(group) == 1:
        linked = {}
        pairs = [
            (
                Path(job.transform, f"{name}_{segment_name(place, k)}.npy"),
                Path(job.parent, f"{name}_{segment_name(place, group[0])}.npy"),
            )
            for name in names
        ]
        pairs += zip(
            IdLookup.paths(job.chain, segment_name(place, k)),
            IdLookup.paths(job.known.lookups, segment_name(place, group[0])),
            strict=True,
        )
        for target, source in pairs:
            fetch(source)
            _link(source, target)
            linked[f"{target.parent.name}/{target.name}"] = f"{source.parent.name}/{source.name}"
        crcs = job.crcs[place]
        own = crcs[group[0] * len(names) : (group[0] + 1) * len(names)]
        return {"crcs": own, "linked": linked}, sizes[group[0]]
    kind, ends = job.kinds[place], np.cumsum(sizes).tolist()
    sources = [
        _Source(
            _load(job.parent, segment_name(place, s), kind),
            _lookup(job.known.lookups, segment_name(place, s), ends[s]),
            0,
        )
        for s in group[:-1]
    ]
    grown = _load(job.grown, str(place), kind)
    lookup = _lookup(job.grown, str(place), len(grown))
    sources.append(_Source(grown, lookup, sum(sizes)))
    size = _write_arrays(sources, place, k, job)
    _write_lookup(sources, sum(sizes) + len(grown), size, segment_name(place, k), job.chain)
    paths = (Path(job.transform, f"{name}_{segment_name(place, k)}.npy") for name in names)
    return {"crcs": [checksum(map_npy(path)) for path in paths], "linked": {}}, size


def _load(directory: str, name: str, kind: str) -> Dictionary:
    names = _ARRAYS if kind == "string" else _ARRAYS[:1]
    paths = [Path(directory, f"{array}_{name}.npy") for array in names]
    for path in paths:
        fetch(path)
    keys, *texts = map(map_npy, paths)
    return Dictionary(keys, texts[0], texts[1], kind) if texts else Dictionary(keys, kind=kind)


def _lookup(directory: str, name: str, last: int) -> IdLookup:
    """Returns a lookup whose greatest id is `last`."""
    for path in IdLookup.paths(directory, name):
        fetch(path)
    return IdLookup.load(directory, name, layout.id_dtype(last + 1))


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # of a task that was killed
    link_or_copy(str(source), str(target))


def _write_arrays(sources: list[_Source], place: int, k: int, job: SegmentJob) -> int:
    """Writes the keys of a segment and, of strings, their texts; returns its size."""
    name, directory = segment_name(place, k), Path(job.transform)
    parts = [source.arrays for source in sources]
    keys = [part.keys for part in parts]
    _concatenate(directory / f"dictionary_{name}.npy", keys)
    if job.kinds[place] == "string":
        texts = [part.texts for part in parts if part.texts is not None]
        _concatenate(directory / f"texts_{name}.npy", texts)
        before = np.cumsum([0, *map(len, texts)]).tolist()
        ends = [part.ends for part in parts if part.ends is not None]
        _concatenate(directory / f"ends_{name}.npy", ends, before)
    return sum(map(len, keys))


def _concatenate(path: Path, parts: Sequence[np.ndarray], more: Sequence[int] = ()) -> None:
    """Writes arrays one after the other, with numbers added to each."""
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    with staged_file(path, one_of_many=True) as partial:
        target, done = open_dictionary(partial, dtype, sum(map(len, parts))), 0
        for number, part in enumerate(parts):
            for begin in range(0, len(part), _SORTED_AT_ONCE):
                some = part[begin : begin + _SORTED_AT_ONCE]
                target[done : done + len(some)] = some + more[number] if more else some
                done += len(some)


def _write_lookup(sources: list[_Source], last: int, size: int, name: str, folder: str) -> None:
    """Writes the lookup of a segment of `size` values up to id `last`, some hashes at a time."""
    dtype = layout.id_dtype(last + 1)
    with ExitStack() as stack:
        hashes, ids, directory = (
            stack.enter_context(staged_file(path, one_of_many=True))
            for path in IdLookup.paths(folder, name)
        )
        with open(hashes, "wb") as file1, open(ids, "wb") as file2:
            for some, own in _in_order(sources, dtype, -(-size // _SORTED_AT_ONCE)):
                file1.write(some.data)
                file2.write(own.data)
        write_directory(directory, map_file(hashes, np.uint64))


def _in_order(
    sources: list[_Source], dtype: np.dtype, ranges: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields hashes in ascending order, and their ids, for one range of hashes after the other."""
    edges = [(number << 64) // max(ranges, 1) for number in range(ranges)]
    cuts = [
        [*np.searchsorted(s.lookup.hashes, np.array(edges, np.uint64)), len(s.lookup.hashes)]
        for s in sources
    ]
    for number in range(ranges):
        parts = [slice(*own[number : number + 2]) for own in cuts]
        hashes = np.concatenate([s.lookup.hashes[p] for s, p in zip(sources, parts, strict=True)])
        ids = np.concatenate(
            [
                s.lookup.ids[p].astype(dtype) + dtype.type(s.before)
                for s, p in zip(sources, parts, strict=True)
            ]
        )
        order = np.argsort(hashes)
        yield hashes[order], ids[order]


def _write_candidates(place: int, job: SegmentJob) -> dict[str, int]:
    if job.known.roles[place] != GROWS:
        return {"candidates": 0, "forgotten": 0}
    every = joined(job.known.left(place, job.left))
    kept = every.kept(job.rooms[place], job.known.day, job.known.half_life)
    kept.save(Path(job.chain), place)
    return {"candidates": len(kept), "forgotten": len(every) - len(kept)}
