import pytest
import torch

_schemas = torch.library.Library("torchvision", "DEF")


@pytest.fixture(scope="session")
def torchvision():
    """torchvision, whose networks run without its operators, which the CPU wheel of torch lacks."""
    _declare_operators()
    return pytest.importorskip("torchvision", reason="no torchvision (extra peers)")


@pytest.fixture(scope="session")
def timm(torchvision):
    return pytest.importorskip("timm", reason="no timm (extra peers)")


@pytest.fixture(scope="session")
def transformers():
    """transformers, whose BERT imports torchvision where there is one."""
    _declare_operators()
    return pytest.importorskip("transformers", reason="no transformers (extra peers)")


def _declare_operators() -> None:
    """torchvision fails to import where operators that it extends are not declared."""
    if not hasattr(torch.ops.torchvision, "nms"):
        _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
