import copy
import math

import filled_bert
import pytest
import torch
from filled_bert import CONFIG, KINDS, LENGTH, LENGTHS

from dlrm.language.bert import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)
from dlrm.train.execution import recompute

pytestmark = pytest.mark.long
POPART = {"vocab_size": 30400, "attention_bias": False, "norm_eps": 1e-3}


def count(kind, *args, **options) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in kind(BertConfig(*args, **options)).parameters())


@pytest.mark.parametrize(
    ("size", "pretraining", "padded", "question", "classification"),
    [
        ("base", 110_106_428, 110_111_042, 108_893_186, 109_483_778),
        ("large", 336_226_108, 336_232_258, 334_094_338, 335_143_938),
        ("base_3layer", 46_315_580, 46_320_194, 45_102_338, 45_692_930),
    ],
)
def test_parameters_are_the_published_ones(size, pretraining, padded, question, classification):
    assert count(BertForPreTraining, size) == pretraining
    assert count(BertForPreTraining, size, vocab_size=30528) == padded
    assert count(BertForQuestionAnswering, size) == question
    assert count(BertForSequenceClassification, size) == classification
    for kind, whole in ((BertForPreTraining, pretraining), (BertForQuestionAnswering, question)):
        with torch.device("meta"):
            stages = kind(BertConfig(size)).stages()
        assert sum(p.numel() for s in stages.values() for p in s.parameters()) == whole


def test_parameters_of_graphcores_flavor():
    assert count(BertForQuestionAnswering, "base_3layer", **POPART) == 44_999_426
    biased = count(BertForPreTraining, "base_3layer", vocab_size=30400)
    # 3 layers of 4 biases, and the one before the decoder
    assert biased - count(BertForPreTraining, "base_3layer", **POPART) == (3 * 4 + 1) * 768


def plain(kind, weights, ids, segments, lengths, positions=None, config=CONFIG):
    """Computes the network from the paper's formulas, without layers of torch."""
    heads, eps = config.shape.num_heads, config.norm_eps

    def dense(name, x):
        out = x @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    def norm(name, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x):
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    def attention(name, x, length):
        mixed = []
        q, k, v = (dense(f"{name}.self.{part}", x) for part in ("query", "key", "value"))
        width = x.shape[-1] // heads
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:length, part].T / math.sqrt(width)
            exponents = (scores - scores.max(1, keepdim=True).values).exp()
            mixed.append(exponents / exponents.sum(1, keepdim=True) @ v[:length, part])
        out = dense(f"{name}.output.dense", torch.cat(mixed, 1))
        return norm(f"{name}.output.LayerNorm", out + x)

    rows = []
    for row, length in enumerate(lengths.tolist()):
        embeddings = "bert.embeddings"
        x = weights[f"{embeddings}.word_embeddings.weight"][ids[row].long()]
        x = x + weights[f"{embeddings}.token_type_embeddings.weight"][segments[row].long()]
        x = x + weights[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]]
        x = norm(f"{embeddings}.LayerNorm", x)
        for layer in range(config.shape.num_layers):
            name = f"bert.encoder.layer.{layer}"
            x = attention(f"{name}.attention", x, length)
            inner = gelu(dense(f"{name}.intermediate.dense", x))
            x = norm(f"{name}.output.LayerNorm", dense(f"{name}.output.dense", inner) + x)
        rows.append(x)
    hidden = torch.stack(rows)
    if kind == "question":
        return dense("qa_outputs", hidden)
    pooled = dense("bert.pooler.dense", hidden[:, 0]).tanh()
    if kind == "classification":
        return dense("classifier", pooled)
    masked = torch.stack([hidden[r, positions[r].long()] for r in range(len(hidden))])
    name = "cls.predictions"
    masked = norm(f"{name}.transform.LayerNorm", gelu(dense(f"{name}.transform.dense", masked)))
    logits = masked @ weights["bert.embeddings.word_embeddings.weight"].T
    return logits + weights[f"{name}.bias"], dense("cls.seq_relationship", pooled)


def total(outputs) -> torch.Tensor:
    """Returns a number that depends on every logit outside padding."""
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    if parts[0].shape[1:] == (LENGTH, 2):
        kept = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
        parts = (parts[0][kept.to(parts[0].device)],)
    factors = [
        torch.arange(1, part.numel() + 1, device=part.device).view(part.shape) for part in parts
    ]
    return sum((part.sin() * f).sum() for part, f in zip(parts, factors, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_the_formulas(kind, bias, device):
    config = BertConfig(**{**vars(CONFIG), "attention_bias": bias, "norm_eps": 1e-3})
    network = filled_bert.build(kind, config=config).to(device)
    weights = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    inputs = inputs_on(device, kind)
    actual, expected = total(network(*inputs)), total(plain(kind, weights, *inputs, config=config))
    torch.testing.assert_close(actual, expected)
    actual.backward()
    expected.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=lambda m, n=name: n + m)


def inputs_on(device, kind):
    return tuple(tensor.to(device) for tensor in filled_bert.inputs(kind))


def test_weights_depend_on_seed_and_name_alone():
    one = BertForPreTraining(CONFIG, seed=3).state_dict()
    other = BertForQuestionAnswering(BertConfig(**{**vars(CONFIG), "num_layers": 1}), 3)
    for name, value in other.state_dict().items():
        if not name.startswith("qa_outputs"):
            assert torch.equal(value, one[name])
    name = "bert.encoder.layer.0.attention.self.key.weight"
    assert not torch.equal(BertForPreTraining(CONFIG, seed=4).state_dict()[name], one[name])
    assert not torch.equal(one[name.replace("key", "query")], one[name])
    wide = BertForSequenceClassification(BertConfig(**{**vars(CONFIG), "vocab_size": 3000}))
    for key, value in wide.state_dict().items():
        if "LayerNorm.weight" in key:
            assert torch.equal(value, torch.ones_like(value))
        elif key.endswith("bias"):
            assert not value.any()
        else:
            assert value.mean().item() == pytest.approx(0, abs=0.06 / value.numel() ** 0.5)
            assert value.std().item() == pytest.approx(0.02, rel=3 / value.numel() ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_hold_every_weight_once(kind):
    network = filled_bert.build(kind)
    stages = network.stages()
    middle = ["layer0", "layer1"] + ["pooler"] * (kind != "question")
    assert list(stages) == ["embeddings", *middle, "head"]
    held = [id(p) for stage in stages.values() for p in stage.parameters()]
    assert sorted(held) == sorted(id(p) for p in network.parameters())
    twin = copy.deepcopy(network)
    twin.stages()["layer0"].output.dense.weight.data.zero_()
    assert stages["layer0"].output.dense.weight.any()


def with_dropout(kind, share=0.2):
    changes = {"hidden_dropout": share, "attention_dropout": share}
    return filled_bert.build(kind, config=BertConfig(**{**vars(CONFIG), **changes}))


def gradients(network, forward, inputs, seed=5):
    torch.manual_seed(seed)
    loss = total(forward(*inputs))
    loss.backward()
    return loss, {name: p.grad for name, p in network.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_gradients(kind):
    inputs = filled_bert.inputs(kind)
    network, recomputed = with_dropout(kind), with_dropout(kind)
    recompute(recomputed.stages())
    loss, expected = gradients(network, network, inputs)
    same_loss, actual = gradients(recomputed, recomputed, inputs)
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_dropout_is_of_training_alone():
    inputs = filled_bert.inputs("classification")
    network = with_dropout("classification")
    for part in ("hidden_dropout", "attention_dropout"):
        one = filled_bert.build("classification", config=BertConfig(**{**vars(CONFIG), part: 0.2}))
        torch.manual_seed(1)
        assert not torch.equal(one(*inputs), one(*inputs))
    assert torch.equal(network.eval()(*inputs), network(*inputs))
    torch.testing.assert_close(network(*inputs), filled_bert.build("classification")(*inputs))


def test_a_compiled_network_gives_the_same():
    kind = "pretraining"
    inputs, network = filled_bert.inputs(kind), filled_bert.build(kind)
    loss, expected = gradients(network, network, inputs)
    network.zero_grad()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    same_loss, actual = gradients(network, compiled, inputs)
    torch.testing.assert_close(same_loss, loss)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)
    torch._dynamo.reset()


def test_too_long_sequences_are_named():
    network = filled_bert.build("question")
    ids = torch.zeros(2, 21, dtype=torch.int32)
    message = "--max_position_embeddings 20: expected at least .* sequences, 21 tokens"
    with pytest.raises(ValueError, match=message):
        network(ids, ids, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BertConfig("tiny"), "--size tiny: expected one of base, large, base_3layer"),
        (lambda: BertConfig(num_heads=7), "--num_heads 7: expected a divisor of --hidden_size 768"),
        (lambda: BertConfig(num_layers=0), "--num_layers 0"),
        (lambda: BertConfig(vocab_size=0), "--vocab_size 0"),
        (lambda: BertConfig(max_position_embeddings=-1), "--max_position_embeddings -1"),
        (lambda: BertConfig(hidden_dropout=1.0), "--hidden_dropout 1.0"),
        (lambda: BertConfig(attention_dropout=-0.1), "--attention_dropout -0.1"),
        (lambda: BertConfig(norm_eps=0.0), "--norm_eps 0.0"),
    ],
)
def test_impossible_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
