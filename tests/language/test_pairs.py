import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from sklearn.metrics import accuracy_score, f1_score

from dlrm.language.pairs import (
    COLUMNS,
    SentencePairs,
    accuracy_and_f1,
    majority_baseline,
    read_pairs,
)
from dlrm.language.wordpiece import SPECIAL_TOKENS, Tokenizer

VOCABULARY = [*SPECIAL_TOKENS, "a", "b", "c", '"', "."]
HEADER = "\t".join(COLUMNS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return Tokenizer(path)


def write(path, *lines, header=HEADER, ending="\n", start="\ufeff"):
    text = start + "".join(line + ending for line in (header, *lines))
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["\ufeff", ""])
def test_quotes_and_odd_separators_are_plain_characters(tmp_path, ending, start):
    lines = ['1\t1\t2\t"a\tb" c', "0\t3\t4\ta\u2028b\x0bc\x85d\ra\t"]
    pairs = read_pairs(write(tmp_path / "d.tsv", *lines, ending=ending, start=start))
    assert pairs.first == ['"a', "a\u2028b\x0bc\x85d\ra"]
    assert pairs.second == ['b" c', ""]
    assert pairs.labels.tolist() == [1, 0]
    assert pairs.labels.dtype == np.int64


def test_rows_are_joined(tmp_path, tokenizer):
    path = write(tmp_path / "d.tsv", "1\t1\t2\ta b\tc.", '0\t1\t2\t"a"\tb')
    source = SentencePairs(path, tokenizer, 8)
    batch = source.read(np.array([1, 0]))
    words = [" ".join(VOCABULARY[id] for id in row) for row in batch.ids.tolist()]
    assert words == ['[CLS] " a " [SEP] b [SEP] [PAD]', "[CLS] a b [SEP] c . [SEP] [PAD]"]
    assert batch.labels.tolist() == [0, 1]
    assert batch.indices.tolist() == [1, 0]
    assert source.lengths.tolist() == batch.lengths.tolist() == [7, 7]
    assert (source.num_samples, source.length, source.num_masked) == (2, 8, None)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 20))
@example(6, 6, 12)
@example(6, 6, 13)
def test_the_longer_of_a_pair_is_cut(tmp_path_factory, tokenizer, one, two, length):
    first, second = ["a"] * one, ["b"] * two
    path = tmp_path_factory.getbasetemp() / "cut.tsv"
    write(path, "1\t1\t2\t" + " ".join(first) + "\t" + " ".join(second))
    while len(first) + len(second) > length - 3:
        (first if len(first) > len(second) else second).pop()
    batch = SentencePairs(path, tokenizer, length).read(np.array([0]))
    words = [VOCABULARY[id] for id in batch.ids[0, : int(batch.lengths[0])].tolist()]
    assert words == ["[CLS]", *first, "[SEP]", *second, "[SEP]"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1\t1\t2\ta\tb", "1\t1\t2\ta"], "line 3: expected 5 fields, got 4"),
        (["1\t1\t2\ta\tb\tc"], "line 2: expected 5 fields, got 6"),
        (["", "1\t1\t2\ta\tb"], "line 2: expected 5 fields, got 1"),
        (["2\t1\t2\ta\tb"], "line 2: Quality: expected 0 or 1, got '2'"),
        (["\t1\t2\ta\tb"], "line 2: Quality: expected 0 or 1, got ''"),
        ([], "expected at least one pair, got none"),
    ],
)
def test_wrong_rows_are_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=rf"d\.tsv: {message}"):
        read_pairs(write(tmp_path / "d.tsv", *lines))


def test_wrong_files_are_named(tmp_path, tokenizer):
    path = tmp_path / "d.tsv"
    with pytest.raises(FileNotFoundError, match="d.tsv"):
        read_pairs(path)
    write(path, header="label\ttext")
    with pytest.raises(ValueError, match="line 1: expected the columns .*, got 'label, text'"):
        read_pairs(path)
    path.write_bytes(HEADER.encode() + b"\r1\t1\t2\ta\tb" * 1000)
    with pytest.raises(ValueError, match=r"line 1: .*, got 'Quality, .{,100}$"):
        read_pairs(path)
    path.write_bytes(HEADER.encode() + b"\n1\t1\t2\ta\tb\xff\n")
    with pytest.raises(ValueError, match=r"d\.tsv: line 2: not UTF-8"):
        read_pairs(path)
    with pytest.raises(ValueError, match="--max_seq_length 4: expected 5 or more"):
        SentencePairs(path, tokenizer, 4)


CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)


@given(CLASSES)
def test_metrics_are_those_of_scikit_learn(rows):
    labels, predictions = np.array(rows).T
    found = accuracy_and_f1(labels, predictions)
    accuracy = accuracy_score(labels, predictions)
    f1 = f1_score(labels, predictions, zero_division=0)
    assert found == pytest.approx(
        {"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2}
    )


def test_the_majority_is_a_baseline():
    assert majority_baseline(np.array([1, 1, 0, 1]))["accuracy"] == 0.75
    assert majority_baseline(np.array([0, 1, 0]))["f1"] == 0


def test_the_real_corpus_is_read_whole(shared_data, tokenizer):
    train = read_pairs(shared_data / "mrpc" / "train.tsv")
    dev = SentencePairs(shared_data / "mrpc" / "dev.tsv", tokenizer)
    assert (len(train.first), dev.num_samples) == (3668, 408)
    assert train.first[0].count('"') == 2
    assert majority_baseline(dev.labels)["accuracy"] == pytest.approx(279 / 408)
