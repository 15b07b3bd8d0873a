"""WordPiece: converts texts to token ids of a BERT vocabulary.

Texts are normalized like BERT's: control characters are removed, CJK characters and punctuation are
split off, and letters become lower case without accents. Each word is then split greedily into the
longest pieces in the vocabulary. `tokenizers` (extra `text`) does the work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.command_line import missing_extra
from dlrm.documents import brief, read_bytes

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_VOCABULARY_BYTES = 1 << 26
_BLOCK = 1024  # texts tokenized at once, which limits the number of Python objects


class Slices(NamedTuple):
    """Sequences of ids, stored in one array.

    Attributes:
        ids: ids of all sequences, int32.
        starts: index of each sequence in `ids`, `[sequences]`, int64.
        lengths: length of each sequence, `[sequences]`, int64.
    """

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class TokenizedTexts:
    """The concatenated tokens of texts; `[i]` returns the ids of text i.

    Attributes:
        ids: `[tokens]`, int32.
        starts: start of each text in `ids`, and the end of the last, `[texts + 1]`, int64.
        spans: first character of each token in its text and the one after its last, `[tokens, 2]`,
            int32; None if not requested.
    """

    ids: np.ndarray
    starts: np.ndarray
    spans: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each text, `[texts]`."""
        return np.diff(self.starts)


class Tokenizer:
    """Converts texts to ids; made by `load_tokenizer`.

    Text that looks like a special token is treated as text: `[SEP]` becomes the tokens of `[`,
    `sep` and `]`.

    Attributes:
        tokens: the vocabulary; a token's id is its index.
        vocab_size: number of tokens.
        pad_id, unk_id, cls_id, sep_id, mask_id: ids of `SPECIAL_TOKENS`.
    """

    def __init__(self, tokens: Sequence[str], lower_case: bool, max_word_chars: int) -> None:
        library = _library()
        self.tokens, self.vocab_size = tuple(tokens), len(tokens)
        ids = {token: id for id, token in enumerate(tokens)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[token] for token in SPECIAL_TOKENS
        )
        model = library.models.WordPiece(
            vocab=ids, unk_token="[UNK]", max_input_chars_per_word=max_word_chars
        )
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
        )
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    def encode(self, texts: Iterable[str], spans: bool = False) -> TokenizedTexts:
        """Returns the tokens of texts, without special ones.

        Args:
            texts: texts to tokenize, a few thousand at a time, on all cores.
            spans: whether to return the tokens' characters as well.

        Raises:
            ValueError: a text has half of a surrogate pair, which is not a character; the message
                names it.
        """
        encode = self._tokenizer.encode_batch if spans else self._tokenizer.encode_batch_fast
        ids: list[np.ndarray] = []
        lengths: list[np.ndarray] = [np.zeros(1, np.int64)]
        characters: list[np.ndarray] = []
        for block in _blocks(texts):
            _check_characters(block)
            encoded = encode(block, add_special_tokens=False)
            counts = np.array([len(text) for text in encoded], np.int64)
            total = int(counts.sum())
            flat = chain.from_iterable(text.ids for text in encoded)
            ids.append(np.fromiter(flat, np.int32, total))
            lengths.append(counts)
            if spans:
                bounds = chain.from_iterable(chain.from_iterable(t.offsets for t in encoded))
                characters.append(np.fromiter(bounds, np.int32, 2 * total).reshape(total, 2))
        return TokenizedTexts(
            np.concatenate([np.empty(0, np.int32), *ids]),
            np.cumsum(np.concatenate(lengths)),
            np.concatenate([np.empty((0, 2), np.int32), *characters]) if spans else None,
        )

    def join_pairs(
        self, first: Slices, second: Slices, length: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns rows of [CLS] first [SEP] second [SEP], padded to `length`.

        Args:
            first: segment 0 of each row.
            second: segment 1 of each row; both, with three special tokens, have at most `length`.
            length: tokens of a row.

        Returns:
            ids `[rows, length]`, int32; segments `[rows, length]`, int8; lengths `[rows]`, int32.
        """
        ends = 1 + first.lengths[:, None]  # of the first [SEP]
        lengths = first.lengths + second.lengths + 3
        place = np.arange(length)
        ids = np.full((len(lengths), length), self.pad_id, np.int32)
        ids[:, 0] = self.cls_id
        ids[(place == ends) | (place == lengths[:, None] - 1)] = self.sep_id
        ids[(place > 0) & (place < ends)] = _gather(first)
        ids[(place > ends) & (place < lengths[:, None] - 1)] = _gather(second)
        segments = ((place > ends) & (place < lengths[:, None])).astype(np.int8)
        return ids, segments, lengths.astype(np.int32)


def load_tokenizer(
    vocab_file: str | Path,
    lower_case: bool = True,
    *,
    vocab_size: int | None = None,
    max_word_chars: int = 200,
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary file: one token a line, UTF-8.

    Args:
        lower_case: convert text to lower case and strip accents.
        vocab_size: number of the model's ids, to be checked; None checks nothing.
        max_word_chars: longer words are [UNK]; 200 in Google's program, 100 in transformers.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: `tokenizers` is not installed, the file is not UTF-8, has an empty line, a token
            twice or not all of `SPECIAL_TOKENS`, or more tokens than `vocab_size`.
    """
    path = Path(vocab_file)
    _library()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (--vocab_file)")
    try:
        text = read_bytes(path, MAX_VOCABULARY_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start}: not UTF-8") from error
    tokens = [line.strip() for line in text.rstrip().split("\n")]
    lines: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if not token:
            raise ValueError(f"{path}: line {number}: expected a token, got an empty line")
        if token in lines:
            raise ValueError(
                f"{path}: line {number}: {brief(token)} is there twice, first in line "
                f"{lines[token]}"
            )
        lines[token] = number
    if missing := [token for token in SPECIAL_TOKENS if token not in lines]:
        raise ValueError(
            f"{path}: expected a vocabulary with {', '.join(SPECIAL_TOKENS)}, got {len(tokens)} "
            f"lines without {', '.join(missing) if len(missing) < 5 else 'any of them'}"
        )
    if vocab_size is not None and len(tokens) > vocab_size:
        raise ValueError(f"{path}: {len(tokens)} tokens, more than --vocab_size {vocab_size}")
    return Tokenizer(tokens, lower_case, max_word_chars)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"WordPiece: {missing_extra(error, 'text')}") from error
    return tokenizers


def _blocks(texts: Iterable[str]) -> Iterable[list[str]]:
    block: list[str] = []
    for text in texts:
        block.append(text)
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block


def _check_characters(texts: list[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {text[:80]!r}: character {error.start}: half of a surrogate pair"
            ) from None


def _gather(slices: Slices) -> np.ndarray:
    """Returns the ids of all sequences, concatenated."""
    before = np.cumsum(slices.lengths) - slices.lengths
    places = np.repeat(slices.starts - before, slices.lengths)
    return slices.ids[places + np.arange(len(places))]
