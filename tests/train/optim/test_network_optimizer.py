"""Optimizers of networks without tables, against their formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.optim.dense import network_optimizer
from dlrm.train.precision import LossScaler

STEPS = 20
FLAVORS = ["nvlamb", "popart"]
KINDS = ["sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw", *FLAVORS]


def config_of(kind, **options) -> NetworkOptimizerConfig:
    named = {"optimizer": "lamb", "lamb_flavor": kind} if kind in FLAVORS else {"optimizer": kind}
    return NetworkOptimizerConfig(**named, **options)


def network(dtype=torch.float64, device="cpu") -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2)).to(dtype)
    nn.init.zeros_(model[2].weight)  # a norm of 0 has the ratio 1 of LAMB
    return model.to(device)


def gradients():
    """Norms of 0.3 to 6: some are clipped."""
    random = np.random.default_rng(0)
    for step in range(STEPS):
        yield [
            random.normal(size=tuple(p.shape)) * 0.05 * 2 ** (step % 5)
            for p in network().parameters()
        ]


def scaler_of(device, scale=None, max_grad_norm=None):
    scalar = None if scale is None else torch.tensor(scale, device=device)
    return LossScaler(scalar, max_grad_norm)


def advance(model, optimizer, scaler, step, values):
    set_learning_rate([optimizer], 0.2 / (step + 1))
    for weight, value in zip(model.parameters(), values, strict=True):
        scale = 1 if scaler.scale is None else scaler.scale.item()
        weight.grad = torch.from_numpy(value).to(weight) * scale
    scaler.step([optimizer])


def train(model, config, scaler, steps=STEPS):
    """Takes steps with given gradients and falling rates; returns the optimizer."""
    optimizer = network_optimizer(config, model)
    for step, values in list(enumerate(gradients()))[:steps]:
        advance(model, optimizer, scaler, step, values)
    return optimizer


def formula(
    kind,
    decay,
    decay_all=False,
    clip=None,
    mu=0.9,
    rho=0.9,
    eps=None,
    betas=(0.9, 0.999),
):
    """Returns the weights after `STEPS` steps, tensor by tensor.

    LAMB is section 3 of You et al., 2019, with each implementation's choices.
    """
    weights = [p.detach().numpy().copy() for p in network().parameters()]
    first = [np.zeros_like(w) for w in weights]
    square = [np.full_like(w, kind == "rmsprop_tf") for w in weights]
    if kind == "nvlamb":
        clip = min(clip or 1.0, 1.0)
    for step, values in enumerate(gradients(), 1):
        lr = np.float64(np.float32(0.2 / step))
        norm = np.sqrt(sum((g * g).sum() for g in values))
        for i, (w, g) in enumerate(zip(weights, values, strict=True)):
            g = g / max(1, norm / clip) if clip else g
            wd = decay if decay_all or w.ndim > 1 else 0.0
            if kind == "adamw":
                w -= lr * wd * w
            elif kind not in FLAVORS:
                g = g + wd * w
            if kind in ("adam", "adamw", *FLAVORS):
                first[i] = betas[0] * first[i] + (1 - betas[0]) * g
                square[i] = betas[1] * square[i] + (1 - betas[1]) * g * g
                corrected = kind != "popart"
                m = first[i] / (1 - betas[0] ** step) if corrected else first[i]
                v = square[i] / (1 - betas[1] ** step) if corrected else square[i]
                u = m / (np.sqrt(v) + (eps or (1e-6 if kind in FLAVORS else 1e-8)))
                ratio = 1.0
                if kind in FLAVORS:
                    u += wd * w
                    of_w, of_u = np.linalg.norm(w), np.linalg.norm(u)
                    if of_w > 0 and of_u > 0 and (wd or kind == "popart"):
                        ratio = of_w / of_u
                w -= lr * u * ratio
            elif kind == "rmsprop_tf":
                square[i] = rho * square[i] + (1 - rho) * g * g
                first[i] = mu * first[i] + lr * g / np.sqrt(square[i] + (eps or 1e-3))
                w -= first[i]
            else:
                first[i] = (0 if kind == "sgd" else mu) * first[i] + g
                w -= lr * (g + mu * first[i] if kind == "nesterov" else first[i])
    return weights


def assert_follows(model, expected):
    for actual, values in zip(model.parameters(), expected, strict=True):
        actual = actual.detach().cpu().numpy()
        np.testing.assert_allclose(actual, values, rtol=3e-6, atol=3e-6)  # rates are float32


def assert_equal(model, other):
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("scale", [None, 128.0])
@pytest.mark.parametrize(("decay", "decay_all"), [(0.0, False), (0.1, False), (0.3, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_follow_the_formula(kind, decay, decay_all, scale, device):
    model = network(device=device)
    config = config_of(kind, weight_decay=decay, decay_norm_and_bias=decay_all)
    train(model, config, scaler_of(device, scale))
    assert_follows(model, formula(kind, decay, decay_all))


@pytest.mark.parametrize(
    ("kind", "flags", "options"),
    [
        (
            "rmsprop_tf",
            {"momentum": 0.5, "rmsprop_decay": 0.7, "optimizer_eps": 0.2},
            {"mu": 0.5, "rho": 0.7, "eps": 0.2},
        ),
        ("popart", {"optimizer_eps": 0.01}, {"eps": 0.01}),
    ],
)
def test_options_reach_the_formula(kind, flags, options, device):
    model = network(device=device)
    train(model, config_of(kind, weight_decay=0.2, **flags), LossScaler())
    assert_follows(model, formula(kind, 0.2, **options))


@pytest.mark.parametrize(("limit", "scale"), [(0.4, 64.0), (2.0, None)])
@pytest.mark.parametrize("kind", ["momentum", "rmsprop_tf", "adamw", *FLAVORS])
def test_clipping_by_norm_comes_first(kind, limit, scale, device):
    model = network(device=device)
    train(model, config_of(kind, weight_decay=0.1), scaler_of(device, scale, limit))
    assert_follows(model, formula(kind, 0.1, clip=limit))


@pytest.mark.parametrize("kind", KINDS)
def test_overflows_leave_no_trace(kind, device):
    fresh, broken = (network(torch.float32, device) for _ in range(2))
    for model, overflows in ((fresh, {}), (broken, {0: np.inf, 2: np.nan})):
        optimizer = network_optimizer(config_of(kind, weight_decay=0.1), model)
        scaler = scaler_of(device, 64.0)
        for step, values in enumerate(list(gradients())[:3]):
            if step in overflows:
                bad = [value.copy() for value in values]
                bad[-1][-1] = overflows[step]  # one of all
                advance(model, optimizer, scaler, step, bad)
            advance(model, optimizer, scaler, step, values)
        states = optimizer.state.values()
        assert {state["step"].item() for state in states if "step" in state} <= {3}
    assert_equal(broken, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_without_a_gradient_stays_as_it_is(kind):
    model = network(torch.float32)
    optimizer = network_optimizer(config_of(kind, weight_decay=0.1), model)
    set_learning_rate([optimizer], 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    changed = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [True] + [False] * (len(before) - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkOptimizerConfig("lion"), "--optimizer lion"),
        (lambda: NetworkOptimizerConfig(momentum=1.0), "--momentum 1.0"),
        (lambda: NetworkOptimizerConfig(weight_decay=-1), "--weight_decay -1"),
        (lambda: NetworkOptimizerConfig(optimizer_eps=0.0), "--optimizer_eps 0.0"),
        (
            lambda: NetworkOptimizerConfig("lamb", lamb_flavor="lion"),
            "--lamb_flavor lion: expected one of .*nvlamb",
        ),
    ],
)
def test_impossible_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("scale", "limit"), [(None, 0.5), (1024.0, None), (1024.0, 0.5)])
def test_optimizers_of_a_program_are_clipped_and_scaled(scale, limit):
    weight, other = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    weight.grad, other.grad = torch.tensor([3.0, -4.0]) * (scale or 1), torch.tensor([3.0, -4.0])
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([other], limit)
    scaler = LossScaler(None if scale is None else torch.tensor(scale), limit)
    scaler.step([torch.optim.SGD([weight], 0.1)])
    torch.optim.SGD([other], 0.1).step()
    torch.testing.assert_close(weight, other)
