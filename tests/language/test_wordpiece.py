import builtins
import unicodedata

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlrm.language.wordpiece import SPECIAL_TOKENS, Tokenizer, Tokens

pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
PIECES = ["un", "##aff", "##able", "aff", "a", "##a", "b", "##b", "e", "##e", "cafe", "日", "本"]
MARKS = [".", ",", "[", "]", "-", "¿", "sep", "σ", "##σ", "и", "##и", "!"]
VOCABULARY = [*SPECIAL_TOKENS, *PIECES, *MARKS]


def write(path, tokens):
    path.write_text("".join(token + "\n" for token in tokens), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("vocab") / "vocab.txt", VOCABULARY))


def names(tokenizer, text):
    return [[*VOCABULARY, "Café"][id] for id in tokenizer.encode([text]).ids]


def by_definition(text):
    """Returns a text's tokens as BERT's paper and program define them, by character."""
    spaced = ""
    for char in text:
        category = unicodedata.category(char)
        if char in " \t\n\r" or category == "Zs":
            spaced += " "
        elif char == "\ufffd" or category[0] == "C":
            continue
        elif 0x4E00 <= ord(char) <= 0x9FFF or 0x3400 <= ord(char) <= 0x4DBF:
            spaced += f" {char} "
        else:
            spaced += char
    split = ""
    for char in unicodedata.normalize("NFD", "".join(c.lower() for c in spaced)):
        is_mark = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
        if unicodedata.category(char) == "Mn":
            continue
        split += f" {char} " if is_mark or unicodedata.category(char)[0] == "P" else char
    tokens = []
    for word in split.split():
        pieces, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            candidates = (("##" if start else "") + word[start:end] for end in ends)
            piece = next((c for c in candidates if c in VOCABULARY), None)
            if piece is None or len(word) > 200:
                pieces = ["[UNK]"]
                break
            pieces.append(piece)
            start += len(piece.removeprefix("##") if start else piece)
        tokens += pieces
    return tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unaffable CAFÉ.", "un ##aff ##able cafe ."),
        ("日本a", "日 本 a"),
        ("a\u0000b\u200be\u00a0b\ta", "a ##b ##e b a"),
        ("cafe\u0301 x", "cafe [UNK]"),
        ("[SEP] a-b", "[ sep ] a - b"),
        ("", ""),
    ],
)
def test_known_answers(tokenizer, text, expected):
    assert names(tokenizer, text) == expected.split()


ALPHABET = "abeéÉcfxunl.,-[]¿!?日本 \t\n\u00a0\u3000\u200b\u0000\u0301\ufffdσΣиЙ$^«"


@given(st.text(ALPHABET, max_size=40))
def test_tokens_are_those_of_the_definition(tokenizer, text):
    assert names(tokenizer, text) == by_definition(text)


def test_words_are_unknown_from_a_length_on(tokenizer):
    assert names(tokenizer, "a" * 200) == ["a", *["##a"] * 199]
    assert names(tokenizer, "a" * 201) == ["[UNK]"]


def test_case_and_accents_stay_where_they_are_wanted(tmp_path):
    tokenizer = Tokenizer(write(tmp_path / "v", [*VOCABULARY, "Café"]), lower_case=False)
    assert names(tokenizer, "Café cafe CAFE") == ["Café", "cafe", "[UNK]"]


def test_spans_are_the_characters_of_the_original(tokenizer):
    text = "日Unaffable,\u00a0CAFÉ [x]"
    encoded = tokenizer.encode(["b", text], spans=True)
    assert encoded.spans.dtype == np.int32
    spans = encoded.spans[encoded.starts[1] :]
    pieces = ["日", "Un", "aff", "able", ",", "CAFÉ", "[", "x", "]"]
    assert [text[a:b] for a, b in spans] == pieces


def test_many_texts_are_as_each_alone(tokenizer):
    texts = ["a b", "", "unaffable", "日本"] * 1500  # 6000, more than one tokenized batch
    encoded = tokenizer.encode(iter(texts))
    assert encoded.ids.dtype == np.int32
    assert encoded.lengths.tolist() == [2, 0, 3, 2] * 1500
    assert encoded.starts.tolist() == np.cumsum([0, *encoded.lengths[:-1]]).tolist()
    part = encoded.part(np.array([5998, 0]), 1, np.array([2, 1]))
    assert part.joined().tolist() == [VOCABULARY.index(t) for t in ("##aff", "##able", "b")]
    assert not len(tokenizer.encode([]).lengths)


def test_pairs_are_joined_and_padded(tokenizer):
    first = Tokens(np.arange(10, 20, dtype=np.int32), np.array([2, 0]), np.array([3, 0]))
    second = Tokens(np.arange(30, 40, dtype=np.int32), np.array([9, 1]), np.array([1, 2]))
    ids, segments, lengths = tokenizer.join_pairs(first, second, 8)
    assert ids.tolist() == [[2, 12, 13, 14, 3, 39, 3, 0], [2, 3, 31, 32, 3, 0, 0, 0]]
    assert segments.tolist() == [[0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0]]
    assert lengths.tolist() == [7, 5]
    assert (ids.dtype, segments.dtype, lengths.dtype) == (np.int32, np.int8, np.int32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n".join(VOCABULARY).replace("[MASK]\n", ""), r"29 tokens, without \[MASK\]"),
        ("a\nb\n", r"2 tokens, without \[PAD\], .*\[MASK\]"),
        ("\n".join([*VOCABULARY, "un"]), "line 31: 'un' is also in line 6"),
        ("[PAD]\n\na\n", "line 2: expected a token, got an empty line"),
        ("", "line 1: expected a token"),
        (b"[PAD]\n\xff\n", "byte 6: not UTF-8"),
    ],
)
def test_wrong_vocabularies_are_named(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"vocab\.txt: .*{message}"):
        Tokenizer(path)


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.txt"):
        Tokenizer(tmp_path / "none.txt")


def test_a_vocabulary_that_is_wider_than_the_model_is_refused(tmp_path):
    file = write(tmp_path / "vocab.txt", VOCABULARY)
    assert Tokenizer(file, vocab_size=30).vocab_size == 30
    with pytest.raises(ValueError, match="30 tokens, more than --vocab_size 29"):
        Tokenizer(file, vocab_size=29)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'tokenizers>="):
        Tokenizer(tmp_path / "vocab.txt")
