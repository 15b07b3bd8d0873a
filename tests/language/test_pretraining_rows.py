import random as python_random
from itertools import chain

import numpy as np
import pytest

from dlrm.language.config import PretrainingTextConfig
from dlrm.language.rows import Documents, make_rows, masked_count, segment_pairs
from dlrm.language.wordpiece import Tokenizer, Tokens

pytest.importorskip("tokenizers", reason="no tokenizers, which cuts texts into WordPieces")

VOCAB = 1000


def configured(length=64, predictions=8, seed=3):
    sizes = {"max_seq_length": length, "max_predictions_per_seq": predictions}
    return PretrainingTextConfig(vocab_file="vocab.txt", seed=seed, **sizes)


CONFIG = configured()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    words = [f"w{i}" for i in range(VOCAB - 5)]
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return Tokenizer(path)


def made_up(count=200, sentences=15, words=12, seed=0) -> tuple[Documents, list]:
    """Returns documents, also as lists of sentences of tokens."""
    random = np.random.default_rng(seed)
    lists = [
        [
            random.integers(5, VOCAB, random.integers(1, words + 1)).tolist()
            for _ in range(random.integers(1, sentences + 1))
        ]
        for _ in range(count)
    ]
    flat = [sentence for document in lists for sentence in document]
    starts = np.cumsum([0, *map(len, flat)])
    documents = np.cumsum([0, *map(len, lists)])
    tokens = np.fromiter(chain.from_iterable(flat), np.uint16)
    return Documents(tokens, starts.tolist(), documents.tolist()), lists


def pairs_of(documents, repetition=0, config=CONFIG):
    """Returns the pairs of all documents, `[pairs, 5]`."""
    numbers = range(len(documents.documents) - 1)
    pairs = (segment_pairs(documents, number, repetition, config) for number in numbers)
    return np.array([*chain.from_iterable(pairs)])


def filled(documents, pairs, tokenizer, part=0):
    a0, a1, b0, b1, _ = pairs.T
    tokens = documents.tokens
    segments = Tokens(tokens, a0, a1 - a0), Tokens(tokens, b0, b1 - b0)
    return make_rows(*segments, tokenizer, CONFIG, part)


def removals(a, b, most) -> tuple[int, int]:
    """Returns how many tokens A and B lose; the longer loses each one, B on ties."""
    lost = [0, 0]
    while a + b > most:
        if a > b:
            a, lost[0] = a - 1, lost[0] + 1
        else:
            b, lost[1] = b - 1, lost[1] + 1
    return lost[0], lost[1]


def reference(lists, number, config, repetition):
    """Makes a document's pairs with lists of tokens and the same random numbers."""
    seed = (config.seed << 96) | (repetition << 64) | (number << 8) | 1
    random = python_random.Random(seed).random
    below = lambda count: int(random() * count)  # noqa: E731
    most = config.max_seq_length - 3
    target = 2 + below(most - 1) if random() < 0.1 else most
    document, pairs, chunk, i = lists[number], [], [], 0
    while i < len(document):
        chunk.append(document[i])
        if i == len(document) - 1 or sum(map(len, chunk)) >= target:
            a_end = 1 + (below(len(chunk) - 1) if len(chunk) >= 2 else 0)
            a, b = sum(chunk[:a_end], []), []
            is_random = len(chunk) == 1 or random() < 0.5
            if is_random:
                others = [*range(number), *range(number + 1, len(lists))]
                other = lists[others[below(len(others))]]
                for sentence in other[below(len(other)) :]:
                    b += sentence
                    if len(b) >= target - len(a):
                        break
                i -= len(chunk) - a_end
            else:
                b = sum(chunk[a_end:], [])
            kept = []
            for segment, lose in zip((a, b), removals(len(a), len(b), most), strict=True):
                front, left = 0, lose
                while left:
                    coins = min(left, 32)
                    front += bin(below(2**coins)).count("1")
                    left -= coins
                kept.append(segment[front : len(segment) - (lose - front)])
            pairs.append((*kept, is_random))
            chunk = []
        i += 1
    return pairs


@pytest.mark.parametrize("length", [8, 64, 500])
@pytest.mark.parametrize("repetition", [0, 3])
def test_pairs_are_those_of_the_procedure(length, repetition):
    documents, lists = made_up(60, 30, 100 if length == 64 else 12)
    config = configured(length, 5, seed=7)
    pairs = pairs_of(documents, repetition, config)
    expected = sum((reference(lists, i, config, repetition) for i in range(60)), [])
    tokens = documents.tokens.tolist()
    found = [(tokens[a:b], tokens[c:d], bool(r)) for a, b, c, d, r in pairs.tolist()]
    assert found == expected
    assert all(a and b and len(a) + len(b) <= length - 3 for a, b, _ in found)


def test_rows_are_pairs_between_special_tokens(tokenizer):
    documents, _ = made_up()
    pairs = pairs_of(documents)
    ids, mask, segments, all_positions, masked_ids = filled(documents, pairs, tokenizer)
    tokens = documents.tokens.tolist()
    for number, (a0, a1, b0, b1, _) in enumerate(pairs.tolist()):
        length, row = mask[number].sum(), ids[number].copy()
        count = min(8, max(1, round(0.15 * length)))
        positions = all_positions[number, :count]
        assert positions.tolist() == sorted(set(positions.tolist()))
        assert not all_positions[number, count:].any()
        assert not masked_ids[number, count:].any()
        assert {0, 1 + a1 - a0, length - 1}.isdisjoint(positions.tolist())
        assert positions.max() < length
        row[positions] = masked_ids[number, :count]
        cls, sep = tokenizer.cls_id, tokenizer.sep_id
        assert row[:length].tolist() == [cls, *tokens[a0:a1], sep, *tokens[b0:b1], sep]
        assert mask[number].tolist() == [True] * length + [False] * (64 - length)
        assert segments[number].sum() == segments[number, length - 1 - (b1 - b0) : length].sum()
        assert segments[number].sum() == b1 - b0 + 1
        assert not row[length:].any()


def test_a_row_of_any_length_has_15_percent_masked():
    lengths = np.arange(5, 513)
    expected = [min(80, max(1, round(0.15 * length))) for length in lengths.tolist()]
    assert masked_count(lengths, configured(512, 80)).tolist() == expected


def test_masked_tokens_are_mask_the_same_or_random(tokenizer):
    documents, _ = made_up(3000)
    ids, _, _, positions, masked_ids = filled(documents, pairs_of(documents), tokenizer)
    used = positions > 0
    shown, was = np.take_along_axis(ids, positions, axis=1)[used], masked_ids[used]
    assert len(was) > 30_000
    mask, same = shown == tokenizer.mask_id, shown == was
    assert mask.mean() == pytest.approx(0.8, abs=0.01)
    assert same.mean() == pytest.approx(0.1, abs=0.007)
    others = shown[~mask & ~same]
    assert len(others) / len(was) == pytest.approx(0.1, abs=0.007)
    counts = np.bincount(others, minlength=VOCAB)  # any token, also special ones
    assert counts[[0, 1, 2, 3, VOCAB - 1]].any()
    assert (counts > 0).sum() > 0.9 * VOCAB


def test_places_of_masked_tokens_are_uniform(tokenizer):
    documents, _ = made_up(3000, 40, 6)
    pairs = pairs_of(documents)
    pairs = pairs[(pairs[:, 1] - pairs[:, 0] == 30) & (pairs[:, 3] - pairs[:, 2] == 31)][:1]
    _, _, _, positions, _ = filled(documents, np.repeat(pairs, 8000, axis=0), tokenizer, 5)
    counts = np.bincount(positions.ravel(), minlength=64)
    assert set(np.flatnonzero(counts == 0).tolist()) == {0, 31, 63}
    share = counts[counts > 0] / 8000
    np.testing.assert_allclose(share, 8 / 61, atol=5 * (8 / 61 / 8000) ** 0.5)


def test_masks_depend_on_seed_and_part(tokenizer):
    documents, _ = made_up(50)
    pairs = pairs_of(documents)
    rows, same, other = (filled(documents, pairs, tokenizer, part) for part in (0, 0, 1))
    for one, another in zip(rows, same, strict=True):
        assert np.array_equal(one, another)
    assert not np.array_equal(rows[3], other[3])
