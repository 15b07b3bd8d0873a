"""Small BERTs with weights from a formula, and their logits: the golden values.

`tests/peers` shows that the networks of transformers give the same logits.
"""

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
NUM_LABELS = 4
KINDS = {
    "pretraining": BertForPreTraining,
    "question": BertForQuestionAnswering,
    "classification": BertForSequenceClassification,
}
# Logits of the last row: its second masked token and the pair; its token 3; its classes.
GOLDEN = {
    "pretraining": [
        *(0.750005744, -0.318029188, 0.981374832, 0.059360514, 1.100537163, 0.644405564),
        *(-1.368809871, -0.065635516, 1.240402602, -0.851176596, -1.426853616),
        *(0.119910092, 0.671038565),
    ],
    "question": [-0.220860302, -0.907779283],
    "classification": [0.633432532, -0.756111482, -0.870710627, 1.957985156],
}


def build(kind: str, dtype: torch.dtype = torch.float64, config: BertConfig = CONFIG) -> nn.Module:
    """Returns a network of `KINDS` whose weights depend only on shape and position."""
    options = {"num_labels": NUM_LABELS} if kind == "classification" else {}
    with torch.device("meta"):
        network = KINDS[kind](config, **options)
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


def shown(kind: str, outputs) -> list[float]:
    """Returns the logits in `GOLDEN`."""
    if kind == "pretraining":
        return [*outputs[0][2, 1].tolist(), *outputs[1][2].tolist()]
    return outputs[2, 3].tolist() if kind == "question" else outputs[2].tolist()
