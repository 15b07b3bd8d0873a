"""Reads pre-training rows in HDF5, with the fields of NVIDIA's and Habana's programs."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.verification import Verifier
from dlrm.documents import brief
from dlrm.files import MANIFEST, within
from dlrm.language.config import MAX_LENGTH
from dlrm.language.loader import NO_TOKEN, TextBatch
from dlrm.language.rows import FIELDS, KIND, LENGTH, NUM_MASKED, TextRows, h5py
from dlrm.manifest import read_manifest

_MOST_COMPRESSED = 1100  # times smaller; DEFLATE reaches 1032
_BLOCK = 8192  # rows read at a time
_SUFFIXES = (".hdf5", ".h5")

PathOrPaths = str | os.PathLike | Sequence[str | os.PathLike]


def known_vocab_size(path: str | os.PathLike) -> int | None:
    """Returns the vocabulary size of a dataset of `write_dataset`; None for other files."""
    if not Path(path, MANIFEST).is_file():
        return None
    size = read_manifest(Path(path), KIND, allow_links=True).get("vocab_size")
    if type(size) is not int or size < 1:
        raise ValueError(
            f"{Path(path, MANIFEST)}: vocab_size: expected a positive number, got {size!r:.40}"
        )
    return size


class PretrainingDataset:
    """Pre-training rows of HDF5 files, in memory: a `TextSource`.

    Args:
        path_or_paths: an HDF5 file, a folder of such files, or several of them.
        max_seq_length: tokens per row; None: those of the first file.
        max_predictions: maximum masked tokens per row; None: that of the first file.
        pad_to_seq_length: whether to pad rows of fewer tokens and predictions to these.
        vocab_size: vocabulary size of the model; None: that of the dataset, if known.
        unknown_id: id that replaces tokens outside the vocabulary, which then are never predicted,
            as for Graphcore's models with a smaller vocabulary; None: they are errors.
        verify_data: whether and when to compare files with their checksums; see `Verifier`.
        allow_links: whether files of a folder may be symbolic links out of it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, has other sizes, or a row is not tokens of the vocabulary
            followed by padding, and the message names file and row; or h5py is not installed.
    """

    def __init__(
        self,
        path_or_paths: PathOrPaths,
        max_seq_length: int | None = None,
        max_predictions: int | None = None,
        pad_to_seq_length: bool = False,
        *,
        vocab_size: int | None = None,
        unknown_id: int | None = None,
        verify_data: str = "first",
        allow_links: bool = False,
    ) -> None:
        given = [path_or_paths] if isinstance(path_or_paths, str | os.PathLike) else path_or_paths
        if not given:
            raise ValueError("--dataset: expected at least one path, got none")
        paths: list[Path] = []
        for path in map(Path, given):
            files = _files(path, allow_links)
            Verifier(files[0].parent, KIND, verify_data, allow_links).check(files)
            paths += files
        known = [known_vocab_size(path) for path in given]
        if vocab_size is None and all(known):
            vocab_size = max(size for size in known if size)
        if unknown_id is not None and not 0 <= unknown_id < (vocab_size or 0):
            raise ValueError(
                f"--unknown_id: expected a token in [0, {vocab_size}), got {unknown_id}"
            )
        self.vocab_size, self._unknown_id, self._pad = vocab_size, unknown_id, pad_to_seq_length
        shapes = [_read(path, _shape) for path in paths]
        self.length = max_seq_length or shapes[0][1]
        self.max_predictions = max_predictions or shapes[0][2]
        for path, (_, length, predictions) in zip(paths, shapes, strict=True):
            self._check_size(path, "sequence length", "max_seq_length", length, self.length)
            what = ("masked tokens", "max_predictions_per_seq")
            self._check_size(path, *what, predictions, self.max_predictions)
        self.num_samples = sum(rows for rows, *_ in shapes)
        if not self.num_samples:
            raise ValueError(f"{paths[0]}: expected at least one row, got none")
        narrow = np.uint16  # of tokens: half the memory of int32, if the vocabulary allows it
        sizes = (self.length, 4, self.max_predictions, self.max_predictions)
        self._rows = TextRows(*(np.zeros((self.num_samples, size), narrow) for size in sizes))
        place = 0
        for path in paths:
            place = _read(path, lambda *file, place=place: self._load(place, *file))
        self.lengths = self._rows.facts[:, LENGTH].astype(np.int64)
        self.num_masked: np.ndarray | None = self._rows.facts[:, NUM_MASKED].astype(np.int64)

    def _check_size(self, path: Path, what: str, flag: str, got: int, expected: int) -> None:
        if got != expected and not (self._pad and got < expected):
            hint = "; --pad_to_seq_length pads it" if got < expected else ""
            raise ValueError(f"{path}: expected {what} {expected} (--{flag}), got {got}{hint}")

    def _load(self, place: int, fields: dict[str, Any], path: Path) -> int:
        """Reads the rows of a file to a place in memory; returns the place after them."""
        for start in range(0, len(fields["input_ids"]), _BLOCK):
            rows = self._known(_checked_rows(fields, start, path), path, start)
            most = max(array.max(initial=0) for array in (rows.ids, rows.masked_ids))
            if most > np.iinfo(self._rows.ids.dtype).max:
                self._rows = TextRows(*(array.astype(np.int32) for array in self._rows))
            for own, array in zip(self._rows, rows, strict=True):
                own[place : place + len(array), : array.shape[1]] = array
            place += len(rows.ids)
        return place

    def _known(self, rows: TextRows, path: Path, start: int) -> TextRows:
        """Refuses or replaces tokens outside the vocabulary."""
        size = self.vocab_size
        if size is None or max(rows.ids.max(initial=0), rows.masked_ids.max(initial=0)) < size:
            return rows
        unknown, wrong = rows.ids >= size, rows.masked_ids >= size
        if self._unknown_id is None:
            most = np.maximum(rows.ids.max(axis=1), rows.masked_ids.max(axis=1, initial=0))
            text = f"tokens in [0, {size}), got"
            _refuse(path, start, most >= size, lambda row: f"{text} {most[row]}")
        used = np.arange(wrong.shape[1]) < rows.facts[:, NUM_MASKED, None]
        order = np.argsort(wrong | ~used, axis=1, kind="stable")  # known ones first, in order
        kept = (used & ~wrong).sum(axis=1)
        rows.facts[:, NUM_MASKED] = kept
        masked = [np.take_along_axis(array, order, axis=1) for array in rows[2:]]
        for array in masked:
            array[np.arange(wrong.shape[1]) >= kept[:, None]] = 0
        return TextRows(np.where(unknown, self._unknown_id or 0, rows.ids), rows.facts, *masked)

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        ids, facts, positions, masked = (array[rows].astype(np.int32) for array in self._rows)
        column = np.arange(self.length)
        lengths, second, num_masked, labels = (facts[:, i : i + 1] for i in range(4))
        masked[np.arange(self.max_predictions) >= num_masked] = NO_TOKEN
        return TextBatch.of(
            rows,
            ids,
            ((column >= second) & (column < lengths)).astype(np.int8),
            lengths[:, 0].copy(),
            labels=labels[:, 0].astype(np.int64),
            masked_positions=positions,
            masked_ids=masked,
        )


def _files(path: Path, allow_links: bool) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise FileNotFoundError(f"{path}: expected *.hdf5 or *.h5, found none")
    return [within(path, file.name, path, allow_links) for file in files]


def _read(path: Path, use: Callable[[dict[str, Any], Path], Any]) -> Any:
    """Returns what a function makes of the fields of a file."""
    try:
        with h5py().File(path, "r") as file:
            return use(_fields(file, path), path)
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file: {brief(error)}") from error


def _shape(fields: dict[str, Any], path: Path) -> tuple[int, int, int]:
    return (*fields["input_ids"].shape, fields["masked_lm_positions"].shape[1])


def _fields(file: Any, path: Path) -> dict[str, Any]:
    """Returns the fields of a file, which must hold as many rows as it claims."""
    if missing := [name for name in FIELDS if name not in file]:
        raise ValueError(f"{path}: expected the fields {', '.join(FIELDS)}, got no {missing[0]}")
    for name in FIELDS:
        if (link := type(file.get(name, getlink=True)).__name__) != "HardLink":
            raise ValueError(f"{path}: {name}: expected rows in the file, got {link}")
        kind = getattr(file[name], "dtype", None)  # groups have none
        if kind is None or kind.kind not in "iub":
            raise ValueError(f"{path}: {name}: expected integers, got {kind or 'a group'}")
    fields = {name: file[name] for name in FIELDS}
    ids, positions = fields["input_ids"].shape, fields["masked_lm_positions"].shape
    shapes = [ids, ids, ids, positions, positions, ids[:1]]
    for (name, field), expected in zip(fields.items(), shapes, strict=True):
        labels = name == "next_sentence_labels"
        got = field.shape[:1] if labels and field.shape[1:] == (1,) else field.shape
        if got != expected or len(got) != 2 - labels or got[0] != ids[0] or ids[1] > MAX_LENGTH:
            raise ValueError(f"{path}: expected {name} of shape {expected}, got {field.shape}")
        if field.is_virtual or field.external:
            raise ValueError(f"{path}: {name}: expected rows in the file, got those of others")
        claimed, stored = math.prod(field.shape) * field.dtype.itemsize, field.id.get_storage_size()
        if claimed > _MOST_COMPRESSED * stored:
            raise ValueError(
                f"{path}: {name}: expected at most {_MOST_COMPRESSED} times the {stored} bytes "
                f"that are stored, got {ids[0]} rows of {claimed} bytes in all"
            )
    return fields


def _checked_rows(fields: dict[str, Any], start: int, path: Path) -> TextRows:
    """Returns some rows of a file; the message of an error has file, row and values."""
    ids, mask, segments, positions, masked, labels = (
        np.asarray(fields[name][start : start + _BLOCK], np.int64) for name in FIELDS
    )
    labels, used = labels.reshape(-1), mask != 0
    lengths, refuse = used.sum(axis=1), partial(_refuse, path, start)
    wrong = (used[:, 1:] & ~used[:, :-1]).any(axis=1) | (lengths == 0) | ~_are_words(ids)
    refuse(
        wrong,
        lambda row: (
            f"tokens of at least 0 and then padding, got input_mask {mask[row].tolist()} "
            f"of input_ids {ids[row].tolist()}"
        ),
    )
    # Positions end with zeros: position 0 is [CLS], which is never masked.
    num_masked = np.cumprod(positions != 0, axis=1).sum(axis=1)
    masked[np.arange(positions.shape[1]) >= num_masked[:, None]] = 0
    ordered = np.sort(positions, axis=1)
    wrong = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0)).any(axis=1)
    wrong |= np.count_nonzero(positions, axis=1) != num_masked
    wrong |= ((positions < 0) | (positions >= lengths[:, None])).any(axis=1) | ~_are_words(masked)
    refuse(
        wrong,
        lambda row: (
            f"masked_lm_positions in [1, {lengths[row]}), each once, and then zeros, of "
            f"masked_lm_ids of at least 0, got {positions[row].tolist()} of {masked[row].tolist()}"
        ),
    )
    in_b = segments == 1
    wrong = (used & (segments != 0) & ~in_b).any(axis=1)
    wrong |= (used[:, 1:] & (segments[:, 1:] < segments[:, :-1])).any(axis=1)
    refuse(
        wrong,
        lambda row: f"segment_ids of 0 and then of 1, got {segments[row][used[row]].tolist()}",
    )
    wrong = (labels != 0) & (labels != 1)
    refuse(wrong, lambda row: f"a label of 0 or 1, got {labels[row]}")
    second = np.where((in_b & used).any(axis=1), in_b.argmax(axis=1), lengths)
    facts = np.stack([lengths, second, num_masked, labels], axis=1)
    return TextRows(np.where(used, ids, 0), facts, positions, masked)


def _are_words(ids: np.ndarray) -> np.ndarray:
    return np.all((ids >= 0) & (ids <= np.iinfo(np.int32).max), axis=1)


def _refuse(path: Path, start: int, wrong: np.ndarray, expected: Callable[[int], str]) -> None:
    """Raises ValueError for the first wrong row."""
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"{path}: row {start + row}: expected {expected(row)}")
