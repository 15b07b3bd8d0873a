"""Pre-training rows of BERT from documents: pairs of segments, masked tokens, and HDF5 files.

The procedure is that of Devlin et al., 2019, appendix A.2, as in Google's, NVIDIA's and Graphcore's
programs. All functions are pure: random numbers are keyed by the seed and by their purpose, and are
those that Python and numpy guarantee across versions.

A pair is a set of indices into the tokens of all documents, and rows are filled for many pairs at
once.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from dlrm.command_line import missing_extra
from dlrm.language.config import NUM_SPECIAL, PretrainingTextConfig
from dlrm.language.wordpiece import Tokenizer, Tokens

KIND = "pre-training dataset"
FIELDS = {  # of NVIDIA's files, with the dtypes that are written
    **{"input_ids": "i4", "input_mask": "i1", "segment_ids": "i1"},
    **{"masked_lm_positions": "i4", "masked_lm_ids": "i4", "next_sentence_labels": "i1"},
}
_PAIRS, _MASKS = 1, 2  # purposes of random numbers
_SHARE_MASKED = 0.15  # of a row's tokens
_SHARE_SHORT = 0.1  # of the documents, which are cut into shorter rows than would fit
_SHARE_MASK, _SHARE_KEPT = 0.8, 0.1  # of the tokens to predict; the rest become random ones


class Documents(NamedTuple):
    """Documents of sentences of tokens.

    Attributes:
        tokens: tokens of all sentences, concatenated, `[tokens]`.
        sentences: start of each sentence in `tokens`, and the end of the last; none is empty.
        documents: first sentence of each document, and the end of the last; none is empty.
    """

    tokens: np.ndarray
    sentences: Sequence[int]
    documents: Sequence[int]


def segment_pairs(
    documents: Documents, number: int, repetition: int, config: PretrainingTextConfig
) -> Iterator[tuple[int, int, int, int, int]]:
    """Cuts a document into pairs of segments, which together fill a row or are shorter.

    Of consecutive sentences that fill a row, the first few are A. In half the pairs, and if A has
    all of them, B comes from another document, and the sentences after A are used again. Otherwise
    B is these sentences.

    Args:
        documents: all documents, at least two.
        number: the document to cut.
        repetition: number from 0; each cuts the document differently.

    Yields:
        Start and end of A and of B in the tokens, and whether B is from another document.
    """
    _, sentences, starts = documents
    random = Random((config.seed << 96) | (repetition << 64) | (number << 8) | _PAIRS).random
    most = config.max_seq_length - NUM_SPECIAL
    target = 2 + int(random() * (most - 1)) if random() < _SHARE_SHORT else most
    begin, end = starts[number], starts[number + 1]
    while begin < end:
        chunk_end = bisect_left(sentences, sentences[begin] + target, begin + 1, end)
        a_end = begin + 1
        if chunk_end > a_end:
            a_end += int(random() * (chunk_end - a_end))
        is_random = chunk_end == begin + 1 or random() < 0.5
        b_begin, b_end = a_end, chunk_end
        if is_random:
            other = int(random() * (len(starts) - 2))
            other += other >= number
            b_begin, b_end = starts[other], starts[other + 1]
            b_begin += int(random() * (b_end - b_begin))
            missing = target - (sentences[a_end] - sentences[begin])
            b_end = bisect_left(sentences, sentences[b_begin] + missing, b_begin + 1, b_end)
        a0, a1, b0, b1 = (sentences[at] for at in (begin, a_end, b_begin, b_end))
        fewer_a, fewer_b = _excess(a1 - a0, b1 - b0, most)
        pair = (*_cut_ends(a0, a1, fewer_a, random), *_cut_ends(b0, b1, fewer_b, random))
        yield (*pair, int(is_random))
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


def _cut_ends(begin: int, end: int, number: int, random: Any) -> tuple[int, int]:
    """Removes a number of tokens, each from the front or the back at random."""
    from_front, left = 0, number
    while left > 0:
        coins = min(left, 32)
        from_front += int(random() * (1 << coins)).bit_count()
        left -= coins
    return begin + from_front, end - (number - from_front)


def make_rows(
    a: Tokens, b: Tokens, tokenizer: Tokenizer, config: PretrainingTextConfig, part: int
) -> tuple[np.ndarray, ...]:
    """Fills rows with pairs of segments and masks their tokens.

    Args:
        tokenizer: source of special tokens and of random ones.
        part: a different number for each call, so that each has its own random numbers.

    Returns:
        The arrays of `FIELDS`, of any dtype, but for the labels. Positions and ids of masked tokens
        are in ascending order, then zeros.
    """
    ids, segments, lengths = tokenizer.join_pairs(a, b, config.max_seq_length)
    random = np.random.SFC64([config.seed, part, _MASKS])
    num_masked = masked_count(lengths, config)
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
    mask = np.arange(config.max_seq_length) < lengths[:, None]
    return ids, mask, segments, positions, masked_ids


def masked_count(lengths: np.ndarray, config: PretrainingTextConfig) -> np.ndarray:
    """Returns the numbers of masked tokens in rows of given lengths, which include special ones."""
    share = np.rint(lengths * _SHARE_MASKED).astype(np.int64)
    return np.minimum(config.max_predictions_per_seq, np.maximum(1, share))


def _positions(
    random: np.random.SFC64,
    a_lengths: np.ndarray,
    lengths: np.ndarray,
    num_masked: np.ndarray,
    config: PretrainingTextConfig,
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


def h5py() -> Any:
    """Returns the library, or raises ValueError that tells how to install it."""
    try:
        import h5py as library
    except ImportError as error:
        raise ValueError(f"HDF5: {missing_extra(error, 'text')}") from error
    return library
