"""Our BERT, optimizer and schedules against those of transformers and timm."""

import importlib

import filled_bert
import pytest
import torch
import torch.nn.functional as F
from filled_bert import CONFIG, LENGTH, LENGTHS
from torch import nn

from dlrm.language.bert import BertConfig
from dlrm.train.checkpoints.pretrained import load_bert_weights
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.optim.dense import network_optimizer
from dlrm.train.precision import LossScaler
from dlrm.train.schedule import CurveConfig

pytestmark = pytest.mark.long
CLASSES = {
    "pretraining": "BertForPreTraining",
    "question": "BertForQuestionAnswering",
    "classification": "BertForSequenceClassification",
}


def theirs_of(transformers, kind: str, config: BertConfig = CONFIG, dtype=torch.float64):
    """Returns transformers' equivalent network."""
    layers, width, heads, inner = config.shape
    network = getattr(transformers, CLASSES[kind])(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=inner,
            max_position_embeddings=config.max_position_embeddings,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=config.norm_eps,
            pad_token_id=None,  # else the first word's vector is not trained
            num_labels=2,
            attn_implementation="sdpa",
        )
    )
    return network.to(dtype).train()


def outputs_of(kind: str, network: nn.Module, inputs) -> tuple[torch.Tensor, ...]:
    """Returns transformers' logits."""
    ids, segments, lengths, *rest = (tensor.long() for tensor in inputs)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    out = network(input_ids=ids, attention_mask=mask, token_type_ids=segments)
    if kind == "pretraining":
        rows = torch.arange(len(ids))[:, None]
        return out.prediction_logits[rows, rest[0]], out.seq_relationship_logits
    if kind == "question":
        return (torch.stack([out.start_logits, out.end_logits], 2),)
    return (out.logits,)


def loss_of(outputs) -> torch.Tensor:
    """Returns the mean cross-entropy of synthetic labels, computed as in the heads."""
    if outputs[0].shape[1:] == (LENGTH, 2):  # start and end of an answer
        kept = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
        logits = outputs[0].masked_fill(~kept[..., None], -100.0).transpose(1, 2).flatten(0, 1)
        return F.cross_entropy(logits, torch.arange(len(logits)) % min(LENGTHS))
    losses = []
    for logits in outputs:
        logits = logits.flatten(0, -2)
        losses.append(F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]))
    return sum(losses)


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Copies our weights into transformers' network; the decoder shares the word embeddings."""
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


@pytest.mark.parametrize("kind", CLASSES)
def test_logits_loss_and_gradients_equal_transformers(kind, transformers):
    ours, theirs = filled_bert.build(kind), theirs_of(transformers, kind)
    copy_weights(ours, theirs)
    inputs = filled_bert.inputs(kind)
    actual = ours(*inputs)
    actual = actual if isinstance(actual, tuple) else (actual,)
    expected = outputs_of(kind, theirs, inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    losses = loss_of(actual), loss_of(expected)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients.pop(name), msg=lambda m, n=name: n + m)
    assert not gradients


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", CLASSES)
def test_their_files_load(kind, ending, transformers, tmp_path):
    theirs = theirs_of(transformers, kind, dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    if ending == "bin":
        file = tmp_path / "pytorch_model.bin"
        torch.save(theirs.state_dict(), file)
    ours = filled_bert.build(kind, torch.float32)
    load_bert_weights(ours, str(file))
    inputs = filled_bert.inputs(kind)
    actual = ours(*inputs)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for one, other in zip(actual, outputs_of(kind, theirs, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_twenty_steps_of_lamb_equal_timms(decay, timm):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).double()
    theirs = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).double()
    theirs.load_state_dict(ours.state_dict())
    config = NetworkOptimizerConfig("lamb", weight_decay=decay)
    optimizer = network_optimizer(config, ours)
    weights = list(theirs.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    oracle = importlib.import_module("timm.optim").Lamb(groups, lr=0.1, eps=1e-6)
    for step in range(20):
        rate = 0.1 / (step + 1)
        set_learning_rate([optimizer], rate)
        for group in oracle.param_groups:
            group["lr"] = rate
        for one, other in zip(ours.parameters(), weights, strict=True):
            other.grad = torch.randn_like(other) * 0.05 * 2 ** (step % 5)
            one.grad = other.grad.clone()
        LossScaler().step([optimizer])
        oracle.step()
    for one, other in zip(ours.parameters(), weights, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)  # our rate is float32


def test_the_linear_schedule_is_transformers(transformers):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 7, 50)
    rate = CurveConfig("linear", 2.0, 7, "steps").rates(50, 1)
    for step in range(1, 51):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
