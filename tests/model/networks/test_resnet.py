import filled_networks
import pytest
import torch

from dlrm.vision.config import RESNETS, NetworkConfig

pytestmark = pytest.mark.long


def resnet(model="resnet50", seed=0, **options):
    return NetworkConfig(model, **options).build(seed)


def small(**options):
    return resnet(num_classes=5, **options)


@pytest.fixture(scope="module")
def network():
    return small(norm="group").eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return filled_networks.images(pixels=32, dtype=torch.float32)


def test_stages_have_the_names_of_the_sources_pipeline_cuts():
    with torch.device("meta"):
        names = {m: list(resnet(m).stages()) for m in RESNETS}
    assert {"b1/2/relu", "b2/3/relu", "b3/3/relu"} <= set(names["resnet50"])
    assert "b3/3/relu" in names["resnext101_32x4d"]
    assert names["resnet50"][:4] == ["b0", "b1/0", "b1/0/relu", "b1/1"]
    assert names["resnet50"][-3:] == ["b4/2/relu", "reduce_mean", "fc1"]


def test_weights_depend_on_seed_and_name_alone(network):
    weight = "layer2.1.conv2.weight"
    same = resnet(num_classes=3, norm="batch")
    other = small(seed=1)
    assert torch.equal(same.get_parameter(weight), network.get_parameter(weight))
    assert not torch.equal(other.get_parameter(weight), network.get_parameter(weight))
    values = network.get_parameter(weight)
    assert values.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.01)
    assert all(p.isfinite().all() for p in network.state_dict().values())


def test_zero_init_residual_starts_blocks_as_the_identity(images):
    network = small(zero_init_residual=True).eval()
    inputs = torch.randn(2, 256, 8, 8)
    assert torch.equal(network.stages()["b1/1"](inputs), inputs)
    assert not torch.equal(small().eval().stages()["b1/1"](inputs), inputs)


@pytest.mark.parametrize("model", ["resnet50", "resnext101_32x4d"])
def test_depths_are_the_blocks_of_the_four_stages(model):
    with torch.device("meta"):
        names = list(resnet(model, depths=(1, 2, 1, 3)).stages())
    blocks = ["b1/0", "b2/0", "b2/1", "b3/0", "b4/0", "b4/1", "b4/2"]
    assert [name for name in names[1:-2] if not name.endswith("/relu")] == blocks


def test_groups_that_divide_no_width_are_named():
    with pytest.raises(ValueError, match="--groups: expected a divisor of 64 channels, got 5"):
        resnet(norm="group", groups=5)
