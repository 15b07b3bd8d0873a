"""Reads pre-training rows in HDF5, with the fields of NVIDIA's and Habana's programs."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.verification import Verifier
from dlrm.documents import brief
from dlrm.files import MANIFEST, within
from dlrm.language.config import MAX_LENGTH
from dlrm.language.loader import NO_TOKEN, TextBatch
from dlrm.language.rows import FIELDS, KIND, h5py
from dlrm.manifest import read_manifest

_MOST_COMPRESSED = 1100  # times smaller; DEFLATE reaches 1032
_MOST_WORDS = 1 << 31
_BLOCK = 8192  # rows read at a time


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
        path: an HDF5 file, or a folder of such files.
        max_seq_length: tokens per row; None: those of the first file.
        max_predictions_per_seq: maximum masked tokens per row; None: that of the first file.
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
        path: str | os.PathLike,
        max_seq_length: int | None = None,
        max_predictions_per_seq: int | None = None,
        *,
        vocab_size: int | None = None,
        unknown_id: int | None = None,
        verify_data: str = "first",
        allow_links: bool = False,
    ) -> None:
        files = _files(Path(path), allow_links)
        Verifier(files[0].parent, KIND, verify_data, allow_links).check(files)
        self.vocab_size = vocab_size or known_vocab_size(path)
        self._words, self._unknown_id = self.vocab_size or _MOST_WORDS, unknown_id
        if unknown_id is not None and not 0 <= unknown_id < self._words:
            raise ValueError(
                f"--unknown_id: expected a token in [0, {self._words}), got {unknown_id}"
            )
        shapes = [_read(file, _shape) for file in files]
        _, self.length, self.max_predictions = shapes[0]
        self.length = max_seq_length or self.length
        self.max_predictions = max_predictions_per_seq or self.max_predictions
        for file, (_, length, predictions) in zip(files, shapes, strict=True):
            for what, flag, got, expected in (
                ("sequence length", "max_seq_length", length, self.length),
                ("masked tokens", "max_predictions_per_seq", predictions, self.max_predictions),
            ):
                if got != expected:
                    raise ValueError(f"{file}: expected {what} {expected} (--{flag}), got {got}")
        self.num_samples = sum(rows for rows, *_ in shapes)
        if not self.num_samples:
            raise ValueError(f"{files[0]}: expected at least one row, got none")
        narrow = np.uint16 if self._words <= 1 << 16 else np.int32
        sizes = (self.length, 2, self.max_predictions, self.max_predictions)
        self._rows = [np.zeros((self.num_samples, size), narrow) for size in sizes]
        self.lengths = np.zeros(self.num_samples, np.int64)
        begin = 0
        for file, (rows, *_) in zip(files, shapes, strict=True):
            _read(file, partial(self._load, file, begin))
            begin += rows
        self.num_masked: np.ndarray | None = np.count_nonzero(self._rows[2], axis=1)

    def _load(self, path: Path, begin: int, fields: dict[str, Any]) -> None:
        """Reads the rows of a file to a place in memory."""
        for start in range(0, len(fields["input_ids"]), _BLOCK):
            arrays = [
                np.asarray(field[start : start + _BLOCK], np.int64) for field in fields.values()
            ]
            lengths, *rows = self._checked(path, start, *arrays)
            place = slice(begin + start, begin + start + len(lengths))
            self.lengths[place] = lengths
            for own, values in zip(self._rows, rows, strict=True):
                own[place] = values

    def _checked(
        self,
        path: Path,
        start: int,
        ids: np.ndarray,
        mask: np.ndarray,
        segments: np.ndarray,
        positions: np.ndarray,
        masked: np.ndarray,
        labels: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Returns lengths, tokens, facts (where B begins, and the label), positions and tokens."""

        def refuse(wrong: Any, expected: str, *shown: np.ndarray) -> None:
            if wrong.any():
                row = int(wrong.argmax())
                got = " of ".join(str(values[row].tolist()) for values in shown)
                raise ValueError(f"{path}: row {start + row}: expected {expected}, got {got}")

        used, labels = mask != 0, labels.reshape(-1)
        lengths = used.sum(axis=1)
        wrong = (used[:, 1:] & ~used[:, :-1]).any(axis=1) | (lengths == 0)
        refuse(wrong, "tokens and then padding, by input_mask", mask, ids)
        # Positions end with zeros: position 0 is [CLS], which is never masked.
        num_masked = np.cumprod(positions != 0, axis=1).sum(axis=1)
        masked = np.where(np.arange(positions.shape[1]) < num_masked[:, None], masked, 0)
        ordered = np.sort(positions, axis=1)
        wrong = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != 0)).any(axis=1)
        wrong |= np.count_nonzero(positions, axis=1) != num_masked
        wrong |= ((positions < 0) | (positions >= lengths[:, None])).any(axis=1)
        refuse(wrong, "masked_lm_positions in the row, each once, and then zeros", positions)
        in_b = (segments == 1) & used
        wrong = (used & (segments != 0) & ~in_b).any(axis=1)
        wrong |= (used[:, 1:] & (segments[:, 1:] < segments[:, :-1])).any(axis=1)
        refuse(wrong, "segment_ids of 0 and then of 1", segments)
        refuse((labels != 0) & (labels != 1), "a label of 0 or 1", labels)
        ids, size = np.where(used, ids, 0), self._words
        if self._unknown_id is not None:
            ids = np.where(ids < size, ids, self._unknown_id)
            positions = np.where(masked < size, positions, 0)
            masked = np.where(masked < size, masked, 0)
        for tokens in (ids, masked):
            wrong = ((tokens < 0) | (tokens >= size)).any(axis=1)
            refuse(wrong, f"tokens in [0, {size})", tokens)
        second = np.where(in_b.any(axis=1), in_b.argmax(axis=1), lengths)
        return lengths, ids, np.stack([second, labels], axis=1), positions, masked

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        ids, facts, positions, masked = (array[rows].astype(np.int32) for array in self._rows)
        lengths, second = self.lengths[rows], facts[:, :1]
        column = np.arange(self.length)
        masked[positions == 0] = NO_TOKEN
        return TextBatch.of(
            rows,
            ids,
            ((column >= second) & (column < lengths[:, None])).astype(np.int8),
            lengths.astype(np.int32),
            labels=facts[:, 1].astype(np.int64),
            masked_positions=positions,
            masked_ids=masked,
        )


def _files(path: Path, allow_links: bool) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".hdf5", ".h5"))
    if not files:
        raise FileNotFoundError(f"{path}: expected *.hdf5 or *.h5, found none")
    return [within(path, file.name, path, allow_links) for file in files]


def _read(path: Path, use: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns what a function makes of the fields of a file."""
    try:
        with h5py().File(path, "r") as file:
            return use(_fields(file, path))
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file: {brief(error)}") from error


def _shape(fields: dict[str, Any]) -> tuple[int, int, int]:
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
