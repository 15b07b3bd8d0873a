"""Click-through prediction as the trainer sees it, with batches computed in parts."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrm import ops
from dlrm.data.clicks.batch import Batch, Shard
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.tasks import recommendation
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler

SIZES, BATCH = (50, 7, 200), 13


def batch(hotness: int = 1, size: int = BATCH) -> Batch:
    random = torch.Generator().manual_seed(0)
    numerical = torch.randn(size, 4, generator=random)
    labels = torch.randint(2, (size,), generator=random).float()
    limits = torch.tensor(SIZES).expand(size, -1)
    if hotness == 1:
        ids = (torch.rand(limits.shape, generator=random) * limits).long()
        return Batch(numerical, ids, labels)
    lengths = torch.randint(hotness + 1, limits.shape, generator=random)
    limits = limits.repeat_interleave(lengths.flatten())
    ids = (torch.rand(limits.shape, generator=random) * limits).long()
    return Batch(numerical, ids, labels, lengths)


def task(device: str = "cpu", *, own=None, dim=8, **changes) -> Recommendation:
    config = DLRMConfig(SIZES, 4, dim, bottom_mlp_sizes=(dim,), top_mlp_sizes=(16, 1), **changes)
    return Recommendation(config, World(device=device), **own or {})


@pytest.mark.parametrize("hotness", [1, 5])
@pytest.mark.parametrize("parts", [2, 4, 100])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_accumulation_equals_one_batch(hotness, parts, kind, device):
    whole, cut = task(device), task(device)
    for one, count in ((whole, 1), (cut, parts)):
        optimizers = one.optimizers(OptimizerConfig(kind, kind))
        set_learning_rate(optimizers, 0.01)
        for _ in range(3):
            given = batch(hotness).map(lambda tensor: tensor.to(device))
            pieces = one.split(given, count)
            assert len(pieces) == min(count, BATCH)
            losses = [one.loss(piece) for piece in pieces]
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            one.last_loss = sum(losses).item()
    assert cut.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
    for actual, expected in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def table_sizes(task: Recommendation, one_look_up: bool):
    optimizers = task.optimizers(OptimizerConfig(), one_look_up)
    return optimizers[0].param_groups[0]["table_sizes"]


@pytest.mark.parametrize("max_table_size", [None, 40])
def test_the_row_optimizer_knows_the_tables_of_its_own_process(max_table_size):
    hashed = {"hash_indices": max_table_size is not None, "max_table_size": max_table_size}
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1), **hashed)
    rows = [min(size, max_table_size or size) for size in SIZES]
    assert table_sizes(Recommendation(config), one_look_up=True) == rows
    assert table_sizes(Recommendation(config), one_look_up=False) is None
    for rank in (0, 1):
        part = Recommendation(config, World(rank, 2))
        own = [rows[table] for table in part.model.fields_by_rank[rank]]
        assert table_sizes(part, one_look_up=True) == own
        assert 0 < len(own) < len(rows)


def test_the_loss_of_a_packed_ensemble_is_the_mean_of_its_members_losses():
    packed, given = task(ensemble=3), batch()
    random = torch.Generator().manual_seed(6)
    for weights in (None, torch.rand(BATCH, generator=random)):
        if weights is not None:
            given = given._replace(weights=weights, total_weight=weights.double().sum())
        counted = torch.ones(BATCH) if weights is None else weights
        clicks = torch.stack([given.labels == 0, given.labels == 1], 1).double()
        expected = []
        for logits in packed.predict(given).double().unbind(1):
            scores = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], 1)
            expected.append(-(counted[:, None] * clicks * scores.log()).sum() / counted.sum())
        found = packed.loss(given)
        assert found.item() == pytest.approx(sum(expected).item() / 3, rel=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"ensemble": 3, "interaction_op": "quadratic"}, {"ensemble": "dot,quadratic*2"}]
)
def test_two_passes_learn_their_mean_and_move_toward_it(changes):
    twice, given = task(dropout=0.5, self_ensemble=True, **changes), batch()
    random = torch.Generator().manual_seed(6)
    for weights in (torch.ones(BATCH), torch.rand(BATCH, generator=random)):
        given = given._replace(weights=weights, total_weight=weights.double().sum())
        torch.manual_seed(4)
        logits = twice.predict(given).detach().double().requires_grad_()  # [samples, members, 2]
        assert logits.shape == (BATCH, 3 if changes else 1, 2)
        assert not torch.equal(logits[..., 0], logits[..., 1])
        score, kinds = logits.sigmoid(), (given.labels[:, None].double(), weights[:, None].double())

        def entropy(chances, of, weights=kinds[1]):
            each = -of * chances.log() - (1 - of) * (1 - chances).log()
            return (weights * each).sum() / weights.sum() / chances.shape[1]

        mean = score.mean(2)
        own = entropy(mean, kinds[0])
        total = own + sum(entropy(one, mean.detach()) for one in score.unbind(2))
        (expected,) = torch.autograd.grad(total, logits)
        alone = logits.detach().float().requires_grad_()
        twice.predict = lambda _, logits=alone: logits
        found = twice.loss(given)
        del twice.predict
        assert found.item() == pytest.approx(own.item(), rel=1e-6)  # comparable with the tests'
        torch.testing.assert_close(
            torch.autograd.grad(found, alone)[0].double(), expected, rtol=1e-4, atol=1e-7
        )
    assert twice.model.eval()(given.numerical, given.categorical).shape == (BATCH,)


def test_every_sample_is_in_one_micro_batch():
    given = batch(hotness=3)
    parts = given.split(4)
    assert [len(part.labels) for part in parts] == [3, 3, 3, 4]
    for name in ("numerical", "categorical", "labels", "lengths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(given, name))
    assert {part.global_size for part in parts} == {BATCH}
    assert [p.global_size for part in parts for p in part.split(2)] == [BATCH] * 8


@pytest.mark.parametrize(
    ("tables", "updates", "kernels", "vary"),
    [
        ({}, {}, True, True),
        ({"dim": 128}, {}, True, False),
        ({}, {"embedding_optimizer": "adagrad"}, True, False),
        ({}, {"embedding_optimizer": "adagrad"}, False, True),
        ({"embedding_dtype": "bf16"}, {}, True, False),
        ({}, {"freeze_embeddings": True}, True, False),
    ],
)
def test_rows_gradients_are_added_as_they_come_by_sgd_of_narrow_tables_or_torch_on_cuda(
    tables, updates, kernels, vary, monkeypatch
):
    monkeypatch.setattr(recommendation, "cuda_kernels_available", lambda: kernels)
    trained, config = task(**tables), OptimizerConfig(**updates)
    assert not trained.updates_vary(config)
    trained.world = World(device="cuda")
    assert trained.updates_vary(config) == vary


def test_fractions_are_tested_by_their_loss_alone():
    tested, given = task(own={"has_clicks": False}), batch()
    targets = torch.rand(BATCH, generator=torch.Generator().manual_seed(1))
    loader = Loader([BATCH])
    loader.batches = lambda epoch=0, start=0: (b for b in [given._replace(labels=targets)])
    found = tested.evaluate(loader)
    chances = torch.sigmoid(tested.infer(given).double()).numpy()
    wanted = targets.double().numpy()
    expected = -wanted * np.log(chances) - (1 - wanted) * np.log(1 - chances)
    assert found == {"log_loss": pytest.approx(expected.mean(), rel=1e-6)}
    assert tested.loss(given._replace(labels=targets)).item() == pytest.approx(
        found["log_loss"], rel=1e-6
    )
    assert (tested.metric, task().metric) == ("log_loss", "auc")


class Loader:
    """Batches of the given sizes; a rank takes its own rows."""

    def __init__(self, sizes, shard=None, hotness=1):
        self.sizes, self.shard, self.num_samples = sizes, shard or Shard(), sum(sizes)
        self.hotness = hotness

    def __len__(self):
        return len(self.sizes)

    def batches(self, epoch=0, start=0):
        for size in self.sizes:
            yield self.shard.take(batch(self.hotness, size))


def test_a_model_is_tested_in_evaluation_mode_and_trains_on():
    tested, modes = task(), []
    tested.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    for training in (True, False):
        tested.model.train(training)
        tested.evaluate(Loader([5, 4]))
        assert tested.model.training is training
    assert modes == [False] * 4
    tested.model.train()

    class Broken(Loader):
        def batches(self, epoch=0, start=0):
            yield batch()
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        tested.evaluate(Broken([5]))
    assert tested.model.training


def ruin(logits, rows):
    logits[list(rows)] = torch.tensor(list(rows.values()))
    return logits


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_the_first_row_without_a_finite_score_is_kept(score, monkeypatch):
    tested = task()
    assert not math.isnan(tested.evaluate(Loader([5, 4, 6]))["log_loss"])
    assert tested.unscored is None
    whole, changes = tested.infer, iter([{}, {3: score, 1: -score}, {0: 7.0, 2: score}])
    monkeypatch.setattr(tested, "infer", lambda given: ruin(whole(given), next(changes)))
    metrics = tested.evaluate(Loader([5, 4, 6]))
    assert all(map(math.isnan, metrics.values()))
    row, found = tested.unscored
    assert (row, str(found)) == (6, str(-score))


def _unscored(world, bad_rank):
    tested = Recommendation(
        DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1)), world
    )
    shard = Shard(world, tuple(tested.model.fields_by_rank[world.rank]))
    whole, calls = tested.infer, itertools.count()

    def infer(given):
        logits = whole(given)
        return ruin(logits, {1: float("inf")} if next(calls) and world.rank == bad_rank else {})

    tested.infer = infer
    metrics = tested.evaluate(Loader([10, 8], shard))
    return tested.unscored, math.isnan(metrics["auc"])


@pytest.mark.parametrize(("bad_rank", "row"), [(0, 11), (1, 15), (None, None)])
def test_every_rank_knows_of_anothers_row(ranks, bad_rank, row):
    found = ranks(2).call(_unscored, [(bad_rank,)] * 2)
    expected = (None, False) if row is None else ((row, float("inf")), True)
    assert found == [expected] * 2


ONE_CALL = [
    {},
    {"wide": True},
    {"numerical_embedding": "piecewise"},
    {"hash_indices": True, "max_table_size": 5},
    {"own": {"dtype": torch.bfloat16}, "embedding_dtype": "bf16"},
]


def in_one_call(subject):
    return subject.model.native_parameters(batch().numerical) is not None


def gradients(subject, of_batches, hotness):
    """Returns loss and gradients of micro-batches by the trainer's way or by autograd."""
    pieces = subject.split(batch(hotness), of_batches)
    loss = subject.accumulate(pieces, LossScaler(), lambda: None)
    grads = {}
    for name, weight in subject.model.named_parameters():
        grad = weight.grad
        grads[name] = grad.to_dense() if grad is not None and grad.is_sparse else grad
    return loss, grads


@pytest.mark.parametrize("hotness", [1, 5])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("changes", ONE_CALL)
def test_gradients_in_one_call_are_those_of_autograd(changes, parts, hotness):
    ours, autograd = task(**changes), task(**changes)
    for subject in (ours, autograd):
        if ops.native_available():  # which is not the choice for bfloat16 where there is AMX
            subject.model.products = "native"
        if subject.model.wide is not None:  # zeros, which would hide a term that is left out
            subject.model.wide.weight.data.fill_(0.25)
    assert in_one_call(ours) == ops.native_available()
    name, frozen = next(iter(ours.model.top_mlp.named_parameters()))
    frozen.requires_grad = False
    autograd.model.top_mlp.get_parameter(name).requires_grad = False
    hooked = autograd.model.output.weight
    hooked.register_hook(lambda grad: None)  # autograd alone calls hooks
    assert not in_one_call(autograd)
    loss, found = gradients(ours, parts, hotness)
    expected_loss, expected = gradients(autograd, parts, hotness)
    exact = ours.model.dtype == torch.float32
    close = {"atol": 1e-6, "rtol": 1e-4} if exact else {"atol": 5e-3, "rtol": 0.05}
    torch.testing.assert_close(loss, expected_loss, **close)
    assert found.keys() == expected.keys()
    assert found["top_mlp.0.weight"] is None
    for name, grad in found.items():
        if name != "top_mlp.0.weight":
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, expected[name], **close)


@pytest.mark.parametrize("of", ["weight", "forward", "backward", "replaced"])
@pytest.mark.parametrize("tables", ["embeddings", "wide"])
def test_hooks_of_tables_are_called(tables, of):
    subject, plain = task(wide=True), task(wide=True)
    hooked, called = getattr(subject.model, tables), []
    vectors = hooked.forward
    if of == "weight":
        hooked.weight.register_hook(lambda grad: called.append(1))
    elif of == "forward":
        hooked.register_forward_hook(lambda *given: called.append(1))
    elif of == "backward":
        hooked.register_full_backward_hook(lambda *given: called.append(1))
    else:
        hooked.forward = lambda *given, **named: [called.append(1), vectors(*given, **named)][1]
    loss, found = gradients(subject, 1, 1)
    assert len(called) == 1
    expected_loss, expected = gradients(plain, 1, 1)
    torch.testing.assert_close(loss, expected_loss)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("by_autograd", [False, True])
def test_micro_batches_of_one_table_and_numerical_vectors_train_in_bfloat16(by_autograd):
    parts = {"numerical_embedding": "piecewise", "bottom_mlp_sizes": (8,), "top_mlp_sizes": (16, 1)}
    subject = Recommendation(DLRMConfig((50,), 4, 8, **parts), dtype=torch.bfloat16)
    subject.optimizers(OptimizerConfig())  # the gradients of rows stay in half precision
    if by_autograd:
        subject.model.output.weight.register_hook(lambda grad: None)
    given = batch()
    given = given._replace(categorical=given.categorical[:, :1])
    subject.accumulate(subject.split(given, 3), LossScaler(), lambda: None)
    grad = subject.model.embeddings.weight.grad
    assert grad._values().shape == (BATCH, 8)
    assert grad.dtype == torch.bfloat16


def test_frozen_tables_have_no_gradient():
    subject = task(wide=True)
    subject.model.embeddings.weight.requires_grad = False
    _, found = gradients(subject, 2, 1)
    assert found.pop("embeddings.weight") is None
    assert all(grad is not None for grad in found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"interaction_op": "dcn"},
        {"interaction_op": "dot"},
        {"interaction_op": "quadratic"},
        {"dropout": 0.5, "self_ensemble": True},
        {"ensemble": 2},
        {"ensemble": "dot*2"},
        {"dropout": 0.5},
        {"batch_norm": True},
        {"top_mlp_sizes": (1,)},
        {"own": {"optimized_mlp": False}},
        {"own": {"dtype": torch.float16}},
    ],
)
def test_other_networks_train_by_autograd(changes):
    top = changes.pop("top_mlp_sizes", (16, 1))
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=top)
    own = changes.pop("own", {})
    subject = Recommendation(replace(config, **changes), World(), **own)
    assert not in_one_call(subject)
    loss = subject.accumulate([batch()], LossScaler(), lambda: None)
    assert loss.isfinite()
    assert all(weight.grad is not None for weight in subject.model.parameters())


@pytest.mark.parametrize("of", ["", "bottom_mlp", "interact", "top_mlp", "output", "top_mlp.0"])
def test_hooks_of_modules_are_called(of):
    subject, called = task(), []
    module = subject.model.get_submodule(of)
    module.register_forward_hook(lambda *_: called.append("forward"))
    assert not in_one_call(subject)
    with torch.no_grad():
        subject.predict(batch())
    module.register_full_backward_hook(lambda *_: called.append("backward"))
    subject.accumulate([batch()], LossScaler(), lambda: None)
    assert called == ["forward", "forward", "backward"]


def test_a_half_precision_scale_reaches_the_gradients():
    subject, scaler = task(), LossScaler(torch.tensor(8.0))
    subject.accumulate([batch()], LossScaler(), lambda: None)
    plain = [weight.grad.clone() for weight in subject.model.bottom_mlp.parameters()]
    subject.model.zero_grad()
    subject.accumulate([batch()], scaler, lambda: None)
    scaled = [weight.grad for weight in subject.model.bottom_mlp.parameters()]
    torch.testing.assert_close(scaled, [8 * grad for grad in plain])


def test_overridden_losses_are_those_trained():
    class Weighted(Recommendation):
        def loss(self, batch):
            return super().loss(batch) * 100

    class Constant(Recommendation):
        def predict(self, batch):
            return super().predict(batch) * 0 + 3.0

    for kind, patched in ((Weighted, False), (Constant, False), (Recommendation, True)):
        subject = kind(task().model.config)
        if patched:
            forward = subject.model.forward
            subject.model.forward = lambda *inputs, f=forward, **rest: f(*inputs, **rest) * 0 + 3.0
        loss = subject.accumulate([batch()], LossScaler(), lambda: None)
        assert loss == subject.loss(batch())


@pytest.mark.parametrize("dtypes", [("half", "float"), ("float", "half"), ("double", "double")])
@pytest.mark.parametrize("autocast", [False, True])
def test_mlps_of_other_dtypes_run(dtypes, autocast):
    subject = task()
    getattr(subject.model.bottom_mlp, dtypes[0])()
    getattr(subject.model.top_mlp, dtypes[1])()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = subject.predict(batch())
        with torch.no_grad():
            alone = subject.predict(batch())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(alone, task().predict(batch()), atol=2e-3, rtol=2e-3)
    assert torch.equal(logits, alone)


def test_training_without_a_graph_is_refused():
    frozen = task()
    frozen.model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        frozen.accumulate([batch()], LossScaler(), lambda: None)
    subject = task()
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        subject.accumulate([batch()], LossScaler(), lambda: None)
    assert all(weight.grad is None for weight in subject.model.parameters())


def test_inputs_have_a_gradient_if_they_need_one():
    given, subject = batch(), task()
    given.numerical.requires_grad_()
    subject.accumulate([given], LossScaler(), lambda: None)
    assert given.numerical.grad.abs().max() > 0


def test_gradients_are_added_in_place():
    subject = task()
    subject.accumulate([batch()], LossScaler(), lambda: None)
    weight = subject.model.bottom_mlp[0].weight
    grad, before = weight.grad, weight.grad.clone()
    subject.accumulate([batch()], LossScaler(), lambda: None)
    assert weight.grad is grad
    assert torch.equal(grad, 2 * before)
