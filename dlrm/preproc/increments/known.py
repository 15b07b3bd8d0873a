"""Divides a bucket's values into known ones, those that get ids, and candidates."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.dictionaries import Counts, bytes_of_texts, frequent
from dlrm.data.transform.lookup import lookup_in, spread
from dlrm.files import staged_file
from dlrm.preproc.increments.candidates import Admission, Candidates
from dlrm.preproc.stages.dictionary_merge import texts_of
from dlrm.remote.task_files import read_ranges, shared

GROWS, FROZEN, KEPT, OTHER = "grows", "frozen", "kept", "other"
_DIGEST = np.uint64(0xBF58476D1CE4E5B9)  # an odd factor, that of splitmix64


class KnownValues(NamedTuple):
    """The values of earlier days; see `dictionary_merge.Known`.

    Attributes:
        roles: for each counted column, `GROWS` for a dictionary that gets new values, `FROZEN` for
            one that stays as the first day made it, `KEPT` for what is not fitted again, and
            `OTHER`.
        texts: whether the values of each column are texts.
        admissions: for each column, the values that get ids.
        sizes: for each column, the sizes of the parent's segments, none without a parent.
        lookups: folder of the parent's lookups.
        state: folder of the parent's candidates; None if there are none.
        buckets: number of buckets.
        day, half_life: see `Candidates.divide`.
        folder: folder of the candidates of the buckets.
    """

    roles: list[str]
    texts: list[bool]
    admissions: list[Admission]
    sizes: list[list[int]]
    lookups: str
    state: str | None
    buckets: int
    day: int
    half_life: float | None
    folder: str

    @contextmanager
    def divide(self, bucket: int) -> Iterator["_Divided"]:
        """Yields what divides the columns of a bucket, whose candidates are written meanwhile."""
        with ExitStack() as stack:
            partial = stack.enter_context(staged_file(Path(self.folder, str(bucket))))
            file = stack.enter_context(open(partial, "wb"))
            yield _Divided(self, bucket, file)

    def left(self, column: int, facts: list[list[list[int]]]) -> list[Candidates]:
        """Returns the candidates of a column, given `left` of `_Divided.facts` of each bucket."""
        ranges, found, own = [], [], self.texts[column]
        for bucket, sizes in enumerate(facts):
            before = zip(sizes, self.texts[:column], strict=False)
            begin = sum(_file_bytes(values, size, texts) for (values, size), texts in before)
            entries, size = sizes[column]
            end = begin + _file_bytes(entries, size, own)
            ranges.append((f"{self.folder}/{bucket}", begin, end))
        for content, sizes in zip(read_ranges(ranges), facts, strict=True):
            entries, size = sizes[column]
            hashes, counts = (
                np.frombuffer(content, kind, entries, place * entries)
                for kind, place in (("u8", 0), ("i8", 8))
            )
            days = np.frombuffer(content, np.int32, entries, 16 * entries)
            texts = texts_of(content[20 * entries :], entries, 0, size) if own else None
            found.append(Candidates(hashes, counts, days, texts))
        return found


def _file_bytes(entries: int, text_bytes: int, texts: bool) -> int:
    """Returns the bytes of some candidates in the file of a bucket."""
    return 20 * entries + (4 * entries + text_bytes if texts else 0)


class _Divided:
    """Divides the columns of one bucket; see `dictionary_merge.Divide`."""

    def __init__(self, known: KnownValues, bucket: int, file: BinaryIO) -> None:
        self._known, self._file = known, file
        self._range = [-(-(b << 32) // known.buckets) << 32 for b in (bucket, bucket + 1)]
        self._left: list[list[int]] = []
        self._content: list[int] = []

    def __call__(self, column: int, merged: Counts) -> Counts | None:
        """Returns the values of a column that get ids, with counts in units of 1/256."""
        known, role = self._known, self._known.roles[column]
        self._content.append(_content(merged) if role in (GROWS, FROZEN) else 0)
        if role == OTHER:
            self._left.append([0, 0])
            return None
        texts = known.texts[column]
        made, left = merged.take(np.zeros(len(merged.keys), bool)), Candidates.none(texts)
        if role == GROWS:
            new = merged
            if sizes := known.sizes[column]:
                lookup = lookup_in(shared(known.lookups), column, sizes)
                new = merged.take(lookup(Parsed.present(merged.keys)) == 0)
            before = Candidates.none(texts)
            if known.state is not None:
                state = Path(shared(known.state))
                before = Candidates.load(state, column, texts, *self._range)
            admission = known.admissions[column]
            made, left = before.divide(new, admission, known.day, known.half_life)
        elif role == FROZEN and not known.sizes[column]:
            made = frequent(merged, known.admissions[column].limit)
        self._write(left)
        return made

    def _write(self, left: Candidates) -> None:
        for array in (left.hashes, left.counts, left.days):
            self._file.write(np.ascontiguousarray(array).data)
        ends, content = bytes_of_texts(left.texts)
        self._file.write(np.diff(ends, prepend=0).astype(np.int32).data)
        self._file.write(content.data)
        self._left.append([len(left), len(content)])

    def facts(self) -> dict[str, Any]:
        """Returns the candidates of each column, and bytes of their texts, and sums of values."""
        return {"left": self._left, "content": self._content}


def _content(counts: Counts) -> int:
    """Returns a sum over occurrences of values, by which equal rows of two days are recognized."""
    hashes = spread(counts.keys)
    mixed = (hashes ^ (hashes >> np.uint64(31))) * _DIGEST
    return int((mixed * counts.counts.astype(np.uint64)).sum(dtype=np.uint64))
