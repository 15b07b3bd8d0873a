"""Pre-training rows in HDF5, with the fields of NVIDIA's and Gaudi's programs."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.command_line import missing_extra
from dlrm.documents import brief
from dlrm.language.data.config import MAX_LENGTH

KIND = "pre-training dataset"
HDF5_FIELDS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
MOST_COMPRESSED = 1100  # times smaller; DEFLATE reaches 1032
_BLOCK = 8192  # rows read at a time
FACT_DTYPE = np.dtype("<u2")
LENGTH, SECOND, NUM_MASKED, LABEL = range(4)  # columns of `facts`


class TextRows(NamedTuple):
    """Pre-training rows as arrays, of any integer dtype.

    Attributes:
        ids: [CLS] A [SEP] B [SEP] and zeros, some tokens masked, `[rows, length]`.
        facts: `[rows, 4]`: length, position where B begins, number of masked tokens, and whether B
            is from elsewhere (1) or follows A (0).
        masked_positions: ascending positions, then zeros, `[rows, predictions]`.
        masked_ids: the original tokens at these positions, then zeros, `[rows, predictions]`.
    """

    ids: np.ndarray
    facts: np.ndarray
    masked_positions: np.ndarray
    masked_ids: np.ndarray


class File(NamedTuple):
    """The rows of one file, in memory.

    Attributes:
        path: path of the file.
        facts: as in `TextRows`.
        tokens: ids, positions of masked tokens, and these tokens, uint16 where they fit, else
            int32, `[rows, length + 2 predictions]`.
        length: tokens of a row.
        predictions: maximum masked tokens of a row.
    """

    path: Path
    facts: np.ndarray
    tokens: np.ndarray
    length: int
    predictions: int

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids, positions of masked tokens, and these tokens."""
        tokens, end = self.tokens[rows], self.length + self.predictions
        return tokens[:, : self.length], tokens[:, self.length : end], tokens[:, end:]


def open_hdf5(path: Path) -> File:
    """Reads a file into memory, where a row takes less than in the file.

    Raises:
        ValueError: h5py is not installed, a field is missing or has another shape, or a row is not
            tokens followed by padding; the message names the file and the row.
    """
    try:
        with _h5py().File(path, "r") as file:
            fields = _fields(file, path)
            _check_stored(fields, path)
            count, length = fields["input_ids"].shape
            predictions = fields["masked_lm_positions"].shape[1]
            tokens = np.zeros((count, length + 2 * predictions), FACT_DTYPE)
            facts = np.zeros((count, 4), FACT_DTYPE)
            for start in range(0, count, _BLOCK):
                rows = _hdf5_rows(fields, slice(start, start + _BLOCK), path)
                block = np.concatenate([rows.ids, rows.masked_positions, rows.masked_ids], axis=1)
                if block.max(initial=0) > np.iinfo(tokens.dtype).max:
                    tokens = tokens.astype(np.int32)
                tokens[start : start + len(block)] = block
                facts[start : start + len(block)] = rows.facts
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file: {brief(error)}") from error
    return File(path, facts, tokens, length, predictions)


def _fields(file: Any, path: Path) -> dict[str, Any]:
    if missing := [name for name in HDF5_FIELDS if name not in file]:
        raise ValueError(
            f"{path}: expected the fields {', '.join(HDF5_FIELDS)}, got no {', '.join(missing)}"
        )
    for name in HDF5_FIELDS:
        if (link := type(file.get(name, getlink=True)).__name__) != "HardLink":
            raise ValueError(f"{path}: {name}: expected rows in the file, got {link}")
    fields = {name: file[name] for name in HDF5_FIELDS}
    for name, field in fields.items():
        kind = getattr(field, "dtype", None)  # groups have none
        if kind is None or kind.kind not in "iub":
            got = "a group" if kind is None else kind
            raise ValueError(f"{path}: {name}: expected integers, got {got}")
    shapes = {name: tuple(field.shape) for name, field in fields.items()}
    ids, positions = shapes["input_ids"], shapes["masked_lm_positions"]
    alike = {"input_mask": ids, "segment_ids": ids, "masked_lm_ids": positions}
    for name, expected in alike.items():
        if shapes[name] != expected or len(expected) != 2 or shapes[name][0] != ids[0]:
            raise ValueError(f"{path}: expected {name} of shape {expected}, got {shapes[name]}")
    if shapes["next_sentence_labels"] not in ((ids[0],), (ids[0], 1)) or ids[1] > MAX_LENGTH:
        raise ValueError(
            f"{path}: expected input_ids [rows, length] and next_sentence_labels [rows], got {ids} "
            f"and {shapes['next_sentence_labels']}"
        )
    return fields


def _check_stored(fields: dict[str, Any], path: Path) -> None:
    """Raises ValueError if a file claims more rows than its bytes can hold."""
    for name, field in fields.items():
        if field.is_virtual or field.external:
            raise ValueError(f"{path}: {name}: expected rows in the file, got those of others")
        claimed, stored = math.prod(field.shape) * field.dtype.itemsize, field.id.get_storage_size()
        if claimed > MOST_COMPRESSED * stored:
            raise ValueError(
                f"{path}: {name}: expected at most {MOST_COMPRESSED} times the {stored} bytes that "
                f"are stored, got {field.shape[0]} rows of {claimed} bytes in all"
            )


def _hdf5_rows(fields: dict[str, Any], part: slice, path: Path) -> TextRows:
    ids, mask, segments, positions, masked, labels = (
        np.asarray(fields[name][part], np.int64) for name in HDF5_FIELDS
    )
    used = mask != 0
    wrong = (used[:, 1:] & ~used[:, :-1]).any(axis=1) | ~_are_words(ids)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {part.start + row}: expected tokens of at least 0 and then padding, got "
            f"input_mask {mask[row].tolist()} of input_ids {ids[row].tolist()}"
        )
    # Positions end with zeros: position 0 is [CLS], which is never masked.
    num_masked = np.cumprod(positions != 0, axis=1).sum(axis=1)
    unused = np.arange(positions.shape[1]) >= num_masked[:, None]
    masked[unused] = 0
    lengths = used.sum(axis=1)
    _check_masked(positions, masked, num_masked, lengths, path, part.start)
    _check_segments(segments, used, path, part.start)
    ids[~used] = 0
    second = _second(segments == 1, lengths)
    facts = np.stack([lengths, second, num_masked, labels.reshape(-1)], axis=1)
    _check_range(facts, path, part.start)
    return TextRows(ids, facts, positions, masked)


def _are_words(ids: np.ndarray) -> np.ndarray:
    return np.all((ids >= 0) & (ids <= np.iinfo(np.int32).max), axis=1)


def _check_masked(
    positions: np.ndarray,
    masked: np.ndarray,
    num_masked: np.ndarray,
    lengths: np.ndarray,
    path: Path,
    start: int,
) -> None:
    ascending = np.sort(positions, axis=1)
    wrong = ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] != 0)).any(axis=1)
    wrong |= np.count_nonzero(positions, axis=1) != num_masked
    wrong |= ((positions < 0) | (positions >= lengths[:, None])).any(axis=1) | ~_are_words(masked)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {start + row}: expected masked_lm_positions in [1, {lengths[row]}), each "
            f"once, and then zeros, of masked_lm_ids of at least 0, got {positions[row].tolist()} "
            f"of {masked[row].tolist()}"
        )


def _check_segments(segments: np.ndarray, used: np.ndarray, path: Path, start: int) -> None:
    wrong = (used & (segments != 0) & (segments != 1)).any(axis=1)
    wrong |= (used[:, 1:] & (segments[:, 1:] < segments[:, :-1])).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {start + row}: expected segment_ids of 0 and then of 1, got "
            f"{segments[row][used[row]].tolist()}"
        )


def _second(in_b: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the position where B begins, or the row's length if there is no B."""
    return np.where(in_b.any(axis=1), in_b.argmax(axis=1), lengths)


def _check_range(facts: np.ndarray, path: Path, start: int) -> None:
    """Refuses values beyond uint16, and labels of no class."""
    wrong = ((facts < 0) | (facts > MAX_LENGTH)).any(axis=1) | (facts[:, 3] > 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {start + row}: expected length, start of B and number of masked tokens "
            f"in [0, {MAX_LENGTH}] and a label of 0 or 1, got {facts[row].tolist()}"
        )


def write_hdf5(path: Path, blocks: Iterable[TextRows]) -> None:
    """Writes rows with the fields, dtypes and compression of NVIDIA's files."""
    dtypes = dict(zip(HDF5_FIELDS, ("i4", "i1", "i1", "i4", "i4", "i1"), strict=True))
    with _h5py().File(path, "w") as file:
        for rows in blocks:
            for name, values in _hdf5_fields(rows).items():
                _append(file, name, values.astype(dtypes[name]))


def _hdf5_fields(rows: TextRows) -> dict[str, np.ndarray]:
    lengths, second, _, labels = (rows.facts[:, i : i + 1] for i in range(4))
    column = np.arange(rows.ids.shape[1])
    values = (
        rows.ids,
        column < lengths,
        (column >= second) & (column < lengths),
        rows.masked_positions,
        rows.masked_ids,
        labels[:, 0],
    )
    return dict(zip(HDF5_FIELDS, values, strict=True))


def _append(file: Any, name: str, values: np.ndarray) -> None:
    if name not in file:
        shape = (None, *values.shape[1:])
        file.create_dataset(name, data=values, maxshape=shape, compression="gzip")
        return
    field = file[name]
    field.resize(len(field) + len(values), axis=0)
    field[-len(values) :] = values


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"HDF5: {missing_extra(error, 'text')}") from error
    return h5py
