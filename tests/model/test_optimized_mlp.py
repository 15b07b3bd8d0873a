import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dlrm.model.layers.mlp import MLP, mlp
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import CLICK_OPTIMIZERS, dense_optimizer


def plain(network: MLP, inputs, dtype=torch.float32):
    """Runs the same layers in plain torch."""
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        return nn.Sequential(*network)(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimized_layers_give_what_torchs_layers_give(dtype, device):
    network = mlp(13, (64, 32), 0, "mlp", dtype).to(device)
    inputs = torch.randn(300, 13, generator=torch.Generator().manual_seed(0)).to(device)
    tolerance = {} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    for optimized in (True, False):
        network.optimized = optimized
        network.zero_grad()
        output = network(inputs)
        output.float().square().mean().backward()
        assert output.dtype == dtype
        torch.testing.assert_close(output, plain(network, inputs, dtype), **tolerance)
        actual = [parameter.grad for parameter in network.parameters()]
        expected = torch.autograd.grad(
            plain(network, inputs).square().mean(), list(network.parameters())
        )
        for one, other in zip(actual, expected, strict=True):
            scale = float(other.abs().max())
            torch.testing.assert_close(one / scale, other / scale, **tolerance)


@pytest.mark.parametrize("optimizer", CLICK_OPTIMIZERS)
def test_rounded_weights_follow_every_update(optimizer, device):
    network = mlp(13, (16, 8), 0, "mlp", torch.bfloat16).to(device)
    step = dense_optimizer(optimizer, network.parameters())
    set_learning_rate([step], 0.5)
    inputs = torch.randn(20, 13, device=device)
    for _ in range(3):
        network(inputs).float().sum().backward()
        step.step()
        step.zero_grad()
        with torch.no_grad():
            for _ in range(2):
                expected = plain(network, inputs, torch.bfloat16)
                torch.testing.assert_close(network(inputs), expected)


def test_rounded_weights_follow_what_is_loaded_assigned_or_written():
    network = mlp(13, (16,), 0, "mlp", torch.bfloat16)
    inputs = torch.randn(20, 13)

    def check():
        expected = plain(network, inputs, torch.bfloat16)
        torch.testing.assert_close(network(inputs), expected)

    with torch.no_grad():
        check()
        network[0].weight.data.mul_(3)
        check()
        network.load_state_dict(mlp(13, (16,), 1, "mlp").state_dict())
        check()
        network[0].weight.mul_(2)
        check()
        network[0].bias = nn.Parameter(torch.ones(16))
        check()


def casts(profiler):
    wanted = ("aten::_to_copy", "aten::_foreach_copy_")
    return [event.name for event in profiler.events() if event.name in wanted]


@pytest.fixture
def by_torch(monkeypatch):
    """Multiplies by torch's products, as on a GPU."""
    monkeypatch.setattr(sys.modules["dlrm.ops.mlp"], "_NATIVE_DTYPES", ())


def test_all_weights_are_rounded_by_one_operator(by_torch):
    network = mlp(13, (16, 8, 4), 0, "mlp", torch.bfloat16)
    inputs = torch.randn(20, 13).bfloat16()
    with torch.profiler.profile() as profiler:
        network(inputs)
    assert casts(profiler) == ["aten::_foreach_copy_"]


def test_kept_weights_are_rounded_once_and_let_go(by_torch):
    network = mlp(13, (16,), 0, "mlp", torch.bfloat16)
    inputs = torch.randn(20, 13).bfloat16()
    with torch.no_grad():
        with network.keep_rounded(), torch.profiler.profile() as profiler:
            kept = network(inputs)
        assert casts(profiler) == []
        assert torch.equal(kept, network(inputs))
        network[0].weight.data.mul_(2)  # unseen by torch's version counter
        expected = plain(network, inputs, torch.bfloat16)
        torch.testing.assert_close(network(inputs), expected)


def test_other_modules_and_hooks_run_as_they_are():
    inputs = torch.randn(5, 13)
    changed = mlp(13, (16, 8), 0, "mlp")
    changed[1] = nn.GELU()
    pruned = mlp(13, (16, 8), 0, "mlp")
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    pruned[0].weight_orig.data.mul_(2)
    without_bias = MLP(nn.Linear(13, 4, bias=False), nn.ReLU())
    ended = MLP(nn.Linear(13, 4))
    for network in (changed, pruned, without_bias, ended):
        torch.testing.assert_close(network(inputs), plain(network, inputs))
    seen = []
    hooked = mlp(13, (16, 8), 0, "mlp")
    hooked[2].register_forward_hook(lambda *_: seen.append("forward"))
    hooked[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    hooked(inputs).sum().backward()
    assert seen == ["forward", "backward"]


def test_gradients_have_the_layout_of_their_parameters(device):
    network = mlp(2, (64, 8), 1, "mlp").to(device)
    loss = network(torch.randn(32, 2, device=device)).square().sum()
    for grad, parameter in zip(
        torch.autograd.grad(loss, list(network.parameters())), network.parameters(), strict=True
    ):
        assert grad.stride() == parameter.stride()


def test_torch_func_sees_through():
    network = mlp(13, (16, 8), 0, "mlp")
    parameters, inputs = dict(network.named_parameters()), torch.randn(4, 13)

    def loss(parameters, row):
        return torch.func.functional_call(network, parameters, row[None]).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs)
    network(inputs).square().sum().backward()
    torch.testing.assert_close(each["0.weight"].sum(0), network[0].weight.grad)


def test_somebody_elses_autocast_changes_no_dtype():
    inputs = torch.randn(4, 13)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        network = mlp(13, (16, 8), 0, "mlp", dtype)
        with torch.autocast("cpu", torch.bfloat16):
            output = network(inputs)
        assert output.dtype == dtype
        assert torch.equal(output, network(inputs))


def test_two_passes_may_come_before_their_backward_passes():
    network = mlp(13, (16, 8), 0, "mlp", torch.bfloat16)
    first, second = torch.randn(20, 13), torch.randn(20, 13)
    losses = [network(inputs).float().sum() for inputs in (first, second)]
    sum(losses).backward()
    together = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    for inputs in (first, second):
        network(inputs).float().sum().backward()
    for one, parameter in zip(together, network.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_a_model_compiles_and_is_traced_to_the_same_values():
    network = mlp(13, (16, 8), 0, "mlp")
    inputs = torch.randn(20, 13)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), network(inputs))
    traced = torch.jit.trace(network, inputs)
    torch.testing.assert_close(traced(inputs[:7]), network(inputs[:7]))
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert not any(kind.startswith(("dlrm::", "mkldnn::", "prim::PythonOp")) for kind in kinds)
