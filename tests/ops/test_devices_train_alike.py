"""A GPU trains as the CPU does: with the same seed, losses and final weights agree.

Without a GPU, an emulated one runs the project's kernels (emulated_cuda.py).
"""

from contextlib import nullcontext

import pytest
import torch

from dlrm.data.clicks.batch import Batch
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler

SIZES, BATCH, STEPS = (50, 3, 200), 64, 20


@pytest.fixture(
    params=[
        pytest.param("emulated cuda", marks=pytest.mark.emulated),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def gpu(request):
    """Returns the name of the device and the context in which it computes."""
    if request.param == "emulated cuda":
        return "cpu", request.getfixturevalue("emulator").in_place_of_cpu
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda", nullcontext


def batches(bags):
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step % 2)  # two batches, which can be learned
        shape = (BATCH, len(SIZES))
        lengths = torch.randint(4, shape, generator=random) if bags else None
        limits = torch.tensor(SIZES).expand(shape)
        if bags:
            limits = limits.repeat_interleave(lengths.flatten())
        ids = (torch.rand(limits.shape, generator=random) * limits).int()
        labels = torch.randint(2, (BATCH,), generator=random).float()
        yield Batch(torch.randn(BATCH, 4, generator=random), ids, labels, lengths)


def train(device, optimizer="sgd", bags=False, max_grad_norm=None, **changes):
    """Returns the loss of every step and all final weights."""
    config = DLRMConfig(SIZES, 4, 8, (16, 8), (16, 16, 1), embedding_init_scale=3, **changes)
    task = Recommendation(config, World(device=device), seed=5)
    optimizers = task.optimizers(OptimizerConfig(optimizer, optimizer.removeprefix("row_wise_")))
    set_learning_rate(optimizers, 0.1 if optimizer == "sgd" else 0.01)
    scaler, losses = LossScaler(max_grad_norm=max_grad_norm), []
    for batch in batches(bags):
        loss = task.loss(batch.map(lambda tensor: tensor.to(device)))
        scaler.backward(loss)
        scaler.step(optimizers)
        task.model.zero_grad()
        losses.append(loss.detach())
    weights = dict(task.model.named_parameters())
    weights["embeddings.weight"] = torch.cat(task.model.embeddings.tables())
    found = {"losses": torch.stack(losses), **weights}
    return {name: value.detach().cpu() for name, value in found.items()}


@pytest.mark.parametrize(
    ("optimizer", "bags", "changes"),
    [
        *(("sgd", bags, {}) for bags in (False, True)),
        ("sgd", False, {"interaction_op": "cat", "max_grad_norm": 0.1}),
        *((kind, False, {"embedding_dtype": "bf16"}) for kind in ("sgd", "adagrad")),
        ("adagrad", True, {}),
        ("row_wise_adagrad", False, {}),
        ("adam", True, {}),
    ],
    ids=str,
)
def test_twenty_steps_agree_up_to_rounding(optimizer, bags, changes, gpu):
    device, computing = gpu
    expected = train("cpu", optimizer, bags, **changes)
    with computing():
        actual = train(device, optimizer, bags, **changes)
    assert expected["losses"][-4:].mean() < expected["losses"][:4].mean() - 1e-3
    # A sum of 64 has a relative error up to 64 * 2**-24 = 4e-6; 20 steps of 0.1 sum to 2.
    near = 1e-5
    if device == "cuda" and optimizer != "sgd":
        near = 1e-3  # rounded gradients near 0 take full steps, too
    if device == "cuda" and "embedding_dtype" in changes:
        near = 2e-3  # values near halfway may round to another bfloat16
    torch.testing.assert_close(actual, expected, atol=near, rtol=near)
