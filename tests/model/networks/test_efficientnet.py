import filled_networks
import pytest
import torch

from dlrm.vision.config import NetworkConfig

pytestmark = pytest.mark.long


def network(model="efficientnet_b0", **options):
    return NetworkConfig(model, **options).build()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return filled_networks.images(pixels=32, dtype=torch.float32)


def test_stages_have_the_names_of_the_sources_pipeline_cuts():
    with torch.device("meta"):
        names = list(network("efficientnet_b4").stages())
    assert {"block2b", "block2c", "block4b", "block4c", "block6a", "block6c"} <= set(names)
    assert names[:4] == ["block0", "block1a/b", "block1a/c", "block1b"]
    assert names[-2:] == ["block7b", "Top"]
    position = names.index("block6a")
    assert names[position : position + 4] == ["block6a", "block6a/b", "block6a/c", "block6b"]


def test_dropout_and_drop_path_act_in_training_alone(images):
    built = network(num_classes=5, dropout=0.5, drop_path=0.5, norm="group")
    assert not torch.equal(built(images), built(images))
    built.eval()
    assert torch.equal(built(images), built(images))
    still = network(num_classes=5, dropout=0.0, drop_path=0.0, norm="group")
    assert torch.equal(still(images), built(images))


def test_drop_path_leaves_blocks_out_and_keeps_the_mean():
    built = network(drop_path=0.4, norm="group")
    block = built.stages()["block6d"]  # the last residual block: index 14 of 0 to 15
    assert block.drop_path.drop == pytest.approx(0.4 * 14 / 15)
    torch.manual_seed(1)
    branch = block.drop_path(torch.ones(4000, 1, 1, 1))
    left_out = branch == 0
    assert left_out.float().mean().item() == pytest.approx(block.drop_path.drop, abs=0.03)
    expected = torch.full_like(branch[~left_out], 1 / (1 - block.drop_path.drop))
    torch.testing.assert_close(branch[~left_out], expected)


@pytest.mark.parametrize(
    ("width", "stem", "outputs", "head"),
    [
        (0.25, 8, [8, 8, 16, 24, 32, 48, 80], 320),  # 28 and 4 round up; so does 10, as 8 < 9
        (1.4, 48, [24, 32, 56, 112, 160, 272, 448], 1792),  # the sizes of B4
    ],
)
def test_width_scales_all_channels(width, stem, outputs, head):
    with torch.device("meta"):
        built = network(width=width)
    assert built.conv_stem.out_channels == stem
    last = [getattr(blocks[-1], "conv_pwl", None) or blocks[-1].conv_pw for blocks in built.blocks]
    assert [layer.out_channels for layer in last] == outputs
    assert (built.conv_head.out_channels, built.classifier.in_features) == (head, head)


def test_groups_that_divide_no_width_are_named():
    with pytest.raises(ValueError, match="--groups: expected a divisor of 24 channels, got 16"):
        network(norm="group", groups=16)
