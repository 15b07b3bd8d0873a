"""Our image networks against torchvision's and timm's with the same weights."""

import filled_networks
import pytest
import torch
from filled_networks import CLASSES
from torch import nn

pytestmark = pytest.mark.long


def torchvision_network(name: str, torchvision, norm=None) -> nn.Module:
    return getattr(torchvision.models, name)(num_classes=CLASSES, norm_layer=norm)


def assert_equal_logits_and_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Compares both in training, then the logits in evaluation with updated statistics."""
    images = filled_networks.images()
    weights = filled_networks.images(2, 8).flatten()[: 2 * CLASSES].view(2, CLASSES)
    gradients = []
    for network in (ours, theirs):
        (network(images) * weights).sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        scale = gradients[1][name].abs().max().clamp(min=1e-6)
        torch.testing.assert_close(gradient / scale, gradients[1][name] / scale, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize("name", ["resnet50", "resnet50 group", "resnext101_32x4d"])
def test_resnets_equal_torchvisions(name, torchvision):
    ours = filled_networks.build(name)
    if name == "resnext101_32x4d":  # torchvision has 32x8d and 64x4d
        theirs = torchvision.models.ResNet(
            torchvision.models.resnet.Bottleneck,
            [3, 4, 23, 3],
            num_classes=CLASSES,
            groups=32,
            width_per_group=4,
        )
    else:
        group_norm = (lambda channels: nn.GroupNorm(32, channels)) if "group" in name else None
        theirs = torchvision_network(name.split()[0], torchvision, group_norm)
    theirs.double().load_state_dict(ours.state_dict())
    assert_equal_logits_and_gradients(ours, theirs.train())


@pytest.mark.parametrize(
    "name", ["resnet50", "resnext101_32x4d", "efficientnet_b0", "efficientnet_b4"]
)
def test_networks_equal_timms(name, timm):
    ours = filled_networks.build(name)
    theirs = timm.create_model(name, num_classes=CLASSES, drop_rate=0.0, drop_path_rate=0.0)
    theirs.double().load_state_dict(ours.state_dict())
    assert_equal_logits_and_gradients(ours, theirs.train())
