import pytest
import torch

_schemas = torch.library.Library("torchvision", "DEF")


@pytest.fixture(scope="session")
def torchvision():
    """Imports torchvision; its networks need no operators, which are missing with CPU torch."""
    _declare_operators()
    return pytest.importorskip("torchvision", reason="no torchvision (extra peers)")


@pytest.fixture(scope="session")
def timm(torchvision):
    return pytest.importorskip("timm", reason="no timm (extra peers)")


@pytest.fixture(scope="session")
def transformers():
    """Imports transformers, whose BERT imports torchvision if installed."""
    _declare_operators()
    return pytest.importorskip("transformers", reason="no transformers (extra peers)")


def _declare_operators() -> None:
    """Declares the operators without which torchvision fails to import."""
    if not hasattr(torch.ops.torchvision, "nms"):
        _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
