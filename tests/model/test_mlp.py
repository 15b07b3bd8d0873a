import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dlrm.model.layers.mlp import MLP
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.dense import CLICK_OPTIMIZERS, dense_optimizer


def plain(network: MLP, inputs, dtype=torch.float32):
    """Runs the same layers in plain torch, in a dtype."""
    values = inputs.to(dtype)
    for layer in network:
        values = nn.functional.linear(values, layer.weight.to(dtype), layer.bias.to(dtype)).relu()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_give_what_torchs_layers_give(dtype, device):
    network = MLP(13, (64, 32), 0, "mlp", dtype).to(device)
    inputs = torch.randn(300, 13, generator=torch.Generator().manual_seed(0)).to(device)
    tolerance = {} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    output = network(inputs)
    output.float().square().mean().backward()
    assert output.dtype == dtype
    torch.testing.assert_close(output, plain(network, inputs, dtype), **tolerance)
    torch.testing.assert_close(network.exportable()(inputs), plain(network, inputs))
    actual = [parameter.grad for parameter in network.parameters()]
    loss = plain(network, inputs).square().mean()
    expected = torch.autograd.grad(loss, list(network.parameters()))
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        scale = float(other.abs().max())
        torch.testing.assert_close(one / scale, other / scale, **tolerance)


@pytest.mark.parametrize("optimizer", CLICK_OPTIMIZERS)
def test_rounded_weights_follow_every_update(optimizer, device):
    network = MLP(13, (16, 8), 0, "mlp", torch.bfloat16).to(device)
    step = dense_optimizer(optimizer, network.parameters())
    set_learning_rate([step], 0.5)
    inputs = torch.randn(20, 13, device=device)
    for _ in range(3):
        network(inputs).float().sum().backward()
        step.step()
        step.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(network(inputs), plain(network, inputs, torch.bfloat16))


def test_other_modules_and_hooks_run_as_they_are():
    inputs = torch.randn(5, 13)
    changed, pruned, hooked = (MLP(13, (16, 8), 0, "mlp") for _ in range(3))
    first = nn.functional.linear(inputs, changed[0].weight, changed[0].bias)
    changed[0] = nn.Sequential(nn.Linear(13, 16), nn.GELU())
    changed[0][0].load_state_dict(pruned[0].state_dict())
    torch.testing.assert_close(changed(inputs), pruned[1](nn.functional.gelu(first)))
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    pruned[0].weight_orig.data.mul_(2)
    torch.testing.assert_close(pruned(inputs), plain(pruned, inputs))
    seen = []
    hooked[1].register_forward_hook(lambda *_: seen.append("forward"))
    hooked[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    hooked(inputs).sum().backward()
    assert seen == ["forward", "backward"]


def test_torch_func_sees_through():
    network = MLP(13, (16, 8), 0, "mlp")
    parameters, inputs = dict(network.named_parameters()), torch.randn(4, 13)
    assert [*parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]

    def loss(parameters, row):
        return torch.func.functional_call(network, parameters, row[None]).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, inputs)
    network(inputs).square().sum().backward()
    torch.testing.assert_close(each["0.weight"].sum(0), network[0].weight.grad)


def test_two_passes_may_come_before_their_backward_passes():
    network = MLP(13, (16, 8), 0, "mlp", torch.bfloat16)
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
    network = MLP(13, (16, 8), 0, "mlp")
    inputs = torch.randn(20, 13)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), network(inputs))
    traced = torch.jit.trace(network, inputs)
    torch.testing.assert_close(traced(inputs[:7]), network(inputs[:7]))
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert not any(kind.startswith(("dlrm::", "mkldnn::", "prim::PythonOp")) for kind in kinds)
