"""Recomputation leaves the loss unchanged, and a partition is the network."""

import pytest
import torch
from torch import nn

from dlrm.train.config import ExecutionConfig
from dlrm.train.execution import partition, recompute


class Network(nn.Module):
    """Convolutions with batch norm and dropout, as named stages."""

    def __init__(self, device="cpu"):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleDict(
            {
                f"block{i}": nn.Sequential(
                    nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1),
                    nn.BatchNorm2d(8),
                    nn.ReLU(),
                    nn.Dropout(0.1),
                )
                for i in range(4)
            }
        )
        self.blocks["top"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        self.to(device)

    def stages(self):
        return dict(self.blocks)

    def forward(self, x):
        for stage in self.stages().values():
            x = stage(x)
        return x


def losses(model, forward, steps=4, size=3):
    """Trains; returns the losses, the last in evaluation mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    torch.manual_seed(5)
    result = []
    for _ in range(steps):
        images = torch.randn(size, 3, 8, 8, generator=random).to(device)
        loss = forward(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    model.eval()
    with torch.no_grad():
        result.append(forward(images).square().mean().item())
    model.train()
    return result


def same(device):
    """Allows for cuDNN's unordered sums of weight gradients."""
    return 1e-6 if device == "cpu" else 1e-4


def test_recomputation_changes_neither_losses_nor_statistics(device):
    plain, cheap = Network(device), Network(device)
    recompute(cheap.stages())
    tolerance = 0 if device == "cpu" else same(device)
    expected = losses(plain, plain)
    assert losses(cheap, cheap) == pytest.approx(expected, rel=tolerance, abs=0)
    buffers = (dict(model.named_buffers()) for model in (cheap, plain))
    torch.testing.assert_close(*buffers, atol=tolerance, rtol=tolerance)


def test_recomputation_keeps_less_for_the_backward_pass():
    def kept(model):
        """Bytes saved by autograd: each storage once, weights excluded."""
        held = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(2, 3, 32, 32))
        return sum(held.values())

    plain, cheap = Network(), Network()
    recompute(cheap.stages())
    assert 0 < kept(cheap) < kept(plain) / 2


def test_the_parts_of_a_partition_are_the_network():
    model = Network().eval()
    parts = partition(model.stages(), ["block2", "top"])
    assert [list(part) for part in parts] == [["block0", "block1"], ["block2", "block3"], ["top"]]
    images = out = torch.randn(2, 3, 8, 8)
    for part in parts:
        for stage in part.values():
            out = stage(out)
    assert torch.equal(out, model(images))


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (["block9"], "block9: no such stage; expected of block0, block1"),
        (["block2", "block1"], "in the order of the stages"),
        (["block1", "block1"], "each name once"),
        (["block0"], "not the first, block0"),
    ],
)
def test_wrong_cuts_are_named(splits, message):
    with pytest.raises(ValueError, match=message):
        partition(Network().stages(), splits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execution": "lazy"}, "--execution lazy"),
        ({"execution": "graph", "recompute": True}, "--recompute contradicts"),
    ],
)
def test_impossible_executions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ExecutionConfig(**changes)
