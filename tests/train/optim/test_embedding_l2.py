"""Coupled L2 of tables against torch's dense optimizers with `weight_decay`."""

import dataclasses

import pytest
import torch

from dlrm import ops
from dlrm.train.optim.base import finish_updates, set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import CLICK_OPTIMIZERS, dense_optimizer
from dlrm.train.optim.row_optimizers import TABLE_OPTIMIZERS, table_optimizer
from dlrm.train.precision import LossScaler

ROWS, DIM, STEPS = 60, 5, 90
RATES = (0.1, 0.03, 0.0, 0.2)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Dense Adagrad on each row's mean squared gradient, with `weight_decay`."""

    def __init__(self, weights, lr, weight_decay):
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for weight in group["params"]:
            state = self.state[weight]
            grad = weight.grad + group["weight_decay"] * weight
            state["sum"] = state.get("sum", 0) + (grad * grad).mean(dim=1)
            weight -= (group["lr"] / (state["sum"].sqrt() + 1e-10)).unsqueeze(1) * grad


DENSE = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}


def batches():
    """Yields rows and gradients; few rows are in most batches, many in few or none."""
    random = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        among = ROWS - 10 if step % 30 == 0 else 8
        rows = torch.randint(among, (6,), generator=random)
        yield rows, torch.randn(6, DIM, generator=random)


def sparse(rows, grad, device="cpu"):
    gradient = torch.sparse_coo_tensor(rows[None], grad, (ROWS, DIM), check_invariants=False)
    return gradient.to(device)


def initial():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


def trained(
    kind, l2, look_up=lambda rows, step: rows, skipped=(), low=None, finish=(), device="cpu"
):
    """Returns the final weight and state, and the rows at each look-up."""
    weight = torch.nn.Parameter((initial() if low is None else low[0].clone()).to(device))
    lows = None if low is None else {weight: low[1]}
    optimizer = table_optimizer(kind, [weight], low=lows, l2=l2)
    scaler, looked_up = LossScaler(torch.tensor(8.0, device=device)), []
    for step, (rows, grad) in enumerate(batches()):
        set_learning_rate([optimizer], RATES[step % len(RATES)])
        optimizer.catch_up(look_up(rows, step).to(device))
        looked_up.append(weight.detach()[rows.to(device)].clone())
        scaled = grad * 8 * (float("inf") if step in skipped else 1)
        weight.grad = sparse(rows, scaled, device)
        scaler.step([optimizer])
        if step in finish:
            finish_updates([optimizer])
    finish_updates([optimizer])
    return weight.detach(), optimizer.state[weight], looked_up


def dense(kind, l2, dtype, skipped=()):
    weight = torch.nn.Parameter(initial().to(dtype))
    optimizer, looked_up = DENSE[kind]([weight], lr=0.0, weight_decay=l2), []
    for step, (rows, grad) in enumerate(batches()):
        set_learning_rate([optimizer], RATES[step % len(RATES)])
        looked_up.append(weight.detach()[rows].clone())
        weight.grad = sparse(rows, grad).to_dense().to(dtype)
        if step not in skipped:
            optimizer.step()
    return weight.detach(), optimizer.state[weight], looked_up


def assert_same(actual, expected):
    weight, state, looked_up = actual
    dense_weight, dense_state, dense_looked_up = expected
    # row_adam_ subtracts a float32 beta2 from 1, which is 1.7e-5 off.
    close = {"rtol": 1e-4, "atol": 3e-5, "check_dtype": False, "check_device": False}
    torch.testing.assert_close(looked_up, dense_looked_up, **close)
    torch.testing.assert_close(weight, dense_weight, **close)
    for name, value in state.items():
        torch.testing.assert_close(value, dense_state[name], **close)


@pytest.mark.parametrize("l2", [1e-3, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_rows_are_those_of_a_dense_optimizer(kind, dtype, l2, device):
    assert_same(trained(kind, l2, device=device), dense(kind, l2, dtype))


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_they_are_without_native_ops(kind, monkeypatch):
    optimizer = TABLE_OPTIMIZERS[kind]
    monkeypatch.setattr(optimizer, "rule", dataclasses.replace(optimizer.rule, number=None))
    assert_same(trained(kind, 0.1), dense(kind, 0.1, torch.float64))


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_steps_skipped_for_an_overflow_are_no_steps(kind):
    skipped = (0, 7, 30, 31)
    assert_same(trained(kind, 0.1, skipped=skipped), dense(kind, 0.1, torch.float64, skipped))


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
@pytest.mark.parametrize(
    "other",
    [
        {"look_up": lambda rows, step: torch.arange(ROWS)},
        {"look_up": lambda rows, step: torch.cat([rows, torch.tensor([step % ROWS])])},
        {"finish": (3, 4, 50)},
    ],
    ids=["dense", "more rows", "finished"],
)
def test_when_rows_catch_up_changes_no_bit(kind, other):
    weight, state, looked_up = trained(kind, 0.1)
    same_weight, same_state, same_looked_up = trained(kind, 0.1, **other)
    assert torch.equal(weight, same_weight)
    assert all(torch.equal(state[name], same_state[name]) for name in state)
    assert all(map(torch.equal, looked_up, same_looked_up))


@pytest.mark.parametrize("kind", ["sgd", "row_wise_adagrad"])
def test_when_rows_catch_up_changes_roundings(kind):
    torch.testing.assert_close(
        trained(kind, 0.1, finish=range(STEPS))[0], trained(kind, 0.1)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_a_split_weight_has_the_bits_of_a_float32_one(kind):
    if not ops.native_available():
        pytest.skip("without the native ops torch rounds a bfloat16 weight's gradient")
    low = ops.split_float32(initial())
    high, state, _ = trained(kind, 0.1, low=low)
    expected, expected_state, _ = trained(kind, 0.1)
    assert torch.equal(ops.join_float32(high, low[1]), expected)
    assert all(torch.equal(state[name], expected_state[name]) for name in state)


@pytest.mark.parametrize("kind", sorted(TABLE_OPTIMIZERS))
def test_looked_up_rows_alone_decay_where_it_is_asked_for(kind):
    """Adding the squares of looked-up rows, each once, to the loss has the same gradient."""
    weights = [torch.nn.Parameter(initial()) for _ in range(2)]
    ours = table_optimizer(kind, weights[:1], l2=0.1, l2_mode="looked_up")
    plain = table_optimizer(kind, weights[1:])
    for rows, grad in batches():
        set_learning_rate([ours, plain], 0.1)
        ours.catch_up(rows)
        weights[0].grad = sparse(rows, grad)
        once = rows.unique()
        with_term = torch.cat([grad, 0.1 * weights[1].detach()[once]])
        weights[1].grad = sparse(torch.cat([rows, once]), with_term)
        ours.step()
        plain.step()
    ours.catch_up()
    torch.testing.assert_close(*weights)
    never = torch.ones(ROWS, dtype=torch.bool)
    for rows, _ in batches():
        never[rows] = False
    assert never.any()
    assert torch.equal(weights[0][never], initial()[never])


def test_without_a_gradient_a_step_decays_all_rows():
    weight = torch.nn.Parameter(torch.full((3, 2), 8.0))
    optimizer = table_optimizer("sgd", [weight], l2=0.5)
    set_learning_rate([optimizer], 1.0)
    optimizer.step()
    optimizer.step()
    optimizer.catch_up()
    assert weight.tolist() == [[2.0, 2.0]] * 3


@pytest.mark.parametrize("kind", sorted(CLICK_OPTIMIZERS))
def test_matrices_decay_as_torchs_and_biases_do_not(kind):
    torchs = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    ours, theirs = (
        [torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(), torch.ones(4).requires_grad_()]
        for _ in range(2)
    )
    optimizers = [
        dense_optimizer(kind, ours, weight_decay=0.1),
        torchs[kind](theirs[:1], lr=0.0, weight_decay=0.1),
        torchs[kind](theirs[1:], lr=0.0),
    ]
    for step in range(5):
        set_learning_rate(optimizers, 0.1 * (step + 1))
        for weight in (*ours, *theirs):
            weight.grad = torch.full_like(weight, 0.3 - 0.1 * step)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(embedding_l2=-1), "--embedding_l2 -1: expected 0 or more"),
        (lambda: OptimizerConfig(embedding_l2=float("nan")), "--embedding_l2 nan: expected 0"),
        (lambda: OptimizerConfig(weight_decay=float("inf")), "--weight_decay inf: expected 0"),
        (lambda: OptimizerConfig(embedding_l2_mode="some"), "--embedding_l2_mode some: expected"),
        (
            lambda: OptimizerConfig(embedding_l2=0.1, freeze_embeddings=True),
            "--embedding_l2 0.1 contradicts --freeze_embeddings",
        ),
        (
            lambda: OptimizerConfig(weight_decay=0.1, freeze_mlps=True),
            "--weight_decay 0.1 contradicts --freeze_mlps",
        ),
    ],
)
def test_impossible_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_product_that_turns_signs_is_refused():
    weight = torch.nn.Parameter(initial())
    optimizer = table_optimizer("sgd", [weight], l2=0.1)
    set_learning_rate([optimizer], 10.0)
    with pytest.raises(ValueError, match="--embedding_l2 0.1: times the learning rate of sgd, 10"):
        optimizer.step()
