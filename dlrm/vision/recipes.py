"""Recipes: settings of published trainings, as flags, for a model and a global batch."""

from collections.abc import Callable
from typing import Any

from dlrm.vision.config import RESNETS


def gaudi(model: str, global_batch: int) -> dict[str, Any]:
    """Habana's PyTorch ResNet-50 on Gaudi: torchvision's training of 2018."""
    return {
        **{"epochs": 90, "optimizer": "momentum", "momentum": 0.9, "weight_decay": 1e-4},
        **{"decay_norm_and_bias": True, "lr": 0.1, "lr_schedule": "stepped"},
        **{"lr_drops": (30.0, 60.0), "lr_drops_unit": "epochs"},
    }


def nvidia(model: str, global_batch: int) -> dict[str, Any]:
    """NVIDIA's DeepLearningExamples, PyTorch/Classification/ConvNets."""
    common = {"lr_schedule": "cosine", "label_smoothing": 0.1}
    if model in RESNETS:
        return common | {
            **{"epochs": 90, "optimizer": "momentum", "momentum": 0.875, "lr_warmup": 8.0},
            "weight_decay": 1 / 32768 if model == "resnet50" else 1 / 16384,
            "lr": 0.256 * global_batch / 256,
        }
    large = model == "efficientnet_b4"
    return common | {
        **{"epochs": 400, "optimizer": "rmsprop_tf", "momentum": 0.9, "rmsprop_decay": 0.9},
        **{"optimizer_eps": 0.01, "lr_warmup": 16.0, "mixup_alpha": 0.2},
        **{"norm_momentum": 0.01, "norm_eps": 1e-3},
        "weight_decay": 5e-6 if large else 1e-5,
        "lr": (0.16 if large else 0.08) * global_batch / 4096,
    }


def dlperf(model: str, global_batch: int) -> dict[str, Any]:
    """DLPerf: NVIDIA's rates, for throughput only, in 120 steps without the first 20."""
    steps = {"epochs": 1, "lr_warmup": 0.0, "max_steps": 120, "benchmark_warmup_steps": 20}
    return nvidia(model, global_batch) | steps


def graphcore(model: str, global_batch: int) -> dict[str, Any]:
    """Graphcore's TensorFlow CNNs on IPUs, with group norm unless --norm batch is given."""
    common = {
        **{"norm": "group", "norm_momentum": 0.03, "momentum": 0.9, "loss_scale": 128.0},
        **{"label_smoothing": 0.1, "label_smoothing_style": "tf", "normalize_input": False},
        **{"min_area": 0.05, "max_ratio": 1.33},
    }
    if model in RESNETS:
        is_50 = model == "resnet50"
        return common | {
            **{"epochs": 100 if is_50 else 120, "optimizer": "momentum", "weight_decay": 1e-4},
            **{"lr": (2**-13 if is_50 else 2**-11) * global_batch, "lr_schedule": "cosine"},
            "lr_warmup": 5.0,
        }
    return common | {
        **{"epochs": 350, "optimizer": "rmsprop_tf", "optimizer_eps": 1e-3, "weight_decay": 1e-5},
        **{"lr": 2**-14 * global_batch, "lr_schedule": "exponential"},
        "rmsprop_decay": max(0.0, 1 - 2**-14 * global_batch),
        **{"cutmix_lambda": 0.85, "mixup_alpha": 0.2},
    }


RECIPES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "gaudi": gaudi,
    "nvidia": nvidia,
    "dlperf": dlperf,
    "graphcore": graphcore,
}
