"""Recipes: settings of published trainings, as flags, for a model and a global batch."""

from collections.abc import Callable
from typing import Any

_RESNETS = ("resnet50", "resnext101_32x4d")


def gaudi(model: str, global_batch: int) -> dict[str, Any]:
    """Habana's PyTorch ResNet-50 on Gaudi: torchvision's training of 2018."""
    return {
        "epochs": 90,
        "optimizer": "momentum",
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "decay_norm_and_bias": True,
        "lr": 0.1,
        "lr_schedule": "stepped",
        "lr_drops": (30.0, 60.0),
        "lr_drops_unit": "epochs",
    }


def nvidia(model: str, global_batch: int) -> dict[str, Any]:
    """NVIDIA's DeepLearningExamples, PyTorch/Classification/ConvNets."""
    if model not in _RESNETS:
        large = model == "efficientnet_b4"
        return {
            "epochs": 400,
            "optimizer": "rmsprop_tf",
            "momentum": 0.9,
            "rmsprop_decay": 0.9,
            "optimizer_eps": 0.01,
            "weight_decay": 5e-6 if large else 1e-5,
            "lr": (0.16 if large else 0.08) * global_batch / 4096,
            "lr_schedule": "cosine",
            "lr_warmup": 16.0,
            "label_smoothing": 0.1,
            "mixup_alpha": 0.2,
            "norm_momentum": 0.01,
            "norm_eps": 1e-3,
        }
    return {
        "epochs": 90,
        "optimizer": "momentum",
        "momentum": 0.875,
        "weight_decay": 1 / 32768 if model == "resnet50" else 1 / 16384,
        "lr": 0.256 * global_batch / 256,
        "lr_schedule": "cosine",
        "lr_warmup": 8.0,
        "label_smoothing": 0.1,
    }


def dlperf(model: str, global_batch: int) -> dict[str, Any]:
    """DLPerf: NVIDIA's rates, for throughput only, in 120 steps without the first 20."""
    return {
        **nvidia(model, global_batch),
        "epochs": 1,
        "lr_warmup": 0.0,
        "max_steps": 120,
        "benchmark_warmup_steps": 20,
    }


def graphcore(model: str, global_batch: int) -> dict[str, Any]:
    """Graphcore's TensorFlow CNNs on IPUs, with group norm unless --norm batch is given."""
    common = {
        "norm": "group",
        "loss_scale": 128.0,
        "label_smoothing": 0.1,
        "label_smoothing_style": "tf",
        "momentum": 0.9,
        "norm_momentum": 0.03,
        "min_area": 0.05,
        "max_ratio": 1.33,
        "normalize_input": False,
    }
    if model not in _RESNETS:
        return common | {
            "epochs": 350,
            "optimizer": "rmsprop_tf",
            "optimizer_eps": 1e-3,
            "rmsprop_decay": max(0.0, 1 - 2**-14 * global_batch),
            "weight_decay": 1e-5,
            "lr": 2**-14 * global_batch,
            "lr_schedule": "exponential",
            "cutmix_lambda": 0.85,
            "mixup_alpha": 0.2,
        }
    return common | {
        "epochs": 100 if model == "resnet50" else 120,
        "optimizer": "momentum",
        "weight_decay": 1e-4,
        "lr": (2**-13 if model == "resnet50" else 2**-11) * global_batch,
        "lr_schedule": "cosine",
        "lr_warmup": 5.0,
    }


RECIPES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "gaudi": gaudi,
    "nvidia": nvidia,
    "dlperf": dlperf,
    "graphcore": graphcore,
}
