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
    return int(read_manifest(Path(path), KIND, allow_links=True)["vocab_size"])


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
        _, length, predictions = shapes[0]
        self.length = max_seq_length or length
        self.max_predictions = max_predictions_per_seq or predictions
        for file, (_, length, predictions) in zip(files, shapes, strict=True):
            for what, got, expected in (
                ("--max_seq_length", length, self.length),
                ("--max_predictions_per_seq", predictions, self.max_predictions),
            ):
                if got != expected:
                    raise ValueError(f"{file}: expected rows of {what} {expected}, got {got}")
        self.num_samples = sum(rows for rows, *_ in shapes)
        if not self.num_samples:
            raise ValueError(f"{files[0]}: expected at least one row, got none")
        words = np.uint16 if self._words <= 1 << 16 else np.int32
        length, predictions = (self.length,), (self.max_predictions,)
        kinds: Any = [
            *(("lengths", "i4"), ("ids", words, length), ("segments", "i1", length)),
            *(("positions", "u2", predictions), ("masked", words, predictions), ("labels", "i8")),
        ]
        self._rows, place = np.empty(self.num_samples, kinds), 0
        for file, (rows, *_) in zip(files, shapes, strict=True):
            _read(file, partial(self._load, file, self._rows[place : place + rows]))
            place += rows
        self.lengths = self._rows["lengths"].astype(np.int64)
        self.num_masked: np.ndarray | None = np.count_nonzero(self._rows["positions"], axis=1)

    def _load(self, path: Path, rows: np.ndarray, fields: dict[str, Any]) -> None:
        """Fills rows with those of a file."""
        assert rows.dtype.names
        for start in range(0, len(rows), _BLOCK):
            block = (
                np.asarray(field[start : start + _BLOCK], np.int64) for field in fields.values()
            )
            read = self._checked(path, start, *block)
            for name, values in zip(rows.dtype.names, read, strict=True):
                rows[name][start : start + _BLOCK] = values

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
        size, used, labels = self._words, mask != 0, labels.reshape(-1, 1)
        lengths = used.sum(axis=1)
        segments, ids = np.where(used, segments, 0), np.where(used, ids, 0)
        masked = np.where(positions == 0, 0, masked)  # [CLS] is never masked
        if self._unknown_id is not None:
            ids = np.where(ids < size, ids, self._unknown_id)
            positions = np.where(masked < size, positions, 0)
            masked = np.where(masked < size, masked, 0)
        is_gap = used[:, 1:] & ~used[:, :-1]
        for wrong, expected, shown in (
            (is_gap, "input_mask of ones and then zeros", mask),
            (lengths[:, None] == 0, "input_mask of ones and then zeros", mask),
            ((ids < 0) | (ids >= size), f"input_ids in [0, {size})", ids),
            ((segments < 0) | (segments > 1), "segment_ids of 0 and 1", segments),
            (
                (positions < 0) | (positions >= lengths[:, None]),
                "masked_lm_positions in its row",
                positions,
            ),
            ((masked < 0) | (masked >= size), f"masked_lm_ids in [0, {size})", masked),
            ((labels < 0) | (labels > 1), "a label of 0 or 1", labels),
        ):
            if wrong.any():
                row = int(wrong.any(axis=1).argmax())
                got = f"expected {expected}, got {shown[row].tolist()}"
                raise ValueError(f"{path}: row {start + row}: {got}")
        return lengths, ids, segments, positions, masked, labels[:, 0]

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        taken = self._rows[rows]
        positions = taken["positions"].astype(np.int32)
        return TextBatch.of(
            rows,
            taken["ids"].astype(np.int32),
            taken["segments"].copy(),
            taken["lengths"].copy(),
            labels=taken["labels"].copy(),
            masked_positions=positions,
            masked_ids=np.where(positions == 0, NO_TOKEN, taken["masked"].astype(np.int32)),
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
        if kind is None or kind.kind not in "iub" or file[name].is_virtual or file[name].external:
            raise ValueError(f"{path}: {name}: expected integers in the file, got {kind}")
    fields = {name: file[name] for name in FIELDS}
    ids, positions = fields["input_ids"].shape, fields["masked_lm_positions"].shape
    shapes = [ids, ids, ids, (*ids[:1], *positions[1:2]), positions, ids[:1]]
    for (name, field), expected in zip(fields.items(), shapes, strict=True):
        labels = name == "next_sentence_labels"
        got = field.shape[:1] if labels and field.shape[1:] == (1,) else field.shape
        if got != expected or len(got) != 2 - labels or ids[1] > MAX_LENGTH:
            raise ValueError(f"{path}: expected {name} of shape {expected}, got {field.shape}")
        claimed, stored = math.prod(got) * field.dtype.itemsize, field.id.get_storage_size()
        if claimed > _MOST_COMPRESSED * stored:
            raise ValueError(f"{path}: {name}: got {ids[0]} rows in {stored} bytes")
    return fields
