"""Registered modules are layers of a DLRM: made, called, checked and refused."""

import re

import pytest
import torch
from own_layers import OWN, Bilinear
from torch import nn

import dlrm
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM

IDS = torch.tensor([[0, 1, 2], [6, 99, 0], [3, 5, 1]])
NUMERICAL = torch.tensor([[0.5, -1.0], [2.0, 0.0], [-3.0, 1.5]])


def build(seed=0, dim=8, dtype=torch.float32, **parts):
    config = DLRMConfig((7, 100, 3), 2, dim, (5, dim), (16, 1), **{**OWN, **parts})
    return DLRM(config, seed=seed, dtype=dtype)


@dlrm.register_interaction("total")
class Total(nn.Module):
    """The sum of a sample's vectors."""

    def __init__(self, num_vectors, dim):
        super().__init__()
        assert (num_vectors, dim) == (4, 8)

    def forward(self, dense, embeddings):
        return dense + embeddings.sum(1)


def test_a_known_answer():
    model = build(interaction_op="total", numerical_embedding="none", top_mlp="mlp")
    vectors = model.embeddings.weight[IDS + torch.tensor([0, 7, 107])]
    total = model.bottom_mlp(NUMERICAL) + vectors.sum(1)
    expected = model.output(model.top_mlp(total)).squeeze(1)
    assert model.top_mlp[0].in_features == 8
    torch.testing.assert_close(model(NUMERICAL, IDS), expected)


@pytest.mark.parametrize("dim", [1, 8, 19])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"interaction_op": "dot,bilinear", "ensemble": 3, "wide": True},
        {"interaction_op": "bilinear,dcn", "cross_structure": "parallel"},
    ],
    ids=str,
)
def test_gradients_reach_every_weight(dim, parts):
    model = build(dim=dim, **parts)
    own = [name for name, _ in model.named_parameters() if ".own." in name or "top_mlp.0" in name]
    assert len(own) == 1 + 2 + 4
    logits = model(NUMERICAL, IDS)
    logits.square().sum().backward()
    for name, weight in model.named_parameters():
        gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
        assert gradient.isfinite().all(), name
        assert gradient.any() or "cross" in name or "bottom_mlp" in name, name


def test_initial_values_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build(seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator"
    torch.manual_seed(6)
    again, other = build(seed=1).state_dict(), build(seed=2).state_dict()
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(
        other["interact.own.module.linear.weight"], first["interact.own.module.linear.weight"]
    )


def test_half_precision_scores_as_float32():
    expected, found = (
        build(dtype=kind)(NUMERICAL, IDS) for kind in (torch.float32, torch.bfloat16)
    )
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_compiled_parts_score_alike():
    model = build()
    expected = model(NUMERICAL, IDS)
    model.run_parts(lambda part: torch.compile(part, fullgraph=True, backend="eager"))
    torch.testing.assert_close(model(NUMERICAL, IDS), expected)


class Layer(nn.Module):
    """Returns what the test's function makes of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


REGISTER = {
    "interaction_op": dlrm.register_interaction,
    "numerical_embedding": dlrm.register_numerical_embedding,
    "top_mlp": dlrm.register_top_mlp,
}
OTHER_SHAPES = [
    ("interaction_op", lambda dense, _: dense[:1], "expected an output [2, width], got [1, 8]"),
    ("interaction_op", lambda _, rows: rows, "expected an output [samples, width], got [samples,"),
    ("interaction_op", lambda _, rows: rows.sum(), "expected an output [2, width], got []"),
    (
        "interaction_op",
        lambda dense, rows: dense @ rows,
        "Layer fails for inputs [2, 8], [2, 5, 8]",
    ),
    (
        "interaction_op",
        lambda dense, _: dense.long(),
        "expected a tensor of floating-point",
    ),
    ("interaction_op", lambda *rows: rows, "expected a tensor of floating-point numbers, got t"),
    ("numerical_embedding", lambda x: x, "expected an output [samples, 2, 8], got [samples, 2]"),
    (
        "top_mlp",
        lambda rows: rows.unsqueeze(1),
        "expected an output [samples, width], got [samples",
    ),
]


@pytest.mark.parametrize(("setting", "function", "message"), OTHER_SHAPES)
def test_another_output_is_refused_when_the_model_is_made(setting, function, message):
    REGISTER[setting]("wrong")(lambda *_: Layer(function))
    with pytest.raises(ValueError, match=f"^{setting} wrong: {re.escape(message)}"):
        build(**{setting: "wrong"})


def test_a_shape_that_varies_is_refused_at_its_batch():
    dlrm.register_top_mlp("squeezed")(lambda *_: Layer(lambda rows: rows.squeeze()))
    model = build(top_mlp="squeezed")
    model(NUMERICAL, IDS)
    width = model.interact.width
    message = rf"top_mlp squeezed: expected an output \[1, {width}\], got \[{width}\] from Layer"
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(NUMERICAL[:1], IDS[:1])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda *_: 3, "top_mlp wrong: expected a torch.nn.Module, got int"),
        (lambda inputs: nn.ReLU(), "top_mlp wrong: cannot be made with (88, (16,)): "),
        (
            lambda n, _: nn.Linear(n, 2).double(),
            "top_mlp wrong: expected float32 weights, got torc",
        ),
    ],
)
def test_what_is_no_layer_is_refused(made, message):
    dlrm.register_top_mlp("wrong")(made)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(numerical_embedding="none", interaction_op="dot,cat", top_mlp="wrong", dim=16)


@pytest.mark.parametrize(("setting", "register"), REGISTER.items())
def test_an_unregistered_layer_is_refused_with_the_line_that_registers_it(setting, register):
    hint = f'registers it with @dlrm.{register.__name__}("absent")'
    with pytest.raises(ValueError, match=f"^--{setting} absent: .*{re.escape(hint)}$"):
        build(**{setting: "absent"})


@pytest.mark.parametrize("name", ["cat", "two words", "a,b", "", "forward"])
def test_names_that_a_setting_cannot_take_are_refused(name):
    with pytest.raises(ValueError, match=f"^interaction_op {name!r}: expected an identifier"):
        dlrm.register_interaction(name)


def test_settings_of_layers_that_are_replaced_are_refused():
    for parts, flag in (
        ({"dropout": 0.5}, "--dropout 0.5"),
        ({"batch_norm": True}, "--batch_norm"),
    ):
        with pytest.raises(ValueError, match=f"^{flag} is for --top_mlp mlp, got residual"):
            build(**parts)


def test_a_later_registration_replaces_an_earlier_one_and_returns_the_class():
    def make(columns):
        return lambda *_: Layer(lambda dense, _: dense[:, :columns])

    dlrm.register_interaction("again")(make(2))
    assert build(interaction_op="again").interact.width == 2
    dlrm.register_interaction("again")(make(3))
    assert build(interaction_op="again").interact.width == 3
    assert dlrm.register_interaction("bilinear")(Bilinear) is Bilinear


def test_the_call_that_tells_the_shape_changes_no_statistics():
    dlrm.register_top_mlp("normalized")(lambda inputs, _: nn.BatchNorm1d(inputs))
    norm = build(top_mlp="normalized").top_mlp[0].module
    assert (norm.running_var == 1).all()
    assert norm.training


def test_a_decorator_without_a_name_is_refused():
    with pytest.raises(ValueError, match="^interaction_op: expected a name in parentheses before"):
        dlrm.register_interaction(torch.nn.Module)


def test_a_module_that_is_not_initialized_is_refused():
    @dlrm.register_top_mlp("wrong")
    class Wrong(torch.nn.Module):
        def __init__(self, num_inputs, sizes):
            pass

    with pytest.raises(ValueError, match=r"^top_mlp wrong: expected .* super\(\).__init__\(\)$"):
        build(top_mlp="wrong")
