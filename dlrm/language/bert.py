"""BERT (Devlin et al., 2018): an encoder of text with one of three heads, as named stages.

Parameters have the names of Hugging Face's models, so that public checkpoints load. The decoder of
masked tokens shares the table of words, and has no name of its own.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.language.config import SIZES as SIZES, BertConfig
from dlrm.model.layers.initialize import materialize

_NUM_SEGMENTS = 2
_INITIAL_DEVIATION = 0.02


class BertForPreTraining(nn.Module):
    """Predicts masked tokens, and whether the second segment follows the first.

    Args:
        seed: seed of the initial weights, normal with deviation 0.02.
    """

    def __init__(self, config: BertConfig = BertConfig(), seed: int = 0) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("meta"):
            self.bert = _Bert(config, pooler=True)
            self.cls = _PreTrainingHead(config)
        materialize(self, device, seed, _draw_weight)

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module: `embeddings`, `layer0` and so on, `pooler`, `head`."""
        return self.bert.stages() | {"head": self.cls}

    def run(
        self,
        stages: Mapping[str, nn.Module],
        hidden: Tensor | None,
        ids: Tensor,
        segments: Tensor,
        lengths: Tensor | None,
        masked_positions: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the output of consecutive stages; `pooler` and `head` only together.

        Args:
            hidden: the output of the previous stage; None if there is none.
            ids, segments, lengths, masked_positions: arguments of `forward`.
        """
        encoder = {name: stage for name, stage in stages.items() if name not in ("pooler", "head")}
        hidden = self.bert.run(encoder, hidden, ids, segments, lengths)
        if "head" not in stages:
            return hidden
        words = self.bert.embeddings.word_embeddings.weight
        return self.cls(hidden, self.bert.pooler(hidden), masked_positions, words)

    def forward(
        self, ids: Tensor, segments: Tensor, lengths: Tensor | None, masked_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns logits of the masked tokens, `[rows, predictions, words]`, and of the pair.

        Args:
            ids: tokens, `[rows, length]`; like all arguments, of any integer dtype.
            segments: segment of each token, 0 or 1, `[rows, length]`.
            lengths: tokens of each row without padding, `[rows]`; None is all.
            masked_positions: positions of the tokens to predict, `[rows, predictions]`.

        Raises:
            ValueError: the sequences are too long for the encoder.
        """
        outputs = self.run(self.stages(), None, ids, segments, lengths, masked_positions)
        assert isinstance(outputs, tuple)
        return outputs


class _OneHead(nn.Module):
    """An encoder whose stages each take the output of the one before."""

    bert: "_Bert"

    def stages(self) -> dict[str, nn.Module]:
        raise NotImplementedError

    def run(
        self,
        stages: Mapping[str, nn.Module],
        hidden: Tensor | None,
        ids: Tensor,
        segments: Tensor,
        lengths: Tensor | None,
    ) -> Tensor:
        """Returns the output of consecutive stages.

        Arguments are those of `BertForPreTraining.run`.
        """
        return self.bert.run(stages, hidden, ids, segments, lengths)

    def forward(self, ids: Tensor, segments: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns the logits that the subclass describes.

        Arguments and errors are those of `BertForPreTraining`.
        """
        return self.run(self.stages(), None, ids, segments, lengths)


class BertForQuestionAnswering(_OneHead):
    """Predicts the start and end of an answer, as logits `[rows, length, 2]`; without a pooler."""

    def __init__(self, config: BertConfig = BertConfig(), seed: int = 0) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("meta"):
            self.bert = _Bert(config, pooler=False)
            self.qa_outputs = _Linear(config.shape.hidden_size, 2)
        materialize(self, device, seed, _draw_weight)

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module: `embeddings`, `layer0` and so on, `head`."""
        return self.bert.stages() | {"head": self.qa_outputs}


class BertForSequenceClassification(_OneHead):
    """Classifies sequences, or pairs of them; returns logits `[rows, num_labels]`.

    Raises:
        ValueError: `num_labels` is below 1.
    """

    def __init__(
        self, config: BertConfig = BertConfig(), num_labels: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        if num_labels < 1:
            raise ValueError(f"--num_labels {num_labels}: expected 1 or more")
        device = torch.get_default_device()
        with torch.device("meta"):
            self.bert = _Bert(config, pooler=True)
            self.dropout = _Dropout(config.hidden_dropout)
            self.classifier = _Linear(config.shape.hidden_size, num_labels)
        materialize(self, device, seed, _draw_weight)
        # Kept in a tuple, so that its layers are not named a second time in the state.
        self._head = (nn.Sequential(self.dropout, self.classifier),)

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module: `embeddings`, `layer0` and so on, `pooler`, `head`."""
        return self.bert.stages() | {"head": self._head[0]}


def _draw_weight(module: nn.Module, values: Tensor, random: torch.Generator) -> None:
    values.normal_(0, _INITIAL_DEVIATION, generator=random)


class _Linear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return ops.linear(inputs, self.weight, self.bias)


class _Dropout(nn.Dropout):
    def forward(self, values: Tensor) -> Tensor:
        return ops.dropout(values, self.p) if self.training else values


class _Bert(nn.Module):
    """Embeddings, encoder and pooler, whose stages a network with a head runs."""

    def __init__(self, config: BertConfig, pooler: bool) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(_Layer(config) for _ in range(config.shape.num_layers))}
        )
        if pooler:
            self.pooler = _Pooler(config.shape.hidden_size)

    def stages(self) -> dict[str, nn.Module]:
        stages: dict[str, nn.Module] = {"embeddings": self.embeddings}
        stages |= {f"layer{i}": layer for i, layer in enumerate(self.encoder["layer"].children())}
        return stages | ({"pooler": self.pooler} if hasattr(self, "pooler") else {})

    def run(
        self,
        stages: Mapping[str, nn.Module],
        hidden: Tensor | None,
        ids: Tensor,
        segments: Tensor,
        lengths: Tensor | None,
    ) -> Tensor:
        mask = None
        if lengths is not None:
            positions = torch.arange(ids.shape[1], device=ids.device)
            mask = (positions < lengths[:, None])[:, None, None, :]
        for stage in stages.values():
            if hidden is None:
                hidden = self.embeddings(ids, segments)
            else:
                hidden = stage(hidden, mask) if isinstance(stage, _Layer) else stage(hidden)
        assert hidden is not None, "no stages"
        return hidden


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.shape.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(_NUM_SEGMENTS, width)
        self.LayerNorm = nn.LayerNorm(width, config.norm_eps)
        self.dropout = _Dropout(config.hidden_dropout)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        length, longest = ids.shape[1], self.position_embeddings.num_embeddings
        if length > longest:
            raise ValueError(
                f"--max_position_embeddings {longest}: expected at least the length of the "
                f"sequences, {length} tokens"
            )
        summed = self.word_embeddings(ids.long()) + self.token_type_embeddings(segments.long())
        return self.dropout(self.LayerNorm(summed + self.position_embeddings.weight[:length]))


class _Layer(nn.Module):
    """Attention and two dense layers, each added to its input and then normalized."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        _, width, _, inner = config.shape
        bias = config.attention_bias
        self.attention = nn.ModuleDict(
            {"self": _SelfAttention(config), "output": _Residual(width, width, bias, config)}
        )
        self.intermediate = nn.ModuleDict({"dense": _Linear(width, inner)})
        self.output = _Residual(inner, width, True, config)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(F.gelu(self.intermediate["dense"](hidden)), hidden)


class _SelfAttention(nn.Module):
    """Scaled dot-product attention of every token to those in `mask` `[rows, 1, 1, length]`.

    Queries, keys and values have separate matrices, as LAMB's ratios of norms require.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        _, width, self.num_heads, _ = config.shape
        self.query = _Linear(width, width, config.attention_bias)
        self.key = _Linear(width, width, config.attention_bias)
        self.value = _Linear(width, width, config.attention_bias)
        self.dropout = config.attention_dropout

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = _autocast(hidden)  # once, instead of in each of three layers
        query, key, value = (
            layer(hidden).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        return mixed.transpose(1, 2).flatten(2)


def _autocast(hidden: Tensor) -> Tensor:
    """Casts to the dtype of autocast, if it is enabled."""
    device = hidden.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


class _Residual(nn.Module):
    """A dense layer, dropout, the residual sum, and the norm."""

    def __init__(self, inputs: int, outputs: int, bias: bool, config: BertConfig) -> None:
        super().__init__()
        self.dense = _Linear(inputs, outputs, bias)
        self.LayerNorm = nn.LayerNorm(outputs, config.norm_eps)
        self.dropout = _Dropout(config.hidden_dropout)

    def forward(self, values: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(values)) + before)


class _Pooler(nn.Module):
    """A dense layer over the first token's vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = _Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense(hidden[:, 0]).tanh()


class _PreTrainingHead(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _Predictions(config)
        self.seq_relationship = _Linear(config.shape.hidden_size, 2)

    def forward(
        self, hidden: Tensor, pooled: Tensor, masked_positions: Tensor, words: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, length, _ = hidden.shape
        first = torch.arange(0, rows * length, length, device=hidden.device)
        places = (masked_positions + first[:, None]).flatten()
        masked = hidden.flatten(0, 1).index_select(0, places)
        logits = self.predictions(masked, words)
        return logits.unflatten(0, masked_positions.shape), self.seq_relationship(pooled)


class _Predictions(nn.Module):
    """Logits of all words for vectors of masked tokens, `[tokens, hidden]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.shape.hidden_size
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.transform = nn.ModuleDict(
            {
                "dense": _Linear(width, width, config.attention_bias),
                "LayerNorm": nn.LayerNorm(width, config.norm_eps),
            }
        )

    def forward(self, masked: Tensor, words: Tensor) -> Tensor:
        transformed = self.transform["LayerNorm"](F.gelu(self.transform["dense"](masked)))
        return ops.linear(transformed, words, self.bias)
