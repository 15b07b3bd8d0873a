"""Prepared rows for masked language models and next-sentence prediction, from any known format."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dlrm.data.verification import Verifier
from dlrm.files import within
from dlrm.language.data.config import DATA_FORMATS
from dlrm.language.data.layout import KIND, LABEL, LENGTH, NUM_MASKED, SECOND, Shard, open_shards
from dlrm.language.data.loader import NO_TOKEN, TextBatch
from dlrm.language.pretraining.formats import PopartShard, is_hdf5, open_hdf5, open_popart

_HDF5_SUFFIXES = (".hdf5", ".h5")
_BLOCK = 1 << 16

PathOrPaths = str | os.PathLike | Sequence[str | os.PathLike]


class _Part(NamedTuple):
    """Rows of one file, all of the same sizes."""

    shard: Shard | PopartShard
    length: int
    predictions: int

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, positions of masked tokens, and these tokens."""
        tokens = self.shard.read(rows)
        end = self.length + self.predictions
        return tokens[:, : self.length], tokens[:, self.length : end], tokens[:, end:]


def open_pretraining(
    path_or_paths: PathOrPaths,
    data_format: str = "auto",
    max_seq_length: int | None = None,
    max_predictions: int | None = None,
    pad_to_seq_length: bool = False,
    *,
    vocab_size: int | None = None,
    unknown_id: int | None = None,
    verify_data: str = "first",
    allow_links: bool = False,
) -> "PretrainingDataset":
    """Opens pre-training rows.

    Args:
        path_or_paths: a dataset that `write_shards` wrote, an HDF5 file or a PopART file; a folder
            of such files; or several of them.
        data_format: "shards" (ours), "hdf5" (NVIDIA's and Gaudi's), "popart" (Graphcore's binary
            records), or "auto": one of the first two. HDF5 files are read into memory.
        max_seq_length: tokens per row; None: those of the first file. PopART's files do not state
            it.
        max_predictions: maximum masked tokens per row; None: that of the first file. PopART's files
            do not state it.
        pad_to_seq_length: whether to pad rows of fewer tokens and predictions to these.
        vocab_size: vocabulary size of the model; None: that of the dataset, if known.
        unknown_id: id that replaces tokens outside the vocabulary, which then are never predicted,
            as for Graphcore's models with a smaller vocabulary; None: they are errors.
        verify_data: whether and when to compare our files with their checksums; see `Verifier`.
        allow_links: whether files of a folder may be symbolic links out of it.

    Raises:
        FileNotFoundError: a file or a manifest is missing.
        ValueError: a file is damaged or has other sizes, and the message names it; or h5py, for
            HDF5, is not installed. `read` finds tokens outside the vocabulary.
    """
    if data_format not in DATA_FORMATS:
        raise ValueError(
            f"--data_format: expected one of {', '.join(DATA_FORMATS)}, got {data_format!r}"
        )
    given = [path_or_paths] if isinstance(path_or_paths, str | os.PathLike) else path_or_paths
    if not given:
        raise ValueError("--data_dir: expected at least one path, got none")
    parts: list[_Part] = []
    vocab_sizes = []
    for path in map(Path, given):
        kind = _format_of(path) if data_format == "auto" else data_format
        shards, known = _open(path, kind, max_seq_length, max_predictions, verify_data, allow_links)
        parts += shards
        vocab_sizes += known
    if vocab_size is None and vocab_sizes and len(vocab_sizes) == len(given):
        vocab_size = max(vocab_sizes)
    return PretrainingDataset(
        parts,
        max_seq_length or parts[0].length,
        max_predictions or parts[0].predictions,
        pad_to_seq_length,
        vocab_size=vocab_size,
        unknown_id=unknown_id,
    )


def _open(
    path: Path,
    kind: str,
    max_seq_length: int | None,
    max_predictions: int | None,
    verify_data: str,
    allow_links: bool,
) -> tuple[list[_Part], list[int]]:
    """Returns the parts of a path, and its vocabulary's size if known."""
    if kind == "shards":
        manifest, shards = open_shards(
            path, Verifier(path, KIND, verify_data, allow_links), allow_links
        )
        sizes = manifest["max_seq_length"], manifest["max_predictions"]
        return [_Part(shard, *sizes) for shard in shards], [manifest["vocab_size"]]
    if kind == "hdf5":
        files = _files(path, allow_links, _HDF5_SUFFIXES)
        Verifier(files[0].parent, KIND, verify_data, allow_links).check(files)
        return [_Part(*open_hdf5(file)) for file in files], []
    if max_seq_length is None or max_predictions is None:
        raise ValueError(
            f"{path}: PopART's records do not say their sizes: expected --max_seq_length "
            f"and --max_predictions_per_seq, got {max_seq_length} and {max_predictions}"
        )
    sizes = max_seq_length, max_predictions
    return [_Part(open_popart(file, *sizes), *sizes) for file in _files(path, allow_links)], []


def _format_of(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if path.is_dir():
        return "hdf5" if _in_folder(path, _HDF5_SUFFIXES) else "shards"
    if is_hdf5(path):
        return "hdf5"
    raise ValueError(
        f"{path}: expected an HDF5 file or a directory, got another file; --data_format popart "
        "reads PopART's records"
    )


def _files(path: Path, allow_links: bool, suffixes: tuple[str, ...] | None = None) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    if not (files := _in_folder(path, suffixes)):
        wanted = "files" if suffixes is None else " or ".join(f"*{end}" for end in suffixes)
        raise FileNotFoundError(f"{path}: expected {wanted}, found none")
    return [within(path, file.name, path, allow_links) for file in files]


def _in_folder(path: Path, suffixes: tuple[str, ...] | None) -> list[Path]:
    files = (file for file in path.iterdir() if file.is_file() and file.name[0] != ".")
    return sorted(file for file in files if suffixes is None or file.suffix in suffixes)


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
        parts: list[_Part],
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
        self._parts, self._unknown_id = parts, unknown_id
        for part in parts:
            self._check(part, pad)
        counts = [len(part.shard.facts) for part in parts]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_samples = int(self._starts[-1])
        self._facts = np.concatenate([part.shard.facts for part in parts])
        if unknown_id is not None:
            self._facts[:, NUM_MASKED] = np.concatenate([self._num_known(part) for part in parts])
        self.lengths, self.num_masked = self._facts[:, LENGTH], self._facts[:, NUM_MASKED]

    def _check(self, part: _Part, pad: bool) -> None:
        sizes = (
            ("sequence length", "--max_seq_length", part.length, self.length),
            ("masked tokens", "--max_predictions_per_seq", part.predictions, self.max_predictions),
        )
        path, facts = part.shard.path, part.shard.facts
        for name, flag, got, expected in sizes:
            if got != expected and not (pad and got < expected):
                hint = "; --pad_to_seq_length pads it" if got < expected else ""
                raise ValueError(f"{path}: expected {name} {expected} ({flag}), got {got}{hint}")
        wrong = (facts[:, LENGTH] > part.length) | (facts[:, SECOND] > facts[:, LENGTH])
        wrong |= (facts[:, NUM_MASKED] > part.predictions) | (facts[:, LABEL] > 1)
        wrong |= facts[:, LENGTH] == 0
        if wrong.any():
            row = int(wrong.argmax())
            length, second, masked, label = facts[row].tolist()
            raise ValueError(
                f"{path}: row {row}: expected 1 to {part.length} tokens, B within them, at most "
                f"{part.predictions} masked, and a label of 0 or 1, got {length} tokens, B at "
                f"{second}, {masked} masked, label {label}"
            )

    def _num_known(self, part: _Part) -> np.ndarray:
        """Returns the number of masked tokens of each row that are in the vocabulary."""
        counts = part.shard.facts[:, NUM_MASKED].copy()
        for start in range(0, len(counts), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(counts)))
            _, _, masked = part.tokens(rows)
            used = np.arange(part.predictions) < counts[rows, None]
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
            part, places = self._parts[number], np.flatnonzero(numbers == number)
            rows_of_shard = rows[places] - self._starts[number]
            tokens = part.tokens(rows_of_shard)
            if self.vocab_size is not None:
                tokens = self._known(part, rows_of_shard, *tokens)
            ids[places, : part.length] = tokens[0]
            positions[places, : part.predictions] = tokens[1]
            masked[places, : part.predictions] = tokens[2]
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
        part: _Part,
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
                f"{part.shard.path}: row {places[row]}: expected tokens in [0, {self.vocab_size}), "
                f"got {max(ids[row].max(), masked[row].max(initial=0))}"
            )
        ids = np.where(unknown, self._unknown_id, ids)
        used = np.arange(part.predictions) < part.shard.facts[places, NUM_MASKED, None]
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
                f"{self._parts[number].shard.path}: row {rows[row] - self._starts[number]}: "
                f"expected masked tokens at positions in [0, {lengths[row, 0]}), got "
                f"{positions[row].max()}"
            )
