"""Pre-training rows of BERT from documents: pairs of segments, masked tokens, and HDF5 files.

The procedure is that of Devlin et al., 2019, appendix A.2, as in Google's, NVIDIA's and Graphcore's
programs. All functions are pure: random numbers are keyed by the seed and by their purpose, and are
those that Python and numpy guarantee across versions.

A pair is a set of indices into the tokens of all documents, and rows are filled for many pairs at
once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from dlrm.command_line import missing_extra
from dlrm.language.config import NUM_SPECIAL, RowConfig
from dlrm.language.wordpiece import Slices, Tokenizer

KIND = "pre-training dataset"
FIELDS = {  # with the dtypes that are written
    **{"input_ids": "i4", "input_mask": "i1", "segment_ids": "i1"},
    **{"masked_lm_positions": "i4", "masked_lm_ids": "i4", "next_sentence_labels": "i1"},
}
LENGTH, SECOND, NUM_MASKED, LABEL = range(4)  # columns of `facts`
A_BEGIN, A_END, B_BEGIN, B_END, IS_RANDOM = range(5)  # columns of pairs
_PAIRS, _MASKS = 1, 2  # purposes of random numbers
_SHARE_MASK, _SHARE_KEPT = 0.8, 0.1  # of the tokens to predict; the rest become random ones


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


class Documents(NamedTuple):
    """Documents of sentences of tokens.

    Attributes:
        tokens: tokens of all sentences, concatenated, `[tokens]`.
        sentences: start of each sentence in `tokens`, and the end of the last, `[sentences + 1]`,
            int64; none is empty.
        documents: first sentence of each document, and the end of the last, `[documents + 1]`,
            int64; none is empty.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray


def segment_pairs(
    documents: Documents, first: int, last: int, repetition: int, config: RowConfig
) -> np.ndarray:
    """Cuts documents into pairs of segments, which together fill a row or are shorter.

    Of consecutive sentences that fill a row, the first few are A. In half the pairs, and if A has
    all of them, B comes from another document, and the sentences after A are used again. Otherwise
    B is these sentences.

    Args:
        documents: all documents, at least two.
        first: the first document to cut.
        last: the document after the last one to cut.
        repetition: number from 0; each cuts the documents differently.

    Returns:
        Start and end of A and of B in the tokens, and whether B is from another document, `[pairs,
        5]`, int64.
    """
    sentences = memoryview(np.ascontiguousarray(documents.sentences))  # type: ignore[arg-type]
    starts = memoryview(np.ascontiguousarray(documents.documents))  # type: ignore[arg-type]
    pairs = [
        pair
        for document in range(first, last)
        for pair in _pairs_of(sentences, starts, document, repetition, config)
    ]
    return np.array(pairs, np.int64).reshape(-1, 5)


def _pairs_of(
    sentences: memoryview, starts: memoryview, document: int, repetition: int, config: RowConfig
) -> Iterator[tuple[int, int, int, int, int]]:
    random = Random((config.seed << 96) | (repetition << 64) | (document << 8) | _PAIRS).random
    most = config.max_seq_length - NUM_SPECIAL
    target = most
    if random() < config.short_seq_prob:
        target = 2 + int(random() * (most - 1))
    begin, end = starts[document], starts[document + 1]
    while begin < end:
        chunk_end = bisect_left(sentences, sentences[begin] + target, begin + 1, end)
        a_end = begin + 1
        if chunk_end > a_end:
            a_end += int(random() * (chunk_end - a_end))
        is_random = chunk_end == begin + 1 or random() < 0.5
        if is_random:
            other = int(random() * (len(starts) - 2))
            other += other >= document
            b_begin, b_end = starts[other], starts[other + 1]
            b_begin += int(random() * (b_end - b_begin))
            missing = target - (sentences[a_end] - sentences[begin])
            b_end = bisect_left(sentences, sentences[b_begin] + missing, b_begin + 1, b_end)
        else:
            b_begin, b_end = a_end, chunk_end
        a, b = (sentences[begin], sentences[a_end]), (sentences[b_begin], sentences[b_end])
        cut = _excess(a[1] - a[0], b[1] - b[0], most)
        (a0, a1), (b0, b1) = (
            _cut_ends(segment, number, random) for segment, number in zip((a, b), cut, strict=True)
        )
        yield a0, a1, b0, b1, int(is_random)
        begin = a_end if is_random else chunk_end


def _excess(a: int, b: int, most: int) -> tuple[int, int]:
    """Returns the tokens to remove from A and B: from the longer one, or B if both are equal."""
    excess = a + b - most
    if excess <= 0:
        return 0, 0
    from_longer = min(excess, abs(a - b))
    rest = excess - from_longer
    if a > b:
        return from_longer + rest // 2, rest - rest // 2
    return rest // 2, from_longer + rest - rest // 2


def _cut_ends(segment: tuple[int, int], number: int, random) -> tuple[int, int]:
    """Removes a number of tokens, each from the front or the back at random."""
    from_front, left = 0, number
    while left > 0:
        coins = min(left, 32)
        from_front += int(random() * (1 << coins)).bit_count()
        left -= coins
    return segment[0] + from_front, segment[1] - (number - from_front)


def make_rows(
    tokens: np.ndarray, pairs: np.ndarray, tokenizer: Tokenizer, config: RowConfig, part: int
) -> TextRows:
    """Fills rows with pairs and masks their tokens.

    Args:
        pairs: results of `segment_pairs`, in any order.
        tokenizer: source of special tokens and of random ones.
        config: lengths, shares and seed.
        part: a different number for each call, so that each has its own random numbers.
    """
    a, b = (
        Slices(tokens, pairs[:, begin], pairs[:, end] - pairs[:, begin])
        for begin, end in ((A_BEGIN, A_END), (B_BEGIN, B_END))
    )
    ids, _, lengths = tokenizer.join_pairs(a, b, config.max_seq_length)
    num_masked = masked_count(lengths, config)
    random = np.random.SFC64([config.seed, part, _MASKS])
    positions = _positions(random, a.lengths, lengths, num_masked, config)
    unused = np.arange(positions.shape[1]) >= num_masked[:, None]
    masked_ids = np.take_along_axis(ids, positions, axis=1)
    draws = random.random_raw(positions.size).reshape(positions.shape)
    share = (draws >> np.uint64(32)).astype(np.float64) * 2.0**-32
    word = ((draws & np.uint64(0xFFFFFFFF)) * np.uint64(tokenizer.vocab_size)) >> np.uint64(32)
    shown = np.where(share < _SHARE_MASK, tokenizer.mask_id, masked_ids)
    shown = np.where(share < _SHARE_MASK + _SHARE_KEPT, shown, word.astype(ids.dtype))
    row, place = np.nonzero(~unused)
    ids[row, positions[row, place]] = shown[row, place]
    positions[unused], masked_ids[unused] = 0, 0
    facts = np.stack([lengths, a.lengths + 2, num_masked, pairs[:, IS_RANDOM]], axis=1)
    return TextRows(ids, facts, positions, masked_ids)


def masked_count(lengths: np.ndarray, config: RowConfig) -> np.ndarray:
    """Returns the numbers of masked tokens in rows of given lengths, which include special ones."""
    share = np.rint(lengths * config.masked_lm_prob).astype(np.int64)
    return np.minimum(config.max_predictions_per_seq, np.maximum(1, share))


def _positions(
    random: np.random.SFC64,
    a_lengths: np.ndarray,
    lengths: np.ndarray,
    num_masked: np.ndarray,
    config: RowConfig,
) -> np.ndarray:
    """Returns random ascending positions of ordinary tokens; any after the first `num_masked`."""
    place = np.arange(config.max_seq_length)
    special = (place == 0) | (place == a_lengths[:, None] + 1) | (place >= lengths[:, None] - 1)
    keys = random.random_raw(special.size).reshape(special.shape)
    keys[special] = np.iinfo(np.uint64).max
    most = config.max_predictions_per_seq
    least = np.argpartition(keys, most - 1, axis=1)[:, :most]
    by_key = np.argsort(np.take_along_axis(keys, least, axis=1), axis=1)
    positions = np.take_along_axis(least, by_key, axis=1)
    unused = np.arange(most) >= num_masked[:, None]
    positions[unused] = config.max_seq_length
    positions.sort(axis=1)
    positions[unused] = 0
    return positions


def write_hdf5(path: Path, blocks: Iterable[TextRows]) -> None:
    """Writes rows with the fields, dtypes and compression of NVIDIA's files."""
    with h5py().File(path, "w") as file:
        for rows in blocks:
            lengths, second, _, labels = (rows.facts[:, i : i + 1] for i in range(4))
            column = np.arange(rows.ids.shape[1])
            mask = column < lengths
            tokens = (rows.ids, mask, (column >= second) & mask)
            arrays = (*tokens, rows.masked_positions, rows.masked_ids, labels[:, 0])
            for (name, dtype), values in zip(FIELDS.items(), arrays, strict=True):
                _append(file, name, values.astype(dtype))


def _append(file: Any, name: str, values: np.ndarray) -> None:
    if name not in file:
        shape = (None, *values.shape[1:])
        file.create_dataset(name, data=values, maxshape=shape, compression="gzip")
        return
    field = file[name]
    field.resize(len(field) + len(values), axis=0)
    field[-len(values) :] = values


def h5py() -> Any:
    """Returns the library, or raises ValueError that tells how to install it."""
    try:
        import h5py as library
    except ImportError as error:
        raise ValueError(f"HDF5: {missing_extra(error, 'text')}") from error
    return library
