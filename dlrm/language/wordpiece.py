"""WordPiece: converts texts to token ids of a BERT vocabulary.

Texts are normalized like BERT's: control characters are removed, CJK characters and punctuation are
split off, and letters become lower case without accents. Each word is then split greedily into the
longest pieces in the vocabulary. `tokenizers` (extra `text`) does the work.
"""

from array import array
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.command_line import missing_extra
from dlrm.documents import brief, read_bytes

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_VOCABULARY_BYTES = 1 << 26
_MOST_CHARS = 200  # of a word; 200 in Google's program, 100 in transformers
_BLOCK = 1024  # texts tokenized at once, which limits the number of Python objects


class Tokens(NamedTuple):
    """Sequences of ids, stored in one array.

    Attributes:
        ids: ids of all sequences, of any integer dtype.
        starts: index of each sequence in `ids`, `[sequences]`, int64.
        lengths: length of each sequence, `[sequences]`, int64.
        spans: first character of each id in its text and the one after its last, `[ids, 2]`, int32.
    """

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    spans: np.ndarray = np.empty((0, 2), np.int32)

    def part(self, rows: np.ndarray, skipped: Any, lengths: np.ndarray) -> "Tokens":
        """Returns a part of each of some sequences.

        Args:
            rows: their numbers.
            skipped: ids of each before its part.
            lengths: length of each part.
        """
        return self._replace(starts=self.starts[rows] + skipped, lengths=lengths)

    def joined(self) -> np.ndarray:
        """Returns the ids of all sequences, concatenated."""
        before = np.cumsum(self.lengths) - self.lengths
        places = np.repeat(self.starts - before, self.lengths)
        return self.ids[places + np.arange(len(places))]


class Tokenizer:
    """Converts texts to ids of a vocabulary.

    Text that looks like a special token is treated as text: `[SEP]` becomes the tokens of `[`,
    `sep` and `]`. A word of more than 200 characters is [UNK].

    Args:
        vocab_file: one token a line, UTF-8.
        lower_case: convert text to lower case and strip accents.
        vocab_size: number of the model's ids, to be checked; None checks nothing.

    Attributes:
        vocab_size: number of tokens.
        pad_id, cls_id, sep_id, mask_id: ids of `SPECIAL_TOKENS`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: `tokenizers` is not installed, the file is not UTF-8, has an empty line, a token
            twice or not all of `SPECIAL_TOKENS`, or more tokens than `vocab_size`.
    """

    def __init__(
        self, vocab_file: str | Path, lower_case: bool = True, *, vocab_size: int | None = None
    ) -> None:
        try:
            from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
        except ImportError as error:
            raise ValueError(f"WordPiece: {missing_extra(error, 'text')}") from error
        ids = _read_vocabulary(Path(vocab_file), vocab_size)
        self.vocab_size, special = len(ids), [ids[token] for token in SPECIAL_TOKENS]
        self.pad_id, _, self.cls_id, self.sep_id, self.mask_id = special
        words = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_MOST_CHARS)
        self._tokenizer: Any = Tokenizer(words)
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, texts: Iterable[str], spans: bool = False) -> Tokens:
        """Returns the tokens of texts, without special ones, as int32; tokenizes on all cores.

        Args:
            spans: whether to return the tokens' characters as well.
        """
        encode = self._tokenizer.encode_batch if spans else self._tokenizer.encode_batch_fast
        ids, lengths, characters = (array("i") for _ in range(3))
        remaining = iter(texts)
        while block := list(islice(remaining, _BLOCK)):
            for text in encode(block, add_special_tokens=False):
                ids.extend(text.ids)
                lengths.append(len(text))
                if spans:
                    characters.extend(chain.from_iterable(text.offsets))
        ends = np.cumsum(lengths, dtype=np.int64)
        every = np.array(lengths, np.int64)
        own, bounds = (np.array(values, np.int32) for values in (ids, characters))
        return Tokens(own, ends - every, every, bounds.reshape(-1, 2))

    def join_pairs(
        self, first: Tokens, second: Tokens, length: int
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
        place, last = np.arange(length), lengths[:, None] - 1
        ids = np.full((len(lengths), length), self.pad_id, np.int32)
        ids[:, 0] = self.cls_id
        ids[(place == ends) | (place == last)] = self.sep_id
        ids[(place > 0) & (place < ends)] = first.joined()
        ids[(place > ends) & (place < last)] = second.joined()
        segments = ((place > ends) & (place <= last)).astype(np.int8)
        return ids, segments, lengths.astype(np.int32)


def _read_vocabulary(path: Path, vocab_size: int | None) -> dict[str, int]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (--vocab_file)")
    try:
        text = read_bytes(path, MAX_VOCABULARY_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start}: not UTF-8") from error
    ids: dict[str, int] = {}
    for number, token in enumerate(map(str.strip, text.rstrip().split("\n"))):
        place = f"{path}: line {number + 1}"
        if not token:
            raise ValueError(f"{place}: expected a token, got an empty line")
        if token in ids:
            raise ValueError(f"{place}: {brief(token)} is also in line {ids[token] + 1}")
        ids[token] = number
    if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
        raise ValueError(f"{path}: {len(ids)} tokens, without {', '.join(missing)}")
    if vocab_size is not None and len(ids) > vocab_size:
        raise ValueError(f"{path}: {len(ids)} tokens, more than --vocab_size {vocab_size}")
    return ids
