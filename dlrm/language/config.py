"""BERT, as a configuration without torch."""

from dataclasses import dataclass
from typing import NamedTuple

from dlrm.settings import check_settings, setting


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


@dataclass(frozen=True)
class BertConfig:
    """An encoder's architecture; field names are those of the command line's flags."""

    size: str = setting(
        "base",
        "Published sizes: numbers of layers and heads, and widths",
        choices=SIZES,
        architecture=True,
    )
    num_layers: int | None = setting(
        None, "Number of layers, instead of that of --size", architecture=True, least=1
    )
    hidden_size: int | None = setting(
        None, "Width of a token's vector, instead of that of --size", architecture=True, least=1
    )
    num_heads: int | None = setting(
        None, "Number of attention heads, instead of that of --size", architecture=True, least=1
    )
    intermediate_size: int | None = setting(
        None,
        "Inner width of a layer's feed-forward network, instead of that of --size",
        architecture=True,
        least=1,
    )
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
