"""FTRL-Proximal of the wide term."""

import math

import numpy as np
import pytest
import torch

from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.serving.network.exportable import exportable
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.rows.inputs import Inputs
from dlrm.tasks.recommendation import Recommendation, check_wide
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.row_optimizers import wide_optimizer

SIZES = (5, 30)
OPTIONS = {"ftrl_alpha": 0.3, "ftrl_beta": 0.05, "ftrl_l1": 0.02, "ftrl_l2": 0.1}
FTRL = OptimizerConfig(wide_optimizer="ftrl", **OPTIONS)


def of_paper(gradients):
    """Returns the weight after gradients of one coordinate (algorithm 1 of McMahan et al.)."""
    alpha, beta, l1, l2 = OPTIONS.values()
    weight = z = n = 0.0
    for gradient in gradients:
        sigma = (math.sqrt(n + gradient**2) - math.sqrt(n)) / alpha
        z += gradient - sigma * weight
        n += gradient**2
        if abs(z) <= l1:
            weight = 0.0
        else:
            weight = -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
    return weight


def test_rows_follow_the_paper_in_float64_and_schedules_do_not_matter():
    weight = torch.nn.Parameter(torch.zeros(40, 1))
    optimizer = wide_optimizer(FTRL, [weight])
    random, seen = torch.Generator().manual_seed(1), {row: [] for row in range(40)}
    for step in range(60):
        set_learning_rate([optimizer], 0.5 * step)  # as schedules do
        rows = (torch.rand(9, generator=random) ** 3 * 38).long()  # few rows often, some never
        grad = torch.randn(9, 1, generator=random) * 0.05
        weight.grad = torch.sparse_coo_tensor(rows[None], grad, (40, 1), check_invariants=False)
        optimizer.step()
        for row in rows.unique().tolist():
            seen[row].append(grad[rows == row].double().sum().item())
    expected = torch.tensor([[of_paper(seen[row])] for row in range(40)])
    torch.testing.assert_close(weight.detach(), expected)
    updated = torch.tensor([bool(seen[row]) for row in range(40)])
    assert 0 < int((weight[updated] == 0).sum()) < int(updated.sum())  # of touched rows, some
    assert torch.equal(weight == 0, expected == 0)


def task(**parts):
    config = DLRMConfig(SIZES, 1, 4, bottom_mlp_sizes=(4,), top_mlp_sizes=(4, 1), **parts)
    return Recommendation(config, seed=1)


def trained(task, optimizers, steps=20):
    made, random = task.optimizers(optimizers), torch.Generator().manual_seed(0)
    set_learning_rate(made, 0.05)
    for _ in range(steps):
        ids = torch.stack([torch.randint(n, (32,), generator=random) for n in SIZES], dim=1)
        labels = (ids[:, 0] == 2).float()
        task.loss(Batch(torch.rand(32, 1, generator=random), ids, labels)).backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return made


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_zeros_stay_zeros_in_the_exported_model(precision):
    subject = task(wide=True)
    optimizers = OptimizerConfig("adam", "adam", wide_optimizer="ftrl", ftrl_l1=0.15)
    kinds = [type(one).__name__ for one in trained(subject, optimizers)]
    assert kinds == ["RowAdam", "RowFTRL", "Adam"]
    (weight,) = (weight for weight, _ in subject.model.wide.table_parameters())
    zeros = weight.detach() == 0
    assert 20 < int(zeros.sum()) < 35  # only ids that tell labels apart have weights
    assert not zeros[2]
    inputs = Inputs(np.zeros((2, 1), np.float32), np.zeros((2, 2), np.int64))
    exported = exportable(subject.model, quantize_tables(subject.model, precision), inputs)
    served = exported.wide(torch.arange(35)[None]).flatten()
    assert torch.equal(served == 0, zeros.flatten())


def test_the_tables_and_the_rest_train_as_without_it():
    plain, other = task(wide=True), task(wide=True)
    trained(plain, OptimizerConfig("adagrad", "adam"), steps=1)
    trained(other, OptimizerConfig("adagrad", "adam", wide_optimizer="ftrl"), steps=1)
    assert torch.equal(plain.model.embeddings.weight, other.model.embeddings.weight)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]) != name.startswith("wide")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(wide_optimizer="adam"), "--wide_optimizer adam: expected"),
        (lambda: OptimizerConfig(ftrl_l1=0.1), "--ftrl_l1 0.1 is for --wide_optimizer ftrl"),
        (
            lambda: OptimizerConfig(wide_optimizer="ftrl", ftrl_alpha=0),
            "--ftrl_alpha 0: expected a number above 0",
        ),
        (
            lambda: OptimizerConfig(wide_optimizer="ftrl", freeze_embeddings=True),
            "--wide_optimizer ftrl contradicts --freeze_embeddings",
        ),
        (
            lambda: check_wide(DLRMConfig(SIZES), "ftrl"),
            "--wide_optimizer ftrl needs --wide, whose weights it updates",
        ),
        (
            lambda: check_wide(DLRMConfig(SIZES, wide=True, embedding_type="joint_sparse"), "ftrl"),
            "--wide_optimizer ftrl needs --embedding_type joint_fused, got joint_sparse",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
