import copy

import filled_networks
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlrm.model.networks.efficientnet import EfficientNet

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def network() -> EfficientNet:
    return EfficientNet(num_classes=5, norm="group").eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return filled_networks.images(pixels=32, dtype=torch.float32)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("model", "group_dim", "expand_ratio", "parameters", "gigamacs"),
    [
        ("efficientnet_b0", 1, 6, 5_288_548, 0.386),
        ("efficientnet_b0", 16, 4, 5_913_796, 0.635),
        ("efficientnet_b4", 1, 6, 19_341_616, 4.394),
        ("efficientnet_b4", 16, 4, 19_328_168, 6.183),
        ("efficientnet_b4", 16, 6, 27_678_424, 8.943),
        ("efficientnet_b4", 1, 4, 13_766_480, 3.013),
    ],
)
def test_parameters_and_multiply_adds_are_the_published_ones(
    model, group_dim, expand_ratio, parameters, gigamacs, norm
):
    pixels = 224 if model == "efficientnet_b0" else 380
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = EfficientNet(model, norm=norm, group_dim=group_dim, expand_ratio=expand_ratio)
        assert network(torch.empty(1, 3, pixels, pixels)).shape == (1, 1000)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert counter.get_total_flops() / 2e9 == pytest.approx(gigamacs, abs=5e-4)


@pytest.mark.parametrize("name", ["efficientnet_b0", "efficientnet_b4", "efficientnet_b4 group"])
def test_golden_logits(name, device):
    network = filled_networks.build(name, torch.float32).to(device)
    logits = network(filled_networks.images(dtype=torch.float32).to(device))[1]
    # From float64; batch norm over few values amplifies float32 rounding to 1.3e-3.
    assert logits.tolist() == pytest.approx(filled_networks.GOLDEN[name][2], abs=5e-3)


def test_stages_have_the_names_of_the_sources_pipeline_cuts():
    with torch.device("meta"):
        names = list(EfficientNet("efficientnet_b4").stages())
    assert {"block2b", "block2c", "block4b", "block4c", "block6a", "block6c"} <= set(names)
    assert names[:4] == ["block0", "block1a/b", "block1a/c", "block1b"]
    assert names[-2:] == ["block7b", "Top"]
    position = names.index("block6a")
    assert names[position : position + 4] == ["block6a", "block6a/b", "block6a/c", "block6b"]


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
    with torch.no_grad():
        for parameter in twin.stages()["block2a/b"].parameters():
            parameter.zero_()
    assert not torch.equal(twin(images), network(images))
    assert network.blocks[1][0].conv_dw.weight.any()


def test_dropout_and_drop_path_act_in_training_alone(images):
    network = EfficientNet(num_classes=5, dropout=0.5, drop_path=0.5, norm="group")
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
    still = EfficientNet(num_classes=5, dropout=0.0, drop_path=0.0, norm="group")
    assert torch.equal(still(images), network(images))


def test_drop_path_leaves_blocks_out_and_keeps_the_mean():
    network = EfficientNet(drop_path=0.4, norm="group")
    block = network.stages()["block6d"]  # the last residual block: index 14 of 0 to 15
    assert block.drop_path.drop == pytest.approx(0.4 * 14 / 15)
    torch.manual_seed(1)
    branch = block.drop_path(torch.ones(4000, 1, 1, 1))
    left_out = branch == 0
    assert left_out.float().mean().item() == pytest.approx(block.drop_path.drop, abs=0.03)
    expected = torch.full_like(branch[~left_out], 1 / (1 - block.drop_path.drop))
    torch.testing.assert_close(branch[~left_out], expected)


def test_traced_and_compiled_give_the_same(network, images):
    traced = torch.jit.trace(network, images, check_trace=False)
    torch.testing.assert_close(traced(images), network(images))
    captured = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(captured(images), network(images))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("width", "stem", "outputs", "head"),
    [
        (0.25, 8, [8, 8, 16, 24, 32, 48, 80], 320),  # 28 and 4 round up; so does 10, as 8 < 9
        (1.4, 48, [24, 32, 56, 112, 160, 272, 448], 1792),  # the sizes of B4
    ],
)
def test_width_scales_all_channels(width, stem, outputs, head):
    with torch.device("meta"):
        network = EfficientNet("efficientnet_b0", width=width)
    assert network.conv_stem.out_channels == stem
    last = [
        getattr(blocks[-1], "conv_pwl", None) or blocks[-1].conv_pw for blocks in network.blocks
    ]
    assert [layer.out_channels for layer in last] == outputs
    assert (network.conv_head.out_channels, network.classifier.in_features) == (head, head)


def test_impossible_values_are_named():
    with pytest.raises(ValueError, match="--width: expected a number above 0, got 0"):
        EfficientNet(width=0)
    with pytest.raises(ValueError, match="--model: expected one of efficientnet_b0.*'b7'"):
        EfficientNet("b7")
    with pytest.raises(ValueError, match="--group_dim: expected 1 or more, got 0"):
        EfficientNet(group_dim=0)
    with pytest.raises(ValueError, match=r"--dropout: expected a probability in \[0, 1\), got 1"):
        EfficientNet(dropout=1)
    with pytest.raises(ValueError, match="--groups: expected a divisor of 24 channels, got 16"):
        EfficientNet(norm="group", groups=16)
