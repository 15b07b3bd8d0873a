"""Prepared rows for masked language models and next-sentence prediction."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dlrm.data.verification import Verifier
from dlrm.files import MANIFEST, within
from dlrm.language.data.loader import NO_TOKEN, TextBatch
from dlrm.language.pretraining.hdf5 import KIND, LABEL, LENGTH, NUM_MASKED, SECOND, File, open_hdf5
from dlrm.manifest import read_manifest

_SUFFIXES = (".hdf5", ".h5")
_BLOCK = 1 << 16

PathOrPaths = str | os.PathLike | Sequence[str | os.PathLike]


def open_pretraining(
    path_or_paths: PathOrPaths,
    max_seq_length: int | None = None,
    max_predictions: int | None = None,
    pad_to_seq_length: bool = False,
    *,
    vocab_size: int | None = None,
    unknown_id: int | None = None,
    verify_data: str = "first",
    allow_links: bool = False,
) -> "PretrainingDataset":
    """Opens pre-training rows, which are read into memory.

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
        ValueError: a file is damaged or has other sizes, and the message names it; or h5py is not
            installed. `read` finds tokens outside the vocabulary.
    """
    given = [path_or_paths] if isinstance(path_or_paths, str | os.PathLike) else path_or_paths
    if not given:
        raise ValueError("--data_dir: expected at least one path, got none")
    files: list[File] = []
    for path in map(Path, given):
        names = _files(path, allow_links)
        Verifier(names[0].parent, KIND, verify_data, allow_links).check(names)
        files += map(open_hdf5, names)
    sizes = [known_vocab_size(path) for path in given]
    if vocab_size is None and all(sizes):
        vocab_size = max(size for size in sizes if size)
    return PretrainingDataset(
        files,
        max_seq_length or files[0].length,
        max_predictions or files[0].predictions,
        pad_to_seq_length,
        vocab_size=vocab_size,
        unknown_id=unknown_id,
    )


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


def _files(path: Path, allow_links: bool) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise FileNotFoundError(f"{path}: expected *.hdf5 or *.h5, found none")
    return [within(path, file.name, path, allow_links) for file in files]


class PretrainingDataset:
    """Rows of one or several files; `open_pretraining` makes it. A `TextSource`.

    Attributes:
        num_samples: number of rows.
        length: tokens of a row with padding.
        max_predictions: maximum masked tokens of a row.
        lengths: tokens of each row without padding, `[num_samples]`, uint16.
        num_masked: masked tokens of each row, `[num_samples]`, uint16.
        vocab_size: upper limit of ids, exclusive; None is unchecked.
    """

    def __init__(
        self,
        files: list[File],
        length: int,
        max_predictions: int,
        pad: bool = False,
        *,
        vocab_size: int | None = None,
        unknown_id: int | None = None,
    ) -> None:
        if unknown_id is not None and not 0 <= unknown_id < (vocab_size or 0):
            raise ValueError(f"unknown_id: expected a token in [0, {vocab_size}), got {unknown_id}")
        self.length, self.max_predictions, self.vocab_size = length, max_predictions, vocab_size
        self._files, self._unknown_id = files, unknown_id
        for file in files:
            self._check(file, pad)
        counts = [len(file.facts) for file in files]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_samples = int(self._starts[-1])
        self._facts = np.concatenate([file.facts for file in files])
        if unknown_id is not None:
            self._facts[:, NUM_MASKED] = np.concatenate([self._num_known(file) for file in files])
        self.lengths, self.num_masked = self._facts[:, LENGTH], self._facts[:, NUM_MASKED]

    def _check(self, file: File, pad: bool) -> None:
        sizes = (
            ("sequence length", "--max_seq_length", file.length, self.length),
            ("masked tokens", "--max_predictions_per_seq", file.predictions, self.max_predictions),
        )
        path, facts = file.path, file.facts
        for name, flag, got, expected in sizes:
            if got != expected and not (pad and got < expected):
                hint = "; --pad_to_seq_length pads it" if got < expected else ""
                raise ValueError(f"{path}: expected {name} {expected} ({flag}), got {got}{hint}")
        wrong = (facts[:, LENGTH] > file.length) | (facts[:, SECOND] > facts[:, LENGTH])
        wrong |= (facts[:, NUM_MASKED] > file.predictions) | (facts[:, LABEL] > 1)
        wrong |= facts[:, LENGTH] == 0
        if wrong.any():
            row = int(wrong.argmax())
            length, second, masked, label = facts[row].tolist()
            raise ValueError(
                f"{path}: row {row}: expected 1 to {file.length} tokens, B within them, at most "
                f"{file.predictions} masked, and a label of 0 or 1, got {length} tokens, B at "
                f"{second}, {masked} masked, label {label}"
            )

    def _num_known(self, file: File) -> np.ndarray:
        """Returns the number of masked tokens of each row that are in the vocabulary."""
        counts = file.facts[:, NUM_MASKED].copy()
        for start in range(0, len(counts), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(counts)))
            _, _, masked = file.read(rows)
            used = np.arange(file.predictions) < counts[rows, None]
            counts[rows] = (used & (masked < self.vocab_size)).sum(axis=1)
        return counts

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`.

        Raises:
            ValueError: a token is outside the vocabulary, or a masked one outside its row; the
                message names file and row.
        """
        rows = np.asarray(rows, np.int64)
        count, facts = len(rows), self._facts[rows].astype(np.int32)
        ids = np.zeros((count, self.length), np.int32)
        positions = np.zeros((count, self.max_predictions), np.int32)
        masked = np.zeros((count, self.max_predictions), np.int32)
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(numbers):
            file, places = self._files[number], np.flatnonzero(numbers == number)
            rows_of_file = rows[places] - self._starts[number]
            tokens = file.read(rows_of_file)
            if self.vocab_size is not None:
                tokens = self._known(file, rows_of_file, *tokens)
            ids[places, : file.length] = tokens[0]
            positions[places, : file.predictions] = tokens[1]
            masked[places, : file.predictions] = tokens[2]
        column = np.arange(self.length)
        lengths, second, num_masked, labels = (facts[:, i : i + 1] for i in range(4))
        unused = np.arange(self.max_predictions) >= num_masked
        positions[unused], masked[unused] = 0, NO_TOKEN
        self._check_positions(rows, positions, lengths)
        return TextBatch(
            torch.from_numpy(ids),
            torch.from_numpy(((column >= second) & (column < lengths)).astype(np.int8)),
            torch.from_numpy(lengths[:, 0].copy()),
            torch.from_numpy(rows),
            torch.from_numpy(labels[:, 0].astype(np.int64)),
            masked_positions=torch.from_numpy(positions),
            masked_ids=torch.from_numpy(masked),
        )

    def _known(
        self,
        file: File,
        places: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        masked: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Refuses or replaces tokens outside the vocabulary."""
        assert self.vocab_size is not None
        if max(ids.max(initial=0), masked.max(initial=0)) < self.vocab_size:
            return ids, positions, masked
        unknown, wrong = ids >= self.vocab_size, masked >= self.vocab_size
        if self._unknown_id is None:
            row = int((unknown.any(axis=1) | wrong.any(axis=1)).argmax())
            raise ValueError(
                f"{file.path}: row {places[row]}: expected tokens in [0, {self.vocab_size}), "
                f"got {max(ids[row].max(), masked[row].max(initial=0))}"
            )
        ids = np.where(unknown, self._unknown_id, ids)
        used = np.arange(file.predictions) < file.facts[places, NUM_MASKED, None]
        order = np.argsort(wrong | ~used, axis=1, kind="stable")  # known ones first, in order
        positions = np.take_along_axis(positions, order, axis=1)
        return ids, positions, np.take_along_axis(masked, order, axis=1)

    def _check_positions(
        self, rows: np.ndarray, positions: np.ndarray, lengths: np.ndarray
    ) -> None:
        wrong = (positions >= lengths).any(axis=1)
        if wrong.any():
            row = int(wrong.argmax())
            number = int(np.searchsorted(self._starts, rows[row], side="right")) - 1
            raise ValueError(
                f"{self._files[number].path}: row {rows[row] - self._starts[number]}: "
                f"expected masked tokens at positions in [0, {lengths[row, 0]}), got "
                f"{positions[row].max()}"
            )
