"""BERT (Devlin et al., 2018): an encoder of text with one of three heads, as named stages.

Parameters have the names of Hugging Face's models, so that public checkpoints load. The decoder of
masked tokens shares the table of words, and has no name of its own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.language.config import BertConfig
from dlrm.model.layers.initialize import materialize

_NUM_SEGMENTS = 2
_INITIAL_DEVIATION = 0.02


class _Bert(nn.Module):
    """An encoder and a head, which a subclass makes.

    Args:
        seed: seed of the initial weights, normal with deviation 0.02.
    """

    head: str  # name of its weights
    is_pooled = True

    def __init__(self, config: BertConfig = BertConfig(), seed: int = 0) -> None:
        super().__init__()
        device, width = torch.get_default_device(), config.shape.hidden_size
        with torch.device("meta"):
            layers = nn.ModuleList(_Layer(config) for _ in range(config.shape.num_layers))
            encoder = nn.ModuleDict({"layer": layers})
            self.bert = nn.ModuleDict({"embeddings": _Embeddings(config), "encoder": encoder})
            if self.is_pooled:
                self.bert["pooler"] = _Pooler(width)
            self.add_module(self.head, self._make_head(config))
        materialize(self, device, seed, _draw_weight)

    @staticmethod
    def _make_head(config: BertConfig) -> nn.Module:
        return _Linear(config.shape.hidden_size, 2)

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module: `embeddings`, `layer0` and so on, maybe `pooler`, `head`."""
        layers = self.bert["encoder"].get_submodule("layer").children()
        stages = {"embeddings": self.bert["embeddings"]}
        stages |= {f"layer{number}": layer for number, layer in enumerate(layers)}
        if self.is_pooled:
            stages["pooler"] = self.bert["pooler"]
        return stages | {"head": self.get_submodule(self.head)}

    def run(
        self,
        stages: Mapping[str, nn.Module],
        hidden: Tensor | None,
        ids: Tensor,
        segments: Tensor,
        lengths: Tensor | None,
    ) -> Any:
        """Returns the output of consecutive stages.

        Args:
            hidden: the output of the previous stage; None if there is none.
            ids: tokens, `[rows, length]`; like all arguments, of any integer dtype.
            segments: segment of each token, 0 or 1, `[rows, length]`.
            lengths: tokens of each row without padding, `[rows]`; None is all.

        Raises:
            ValueError: the sequences are too long for the encoder.
        """
        mask = None
        if lengths is not None:
            positions = torch.arange(ids.shape[1], device=ids.device)
            mask = (positions < lengths[:, None])[:, None, None, :]
        for stage in stages.values():
            if hidden is None:
                hidden = stage(ids, segments)
            else:
                hidden = stage(hidden, mask) if isinstance(stage, _Layer) else stage(hidden)
        return hidden

    def forward(self, *inputs: Tensor | None) -> Any:
        """Returns the logits that the subclass describes, given the inputs of `run`."""
        return self.run(self.stages(), None, *inputs)  # type: ignore[arg-type]


class BertForPreTraining(_Bert):
    """Predicts masked tokens, and whether the second segment follows the first.

    It returns logits of the masked tokens, `[rows, predictions, words]`, and of the pair, `[rows,
    2]`. Its last input is the positions of the tokens to predict, `[rows, predictions]`.
    """

    head = "cls"

    @staticmethod
    def _make_head(config: BertConfig) -> nn.Module:
        return _PreTrainingHead(config)

    def run(self, stages: Mapping[str, nn.Module], hidden: Tensor | None, *inputs: Any) -> Any:
        """Returns the output of consecutive stages; `pooler` and `head` only together."""
        *tokens, masked_positions = inputs
        encoder = {name: stage for name, stage in stages.items() if name not in ("pooler", "head")}
        hidden = super().run(encoder, hidden, *tokens)
        if "head" not in stages:
            return hidden
        words = self.get_parameter("bert.embeddings.word_embeddings.weight")
        return stages["head"](hidden, stages["pooler"](hidden), masked_positions, words)


class BertForQuestionAnswering(_Bert):
    """Predicts the start and end of an answer, as logits `[rows, length, 2]`; without a pooler."""

    head, is_pooled = "qa_outputs", False


class BertForSequenceClassification(_Bert):
    """Classifies pairs of sequences; returns logits `[rows, 2]`."""

    head = "classifier"

    @staticmethod
    def _make_head(config: BertConfig) -> nn.Module:
        return _Classifier(config)


def _draw_weight(module: nn.Module, values: Tensor, random: torch.Generator) -> None:
    values.normal_(0, _INITIAL_DEVIATION, generator=random)


class _Linear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return ops.linear(inputs, self.weight, self.bias)


class _Dropout(nn.Dropout):
    def forward(self, values: Tensor) -> Tensor:
        return ops.dropout(values, self.p) if self.training else values


class _Classifier(_Linear):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.shape.hidden_size, 2)
        self.dropout = _Dropout(config.hidden_dropout)

    def forward(self, pooled: Tensor) -> Tensor:
        return super().forward(self.dropout(pooled))


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
    """Logits of all words for masked tokens, and of whether B follows A for pooled vectors."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.shape.hidden_size
        dense = _Linear(width, width, config.attention_bias)
        norm = nn.LayerNorm(width, config.norm_eps)
        self.predictions = nn.Module()
        self.predictions.transform = nn.Sequential(
            OrderedDict(dense=dense, gelu=nn.GELU(), LayerNorm=norm)
        )
        self.predictions.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.seq_relationship = _Linear(width, 2)

    def forward(
        self, hidden: Tensor, pooled: Tensor, masked_positions: Tensor, words: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, length, _ = hidden.shape
        first = torch.arange(0, rows * length, length, device=hidden.device)
        places = (masked_positions + first[:, None]).flatten()
        masked = hidden.flatten(0, 1).index_select(0, places)
        predictions: Any = self.predictions
        logits = ops.linear(predictions.transform(masked), words, predictions.bias)
        return logits.unflatten(0, masked_positions.shape), self.seq_relationship(pooled)
