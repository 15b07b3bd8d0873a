"""Optimizers of networks without tables, against their formulas in float64 and torch's own."""

import numpy as np
import pytest
import torch
from torch import nn

from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.network import NetworkOptimizerConfig, network_optimizer
from dlrm.train.precision import LossScaler, PrecisionConfig

STEPS = 20


def network(dtype=torch.float64, device="cpu") -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1)).to(device, dtype)


def gradients():
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        yield [random.normal(size=tuple(p.shape)) for p in network().parameters()]


def loss_scaler(device, scale=None, max_grad_norm=None):
    scalar = None if scale is None else torch.tensor(scale, device=device)
    return LossScaler(scalar, max_grad_norm)


def trajectory(device, scale=None, **changes):
    """The weights after `STEPS` steps with given gradients and falling rates."""
    model = network(device=device)
    optimizer = network_optimizer(NetworkOptimizerConfig(**changes), model)
    scaler = loss_scaler(device, scale)
    for step, values in enumerate(gradients()):
        set_learning_rate([optimizer], 0.1 / (step + 1))
        for weight, value in zip(model.parameters(), values, strict=True):
            weight.grad = torch.from_numpy(value).to(device) * (scale or 1)
        scaler.step([optimizer])
    return [p.detach().cpu().numpy() for p in model.parameters()]


def formula(kind, decay, decay_all=False, mu=0.9, rho=0.9, eps=None, betas=(0.9, 0.999)):
    weights = [p.detach().numpy().copy() for p in network().parameters()]
    first = [np.zeros_like(w) for w in weights]
    square = [np.full_like(w, kind == "rmsprop_tf") for w in weights]
    for step, values in enumerate(gradients()):
        lr = np.float64(np.float32(0.1 / (step + 1)))
        for i, (w, g) in enumerate(zip(weights, values, strict=True)):
            wd = decay if decay_all or w.ndim > 1 else 0.0
            if kind == "adamw":
                w -= lr * wd * w
            else:
                g = g + wd * w
            if kind in ("adam", "adamw"):
                first[i] = betas[0] * first[i] + (1 - betas[0]) * g
                square[i] = betas[1] * square[i] + (1 - betas[1]) * g * g
                m = first[i] / (1 - betas[0] ** (step + 1))
                v = square[i] / (1 - betas[1] ** (step + 1))
                w -= lr * m / (np.sqrt(v) + (eps or 1e-8))
            elif kind == "rmsprop_tf":
                square[i] = rho * square[i] + (1 - rho) * g * g
                first[i] = mu * first[i] + lr * g / np.sqrt(square[i] + (eps or 1e-3))
                w -= first[i]
            else:
                first[i] = (0 if kind == "sgd" else mu) * first[i] + g
                w -= lr * (g + mu * first[i] if kind == "nesterov" else first[i])
    return weights


@pytest.mark.parametrize("scale", [None, 128.0])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw"])
@pytest.mark.parametrize("decay_all", [False, True])
def test_twenty_steps_follow_the_formula(kind, scale, decay_all, device):
    config = {"optimizer": kind, "weight_decay": 0.1, "decay_norm_and_bias": decay_all}
    actual = trajectory(device, scale, **config)
    for a, e in zip(actual, formula(kind, 0.1, decay_all), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6)  # rates are float32


def test_options_reach_the_formula(device):
    config = {"momentum": 0.5, "rmsprop_decay": 0.7, "optimizer_eps": 0.2}
    actual = trajectory(device, optimizer="rmsprop_tf", **config)
    for a, e in zip(actual, formula("rmsprop_tf", 0, mu=0.5, rho=0.7, eps=0.2), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw"])
def test_an_overflow_in_the_first_step_leaves_no_trace(kind, device):
    fresh = network(torch.float32, device)
    broken = network(torch.float32, device)
    for model, overflows in ((fresh, 0), (broken, 2)):
        optimizer = network_optimizer(NetworkOptimizerConfig(kind, weight_decay=0.1), model)
        set_learning_rate([optimizer], 0.1)
        scaler = loss_scaler(device, 1024.0)
        for step in range(overflows + 2):
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, 2048.0)
            if step < overflows:
                weight.grad[-1] = float("nan")
            scaler.step([optimizer])
    for actual, expected in zip(broken.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("kind", ["momentum", "rmsprop_tf", "adamw"])
def test_clipping_by_norm_equals_torchs(kind, scale, device):
    ours, theirs = (network(torch.float32, device) for _ in range(2))
    for model, clipped in ((ours, True), (theirs, False)):
        optimizer = network_optimizer(NetworkOptimizerConfig(kind), model)
        set_learning_rate([optimizer], 0.1)
        factor = scale if clipped and scale else 1.0
        limit = 0.5 if clipped else None
        scaler = loss_scaler(device, factor if factor > 1 else None, limit)
        for step, values in enumerate(gradients()):
            for weight, value in zip(model.parameters(), values, strict=True):
                size = 0.01 if step % 2 else 1.0  # every other norm is under the limit
                weight.grad = torch.from_numpy(value).float().to(device) * factor * size
            if not clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step([optimizer])
    for actual, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_half_precision_weights_are_kept_but_for_norms():
    model = network(torch.float32)
    precision = PrecisionConfig(precision="16.16", half_dtype="bf16")
    precision.cast_weights(model, "cpu")
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {n for n, dtype in kinds.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
    optimizer = network_optimizer(NetworkOptimizerConfig("rmsprop_tf"), model)
    set_learning_rate([optimizer], 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with precision.autocast("cpu"):
        loss = model(torch.randn(4, 5)).float().square().mean()
    precision.scaler("cpu").backward(loss)
    precision.scaler("cpu").step([optimizer])
    assert not any(map(torch.equal, model.parameters(), before))
    assert {name: p.dtype for name, p in model.named_parameters()} == kinds


@pytest.mark.parametrize(
    ("precision", "half", "device", "dtype"),
    [
        ("fp32", None, "cuda", torch.float32),
        ("32.32", None, "cpu", torch.float32),
        ("bf16", None, "cuda", torch.bfloat16),
        ("fp16", None, "cpu", torch.float16),
        ("16.32", None, "cpu", torch.bfloat16),
        ("16.32", None, "cuda:0", torch.float16),
        ("16.16", "fp16", "cpu", torch.float16),
        ("16.16", "bf16", "cuda", torch.bfloat16),
    ],
)
def test_every_precision_has_its_dtype(precision, half, device, dtype):
    assert PrecisionConfig(precision=precision, half_dtype=half).dtype(device) == dtype


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkOptimizerConfig("lion"), "--optimizer lion"),
        (lambda: NetworkOptimizerConfig(momentum=1.0), "--momentum 1.0"),
        (lambda: NetworkOptimizerConfig(weight_decay=-1), "--weight_decay -1"),
        (lambda: NetworkOptimizerConfig(optimizer_eps=0.0), "--optimizer_eps 0.0"),
        (lambda: NetworkOptimizerConfig(adam_betas=(0.9, 1.0)), "--adam_betas 1.0"),
        (lambda: PrecisionConfig(precision="fp8"), "--precision fp8"),
        (lambda: PrecisionConfig(precision="bf16", amp=True), "contradicts --amp"),
        (lambda: PrecisionConfig(precision="bf16", half_dtype="fp16"), "--half_dtype fp16 needs"),
        (lambda: LossScaler(max_grad_norm=0.0), "--max_grad_norm 0.0"),
    ],
)
def test_impossible_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_moments_of_16_bits_are_kept_in_32_or_refused():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = network_optimizer(NetworkOptimizerConfig("rmsprop_tf", rmsprop_decay=0.999), model)
    set_learning_rate([optimizer], 0.0)
    for _ in range(10):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert optimizer.state[model.weight]["square"].item() == pytest.approx(0.999**10, rel=1e-6)
    for kind in ("adam", "adamw"):
        with pytest.raises(ValueError, match=f"--optimizer {kind} .* 16.16"):
            network_optimizer(NetworkOptimizerConfig(kind), model)
