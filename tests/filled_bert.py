"""Small BERTs with weights from a formula."""

import filled_networks
import torch
from torch import Tensor, nn

from dlrm.language.bert import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)

CONFIG = BertConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=3,
    intermediate_size=40,
    vocab_size=11,
    max_position_embeddings=20,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LENGTHS = (13, 5, 8)
LENGTH = 13
KINDS = {
    "pretraining": BertForPreTraining,
    "question": BertForQuestionAnswering,
    "classification": BertForSequenceClassification,
}


def build(kind: str, dtype: torch.dtype = torch.float64, config: BertConfig = CONFIG) -> nn.Module:
    """Returns a network of `KINDS` whose weights depend only on shape and position."""
    with torch.device("meta"):
        network = KINDS[kind](config)
    return filled_networks.fill(network.to_empty(device="cpu").to(dtype))


def inputs(kind: str) -> tuple[Tensor, ...]:
    """Returns rows of 13, 5 and 8 tokens, two masked in each, as narrow integers."""
    places = torch.arange(len(LENGTHS) * LENGTH).view(len(LENGTHS), LENGTH)
    ids = (places * places * 7 + 3) % CONFIG.vocab_size
    segments = (places % LENGTH > 3).to(torch.int8)
    taken = (ids.to(torch.int32), segments, torch.tensor(LENGTHS, dtype=torch.int32))
    if kind == "pretraining":
        return (*taken, torch.tensor([[2, 12], [0, 4], [3, 7]], dtype=torch.int32))
    return taken
