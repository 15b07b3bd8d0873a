"""Published sizes, golden logits, stages and graphs, as all image networks have them."""

import copy

import filled_networks
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm.vision.config import EFFICIENTNETS, NetworkConfig

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["resnet50", "efficientnet_b0"])
def network(request):
    return NetworkConfig(request.param, num_classes=5, norm="group").build().eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return filled_networks.images(pixels=32, dtype=torch.float32)


B0, B4 = EFFICIENTNETS
PUBLISHED = [  # model, options, pixels, parameters, 10^9 multiply-adds
    ("resnet50", {}, 224, 25_557_032, 4.089),
    ("resnext101_32x4d", {}, 224, 44_177_704, 7.970),
    (B0, {"group_dim": 1, "expand_ratio": 6}, 224, 5_288_548, 0.386),
    (B0, {"group_dim": 16, "expand_ratio": 4}, 224, 5_913_796, 0.635),
    (B4, {"group_dim": 1, "expand_ratio": 6}, 380, 19_341_616, 4.394),
    (B4, {"group_dim": 16, "expand_ratio": 4}, 380, 19_328_168, 6.183),
    (B4, {"group_dim": 16, "expand_ratio": 6}, 380, 27_678_424, 8.943),
    (B4, {"group_dim": 1, "expand_ratio": 4}, 380, 13_766_480, 3.013),
]


@pytest.mark.parametrize(("model", "options", "pixels", "parameters", "gigamacs"), PUBLISHED)
def test_parameters_and_multiply_adds_are_the_published_ones(
    model, options, pixels, parameters, gigamacs
):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = NetworkConfig(model, **options).build()
        assert network(torch.empty(1, 3, pixels, pixels)).shape == (1, 1000)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert counter.get_total_flops() / 2e9 == pytest.approx(gigamacs, abs=5e-4)


@pytest.mark.parametrize("name", filled_networks.GOLDEN)
def test_golden_logits(name, device):
    network = filled_networks.build(name, torch.float32).to(device)
    logits = network(filled_networks.images(dtype=torch.float32).to(device))[1]
    # From float64; batch norm over few values amplifies float32 rounding to 1.3e-3.
    assert logits.tolist() == pytest.approx(filled_networks.GOLDEN[name][1], abs=5e-3)


def test_stages_one_after_the_other_are_the_forward_pass(network, images):
    out = images
    for stage in network.stages().values():
        out = stage(out)
    assert torch.equal(out, network(images))
    stages = list(network.stages().values())
    assert len({id(stage) for stage in stages}) == len(stages)
    assert all(a is b for a, b in zip(stages, network.stages().values(), strict=True))
    held = [id(p) for stage in stages for p in stage.parameters()]
    assert sorted(held) == sorted(id(p) for p in network.parameters())


def test_a_copy_has_stages_of_its_own(network, images):
    twin = copy.deepcopy(network)
    (name, *_) = (name for name in ("block2a/b", "b0") if name in twin.stages())
    before = [p.clone() for p in network.stages()[name].parameters()]
    with torch.no_grad():
        for parameter in twin.stages()[name].parameters():
            parameter.zero_()
    assert not torch.equal(twin(images), network(images))
    assert all(map(torch.equal, before, network.stages()[name].parameters()))


def test_a_compiled_network_gives_the_same(network, images):
    captured = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(captured(images), network(images))
    torch._dynamo.reset()
