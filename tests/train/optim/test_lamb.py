"""LAMB against its formula in float64, and through checkpoints."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, save_checkpoint
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.lamb import LAMB_FLAVOURS
from dlrm.train.optim.network import NetworkOptimizerConfig, network_optimizer
from dlrm.train.precision import LossScaler

STEPS = 20
FLAVOURS = ["nvlamb", "popart"]


def network(dtype=torch.float64, device="cpu") -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).to(dtype)
    nn.init.zeros_(model[2].weight)  # a norm of 0 has the ratio 1
    return model.to(device)


def loss_scaler(device, scale=None, max_grad_norm=None):
    scalar = None if scale is None else torch.tensor(scale, device=device)
    return LossScaler(scalar, max_grad_norm)


def gradients():
    """Norms of 0.3 to 3: some are clipped."""
    random = np.random.default_rng(0)
    for step in range(STEPS):
        yield [
            random.normal(size=tuple(p.shape)) * 0.05 * 2 ** (step % 5)
            for p in network().parameters()
        ]


def train(model, steps, config, scaler, skip=0):
    optimizer = network_optimizer(config, model)
    for step, values in list(enumerate(gradients()))[skip:steps]:
        advance(model, optimizer, scaler, step, values)
    return optimizer


def advance(model, optimizer, scaler, step, values):
    set_learning_rate([optimizer], 0.5 / (step + 1))
    for weight, value in zip(model.parameters(), values, strict=True):
        scale = 1 if scaler.scale is None else scaler.scale.item()
        weight.grad = torch.from_numpy(value).to(weight) * scale
    scaler.step([optimizer])


def formula(flavour, decay, betas=(0.9, 0.999), eps=1e-6, largest=math.inf, clip=None):
    """Section 3 of You et al., 2019, with each implementation's choices, tensor by tensor."""
    weights = [p.detach().numpy().copy() for p in network().parameters()]
    first = [np.zeros_like(w) for w in weights]
    second = [np.zeros_like(w) for w in weights]
    corrected = flavour != "popart"
    if flavour != "popart":
        clip = min(clip or 1.0, 1.0)
    for step, values in enumerate(gradients(), 1):
        lr = np.float64(np.float32(0.5 / step))
        norm = np.sqrt(sum((g * g).sum() for g in values))
        for i, (w, g) in enumerate(zip(weights, values, strict=True)):
            g = g / max(1, norm / clip) if clip else g
            wd = decay if w.ndim == 2 else 0.0
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g * g
            m = first[i] / (1 - betas[0] ** step) if corrected else first[i]
            v = second[i] / (1 - betas[1] ** step) if corrected else second[i]
            u = m / (np.sqrt(v) + eps) + wd * w
            of_w, of_u = min(np.linalg.norm(w), largest), np.linalg.norm(u)
            ratio = of_w / of_u if of_w > 0 and of_u > 0 else 1.0
            w -= lr * u * (ratio if wd or flavour == "popart" else 1.0)
    return weights


def assert_follows(model, expected):
    for actual, values in zip(model.parameters(), expected, strict=True):
        actual = actual.detach().cpu().numpy()
        np.testing.assert_allclose(actual, values, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("scale", [None, 128.0])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_twenty_steps_follow_the_formula(flavour, decay, scale, device):
    model = network(device=device)
    config = NetworkOptimizerConfig("lamb", lamb_flavour=flavour, weight_decay=decay)
    train(model, STEPS, config, loss_scaler(device, scale))
    assert_follows(model, formula(flavour, decay))  # rates are float32


def test_the_papers_flavour_has_nvidias_rule():
    assert LAMB_FLAVOURS["paper"] is LAMB_FLAVOURS["nvlamb"]


def test_options_reach_the_formula(device):
    model = network(device=device)
    options = {"lamb_flavour": "popart", "weight_decay": 0.2, "lamb_max_weight_norm": 0.5}
    config = NetworkOptimizerConfig("lamb", adam_betas=(0.8, 0.95), optimizer_eps=0.01, **options)
    train(model, STEPS, config, LossScaler())
    assert_follows(model, formula("popart", 0.2, (0.8, 0.95), 0.01, 0.5))


@pytest.mark.parametrize("limit", [0.4, 2.0])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_clipping_of_the_trainer_comes_first(flavour, limit, device):
    model = network(device=device)
    config = NetworkOptimizerConfig("lamb", lamb_flavour=flavour, weight_decay=0.1)
    train(model, STEPS, config, loss_scaler(device, 64.0, limit))
    assert_follows(model, formula(flavour, 0.1, clip=limit))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_overflows_leave_no_trace(flavour, device):
    fresh, broken = (network(torch.float32, device) for _ in range(2))
    for model, overflows in ((fresh, ()), (broken, (0, 2))):
        config = NetworkOptimizerConfig("lamb", lamb_flavour=flavour, weight_decay=0.1)
        optimizer = network_optimizer(config, model)
        scaler = loss_scaler(device, 64.0)
        for step, values in enumerate(list(gradients())[:3]):
            if step in overflows:
                bad = [np.full_like(value, np.inf) for value in values]
                advance(model, optimizer, scaler, step, bad)
            advance(model, optimizer, scaler, step, values)
        assert {state["step"].item() for state in optimizer.state.values()} == {3}
    for actual, expected in zip(broken.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_resumed_run_goes_on_bit_for_bit(flavour, tmp_path, device):
    config = NetworkOptimizerConfig("lamb", lamb_flavour=flavour, weight_decay=0.1)
    whole = network(torch.float32, device)
    train(whole, STEPS, config, LossScaler())
    half = network(torch.float32, device)
    optimizer = train(half, 7, config, LossScaler())
    save_checkpoint(tmp_path / "saved", Parameters(half, optimizers=[optimizer]), {}, {})
    resumed = network(torch.float32, device)
    optimizer = network_optimizer(config, resumed)
    load_checkpoint(tmp_path / "saved", Parameters(resumed, optimizers=[optimizer]), resume=True)
    for step, values in list(enumerate(gradients()))[7:]:
        advance(resumed, optimizer, LossScaler(), step, values)
    for actual, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_narrow_weights_have_moments_in_float32(flavour, device):
    narrow, wide = network(torch.bfloat16, device), network(torch.float32, device)
    for model in (narrow, wide):
        config = NetworkOptimizerConfig("lamb", lamb_flavour=flavour, weight_decay=0.1)
        optimizer = train(model, 3, config, LossScaler())
        kinds = {value.dtype for state in optimizer.state.values() for value in state.values()}
        assert kinds == {torch.float32}
    for actual, expected in zip(narrow.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(actual.float(), expected, rtol=0.03, atol=0.03)


def test_a_weight_without_a_gradient_stays_as_it_is():
    model = network(torch.float32)
    optimizer = network_optimizer(NetworkOptimizerConfig("lamb"), model)
    set_learning_rate([optimizer], 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [True] + [False] * (len(before) - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lamb_flavour": "lion"}, "--lamb_flavour lion: expected one of .*nvlamb"),
        ({"lamb_max_weight_norm": 0.0}, "--lamb_max_weight_norm 0.0"),
        ({"adam_betas": (1.0, 0.9)}, "--adam_betas 1.0"),
    ],
)
def test_impossible_choices_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NetworkOptimizerConfig("lamb", **changes)
