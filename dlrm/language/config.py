"""BERT, its texts and its pre-training rows, as configurations without torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrm.limits import check_processes
from dlrm.settings import check_settings, setting

TEXT_FORMATS = ("sentences", "wikitext")
MAX_LENGTH = (1 << 16) - 1
NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]


class _Shape(NamedTuple):
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int


SIZES = {
    "base": _Shape(12, 768, 12, 3072),
    "large": _Shape(24, 1024, 16, 4096),
    "base_3layer": _Shape(3, 768, 12, 3072),
}


def _size(help: str) -> Any:
    return setting(None, f"{help}, instead of that of --size", architecture=True, least=1)


@dataclass(frozen=True)
class BertConfig:
    """An encoder's architecture; field names are those of the command line's flags."""

    size: str = setting(
        "base",
        "Published sizes: numbers of layers and heads, and widths",
        choices=SIZES,
        architecture=True,
    )
    num_layers: int | None = _size("Number of layers")
    hidden_size: int | None = _size("Width of a token's vector")
    num_heads: int | None = _size("Number of attention heads")
    intermediate_size: int | None = _size("Inner width of a layer's feed-forward network")
    vocab_size: int = setting(
        30522, "Number of tokens in the vocabulary", architecture=True, least=1
    )
    max_position_embeddings: int = setting(
        512, "Maximum tokens of a sequence", architecture=True, least=1
    )
    hidden_dropout: float = setting(0.1, "Dropout probability of layers' outputs", least=0, below=1)
    attention_dropout: float = setting(
        0.1, "Dropout probability of attention weights", least=0, below=1
    )
    norm_eps: float = setting(
        1e-12, "Added to the variances in layer normalization", architecture=True, above=0
    )
    attention_bias: bool = setting(
        True,
        "Use biases in the attention and in the layer before the masked-token logits; PopART has "
        "none",
        architecture=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.shape.hidden_size % self.shape.num_heads:
            raise ValueError(
                f"--num_heads {self.shape.num_heads}: expected a divisor of --hidden_size "
                f"{self.shape.hidden_size}"
            )

    @property
    def shape(self) -> _Shape:
        """Returns the four sizes, with those of `size` for None."""
        known = SIZES[self.size]
        given = {name: getattr(self, name) for name in known._fields}
        return known._replace(**{name: n for name, n in given.items() if n is not None})


@dataclass(frozen=True)
class VocabularyConfig:
    """The tokens of text; field names are those of the flags."""

    vocab_file: str = setting("", "WordPiece vocabulary, one token per line")
    lower_case: bool = setting(True, "Convert text to lower case and strip accents")


@dataclass(frozen=True)
class PretrainingTextConfig(VocabularyConfig):
    """The options of a dataset made from raw text; field names are those of the flags."""

    max_seq_length: int = setting(128, "tokens per row", least=8, most=MAX_LENGTH)
    max_predictions_per_seq: int = setting(
        20, "maximum masked tokens per row; usual: 20 of 128, 80 of 512", least=1
    )
    dupe_factor: int = setting(
        5, "number of times that each document is cut and masked, each time differently", least=1
    )
    input_format: str = setting(
        "sentences",
        "format of the source: a sentence a line and blank lines between documents, or WikiText's "
        "paragraphs and headings",
        choices=TEXT_FORMATS,
    )
    seed: int = setting(12345, "random seed", least=0)
    processes: int = setting(1, "number of processes, which does not change the bytes", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.vocab_file:
            raise ValueError("--vocab_file: expected the file of the vocabulary, got none")
        check_processes("--processes", self.processes)
        if self.max_predictions_per_seq > self.max_seq_length - NUM_SPECIAL:
            raise ValueError(
                "--max_predictions_per_seq: expected 1 to --max_seq_length - 3 = "
                f"{self.max_seq_length - NUM_SPECIAL}, got {self.max_predictions_per_seq}"
            )
