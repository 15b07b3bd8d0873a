"""Row optimizers against torch's own, and the static loss scale."""

import dataclasses
import importlib
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm import ops
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.mlp import MLP
from dlrm.train.config import PrecisionConfig
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS, table_optimizer
from dlrm.train.precision import LossScaler, loss_scaler

SIZES = (5, 30)


@pytest.fixture
def native():
    if not ops.native_available():
        pytest.skip("without the native ops torch rounds a bfloat16 weight's gradient")


def embedding(device: str = "cpu", **changes) -> torch.nn.Module:
    config = DLRMConfig(SIZES, 1, 4, bottom_mlp_sizes=(4,), top_mlp_sizes=(1,), **changes)
    return DLRM(config, World(device=device)).embeddings


def scaler_of(device: str, scale: float | None) -> LossScaler:
    return LossScaler(None if scale is None else torch.tensor(scale, device=device))


def train(module, optimizer, scaler=None, steps=6, dtype=torch.float32):
    """Steps with repeated ids and a changing learning rate."""
    random = torch.Generator().manual_seed(1)
    scaler = scaler or LossScaler()
    for step in range(steps):
        set_learning_rate([optimizer], 0.1 * (step + 1))
        ids = torch.stack([torch.randint(n, (16,), generator=random) for n in SIZES], dim=1)
        ids = ids.to(module.weight.device)
        scaler.backward((module(ids, dtype).float() ** 2).sum())
        scaler.step([optimizer])
        optimizer.zero_grad()
    return module.weight.detach()


TORCHS = {
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "adagrad": partial(torch.optim.Adagrad, lr=0.0),
    "adam": torch.optim.SparseAdam,
}


@pytest.mark.parametrize("kind", TORCHS)
def test_row_optimizers_follow_torchs_own(kind, device):
    native, torchs = embedding(device), embedding(device)
    actual = train(native, table_optimizer(kind, [native.weight]))
    torchs.weight.grad_dtype = torch.float32
    expected = train(torchs, TORCHS[kind]([torchs.weight]))
    # Rates add up to 2.1, and a sum's last bit is amplified where Adam divides by a small moment.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(actual, embedding(device).weight, atol=1e-2)


def test_gradients_of_no_look_up_of_the_tables_are_refused(device, native):
    module = embedding(device)
    sizes = {module.weight: SIZES}
    optimizer = table_optimizer("sgd", [module.weight], table_sizes=sizes)
    grad = torch.sparse_coo_tensor([[1, 2, 3]], torch.ones(3, 4), (35, 4), check_invariants=False)
    module.weight.grad = grad.to(device)
    with pytest.raises(RuntimeError, match="as many rows of each of the 2 tables .* got 3 rows"):
        optimizer.step()


def test_row_wise_adagrad_by_hand(device):
    module = embedding(device)
    before = module.weight.detach().clone()
    optimizer = table_optimizer("row_wise_adagrad", [module.weight])
    set_learning_rate([optimizer], 0.5)
    ids = torch.tensor([[3, 7], [3, 8]], device=device)
    (module(ids, torch.float32) ** 2).sum().backward()
    optimizer.step()
    grad = torch.zeros_like(before)
    for row, times in ((3, 2), (5 + 7, 1), (5 + 8, 1)):
        grad[row] = times * 2 * before[row]
    scale = (grad**2).mean(dim=1, keepdim=True).sqrt() + 1e-10
    torch.testing.assert_close(module.weight.detach(), before - 0.5 * grad / scale)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_bfloat16_tables_are_updated_as_float32_ones(kind, scale, native, device, deterministic):
    narrow, full = embedding(device, embedding_dtype="bf16"), embedding(device)
    assert narrow.weight.dtype == torch.bfloat16
    assert torch.equal(torch.cat(narrow.tables()), full.weight)  # exactly the same initial values
    random = torch.Generator().manual_seed(1)
    scaler = scaler_of(device, scale)
    optimizers = [
        table_optimizer(kind, [module.weight], low=module.lower_halves())
        for module in (narrow, full)
    ]
    set_learning_rate(optimizers, 0.1)
    for _ in range(50):
        ids = torch.stack([torch.randint(n, (16,), generator=random) for n in SIZES], dim=1)
        weights = torch.randn(16, 2, 4, generator=random)  # gradients that rounding cannot change
        ids, weights = ids.to(device), weights.to(device)
        for module, optimizer in zip((narrow, full), optimizers, strict=True):
            scaler.backward((module(ids, torch.float32) * weights).sum())
            scaler.step([optimizer])
            optimizer.zero_grad()
    assert torch.equal(torch.cat(narrow.tables()), full.weight)
    assert not torch.allclose(full.weight, embedding(device).weight, atol=1e-2)
    for key, state in optimizers[0].state[narrow.weight].items():
        assert torch.equal(state, optimizers[1].state[full.weight][key])


def test_a_bfloat16_weight_without_its_lower_halves_is_refused():
    module = embedding(embedding_dtype="bf16")
    optimizer = table_optimizer("sgd", [module.weight])
    module(torch.tensor([[1, 2]]), torch.float32).sum().backward()
    with pytest.raises(RuntimeError, match="a BFloat16 one with low, got .* without low"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_fused_dense_optimizers_are_torchs(kind, scale, monkeypatch):
    torchs = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind]
    steps_taken = []

    def trained(make):
        weights = [torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(4), torch.ones(2)]
        weights = [weight.requires_grad_() for weight in weights]  # the last has no gradient
        optimizer = make(weights)
        for step in range(3):
            set_learning_rate([optimizer], 0.1 * (step + 1))
            for weight in weights[:2]:
                weight.grad = (scale or 1) * (weight.detach() * 3 + step)
            if scale:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(float(step == 1))
            optimizer.step()
        assert type(optimizer).__name__ == torchs.__name__  # as in checkpoints
        states = [optimizer.state[weight] for weight in weights]
        steps_taken.append([int(state["step"]) for state in states if "step" in state])
        return [*weights, *(state["sum"] for state in states if "sum" in state)]

    expected = trained(lambda weights: torchs(weights, torch.zeros(()), fused=True))
    with monkeypatch.context() as patch:  # torch 2.11 refuses it so on CUDA
        module = importlib.import_module("torch.optim.adagrad")
        patch.delattr(module, "_device_dtype_check_for_fused")
        actual = trained(lambda weights: dense_optimizer(kind, weights))
    assert all(map(torch.equal, actual, expected))
    counted = [2 if scale else 3] * 2 + [0]
    assert steps_taken == [counted if kind == "adagrad" else []] * 2


def launches(function):
    """Returns the operators that a function calls, including those of autograd."""
    called = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.append(op._opname)
            return op(*args, **(kwargs or {}))

    with Count():
        function()
    return called


def test_checks_of_many_tensors_are_one_launch_each():
    """On a GPU each costs the host and the device some microseconds."""
    table, layers = embedding(), MLP(3, (8, 8, 4), 0, "layers", torch.float16)
    optimizers = [
        table_optimizer("sgd", [table.weight]),
        dense_optimizer("sgd", layers.parameters()),
    ]
    scaler = scaler_of("cpu", 8.0)
    loss = table(torch.tensor([[1, 2]]), torch.float16).float().sum()
    loss = loss + layers(torch.ones(1, 3)).float().sum()
    scaler.backward(loss)
    in_step = launches(lambda: scaler.step(optimizers))
    assert in_step.count("_amp_foreach_non_finite_check_and_unscale_") == 2
    assert {"isfinite", "linalg_vector_norm", "stack"}.isdisjoint(in_step)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_loss_scale_changes_nothing(kind, device):
    plain, scaled = embedding(device), embedding(device)
    expected = train(plain, table_optimizer(kind, [plain.weight]))
    optimizer = table_optimizer(kind, [scaled.weight])
    actual = train(scaled, optimizer, scaler_of(device, 1024.0))  # a power of two: exact
    same = 0 if device == "cpu" else 1e-4  # GPUs vary the order of sums
    torch.testing.assert_close(actual, expected, atol=same, rtol=same)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dense_first", [True, False])
def test_one_infinite_gradient_skips_every_parameter(kind, dense_first, device):
    module, dense = embedding(device), torch.nn.Linear(3, 1, device=device)
    ids, ones = torch.tensor([[1, 2]], device=device), torch.ones(1, 3, device=device)
    before = [p.detach().clone() for p in (module.weight, *dense.parameters())]
    optimizers = [
        table_optimizer(kind, [module.weight]),
        dense_optimizer(kind, dense.parameters()),
    ]
    set_learning_rate(optimizers, 0.1)
    loss = module(ids, torch.float32).sum() + dense(ones).sum()
    scaler = scaler_of(device, 1024.0)
    scaler.backward(loss)
    broken = dense.weight.grad if dense_first else module.weight.grad._values()
    broken[0, 0] = float("inf")
    scaler.step(optimizers)
    for parameter, value in zip((module.weight, *dense.parameters()), before, strict=True):
        assert torch.equal(parameter, value)
    assert scaler.report() == "  skipped: 1"
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.backward(module(ids, torch.float32).sum() + dense(ones))
    scaler.step(optimizers)
    assert not torch.equal(module.weight, before[0])
    assert not torch.equal(dense.weight, before[1])


def test_many_large_half_precision_gradients_are_no_overflow(device):
    module = embedding(device)
    before = module.weight.detach().clone()
    optimizer = table_optimizer("sgd", [module.weight])
    set_learning_rate([optimizer], 1.0)
    scaler = scaler_of(device, 1.0)
    ids = torch.zeros(40_000, 2, dtype=torch.long, device=device)
    scaler.backward((module(ids, torch.float16) * 300).sum(dtype=torch.float32))
    scaler.step([optimizer])  # the 2-norm of these gradients is beyond float16, none of them is
    assert not torch.equal(module.weight, before)
    assert scaler.report() == ""


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_half_precision_gradients_are_taken_as_they_are(kind, device):
    half, full = embedding(device), embedding(device)
    optimizer = table_optimizer(kind, [half.weight])
    half(torch.tensor([[1, 2]], device=device), torch.bfloat16).sum().backward()
    assert half.weight.grad._values().dtype == torch.bfloat16
    half.weight.grad = None
    actual = train(half, optimizer, dtype=torch.bfloat16)
    expected = train(full, table_optimizer(kind, [full.weight]))
    torch.testing.assert_close(actual, expected, atol=0.1, rtol=0.1)  # bfloat16 has 8 bits


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_planners_count_the_bytes_of_its_state(kind):
    weight = embedding().weight
    state = table_optimizer(kind, [weight]).state[weight].values()
    counted = TABLE_OPTIMIZERS[kind].state_bytes(*weight.shape)
    assert sum(value.nbytes for value in state if value.ndim) == counted


@pytest.mark.parametrize(
    ("config", "device", "dtype", "scaled"),
    [
        (PrecisionConfig(), "cpu", torch.float32, False),
        (PrecisionConfig(amp=True), "cpu", torch.bfloat16, False),
        (PrecisionConfig(amp=True, amp_dtype="fp16"), "cpu", torch.float16, True),
        (PrecisionConfig(amp=True, amp_dtype="bf16"), "cuda", torch.bfloat16, False),
    ],
)
def test_amp_chooses_the_dtype_and_scales_fp16_only(config, device, dtype, scaled):
    assert config.dtype(device) == dtype
    assert PrecisionConfig(amp=True).dtype("cuda:1") == torch.float16
    if device == "cpu":
        assert (loss_scaler(config, device).scale is not None) == scaled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(embedding_optimizer="lamb"), "--embedding_optimizer lamb"),
        (lambda: OptimizerConfig(mlp_optimizer="row_wise_adagrad"), "--mlp_optimizer"),
        (lambda: PrecisionConfig(amp_dtype="bf16"), "--amp_dtype bf16 needs --amp"),
        (lambda: PrecisionConfig(amp=True, amp_dtype="fp8"), "--amp_dtype fp8"),
        (lambda: PrecisionConfig(loss_scale=0), "--loss_scale 0"),
    ],
)
def test_impossible_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_step_that_fails_is_not_counted(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = table_optimizer("adam", [weight])
    values = torch.ones(1, 3)
    weight.grad = torch.sparse_coo_tensor([[9]], values, (4, 3), check_invariants=False)
    with pytest.raises(RuntimeError, match="expected 0 <= row < 4"):
        optimizer.step()
    assert optimizer.state[weight]["step"] == 0
    rule = dataclasses.replace(optimizer.rule, number=None)
    monkeypatch.setattr(type(optimizer), "rule", rule)
    weight.grad = torch.sparse_coo_tensor([[3]], values, (4, 3))
    state = optimizer.state[weight]
    whole, state["exp_avg"] = state["exp_avg"], state["exp_avg"][:2]
    with pytest.raises(RuntimeError, match=r"exp_avg \[4, 3\].*got \[2, 3\]"):
        optimizer.step()
    assert state["step"] == 0
    state["exp_avg"] = whole
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
