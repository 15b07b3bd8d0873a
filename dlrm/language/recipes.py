"""Recipes of BERT: the settings of published trainings, as values of flags.

A recipe is for a task, "pretrain", "squad" or "mrpc", a size, and a phase of the pre-training.
"""

from collections.abc import Callable
from typing import Any

_ADAMW = {"optimizer": "adamw", "lr_schedule": "linear", "lr_warmup_unit": "run"}
_GOOGLE = {"optimizer_eps": 1e-6, "weight_decay": 0.01, "lr_warmup": 0.1}


def google(task: str, size: str, phase: int) -> dict[str, Any]:
    """Google's program of 2018; pre-training takes as many epochs as it is given."""
    if task != "pretrain":
        return _finetuning(task, 2e-5, _GOOGLE)
    rates = {"max_grad_norm": 1.0, "lr": 1e-4, "lr_warmup": 0.01}
    return _ADAMW | _GOOGLE | _sequences(phase, 512, 77) | rates


def gaudi(task: str, size: str, phase: int) -> dict[str, Any]:
    """Habana's PyTorch BERT on Gaudi: NVIDIA's pre-training, Hugging Face's fine-tuning of 2020."""
    own = {"optimizer_eps": 1e-8, "weight_decay": 0.0, "lr_warmup": 0.0}
    rate = 3e-5 if size == "large" else 2e-5
    return _nvlamb(phase) if task == "pretrain" else _finetuning(task, rate, own)


def nvidia(task: str, size: str, phase: int) -> dict[str, Any]:
    """NVIDIA's DeepLearningExamples, PyTorch/LanguageModeling/BERT."""
    return _nvlamb(phase) if task == "pretrain" else _finetuning(task, 2.4e-5, _GOOGLE)


def _finetuning(task: str, mrpc_rate: float, own: dict[str, Any]) -> dict[str, Any]:
    rates = {"lr": 3e-5, "epochs": 2} if task == "squad" else {"lr": mrpc_rate, "epochs": 3}
    return _ADAMW | own | {"max_grad_norm": 1.0} | rates


def dlperf(task: str, size: str, phase: int) -> dict[str, Any]:
    """DLPerf's OneFlow BERT: throughput only, in 120 steps without the first 20."""
    return google(task, size, phase) | {
        "lr_warmup": 0.1,
        "total_steps": 120,
        "benchmark_warmup_steps": 20,
        "no_validation": True,
    }


def graphcore(task: str, size: str, phase: int) -> dict[str, Any]:
    """Graphcore's PopART BERT on IPUs: a smaller vocabulary, no biases in the attention."""
    common = {
        "vocab_size": 30400,
        "unknown_id": 100,  # [UNK] of the vocabulary that its data are tokenized with
        "attention_bias": False,
        "norm_eps": 1e-3,
        "attention_dropout": 0.0,
        "amp": True,
    }
    if task != "pretrain":
        return google(task, size, phase) | common
    scale = 64.0 if size == "large" else 512.0 if phase == 1 else 128.0
    return common | {
        **_sequences(phase, 384, 56),
        "optimizer": "lamb",
        "lamb_flavor": "popart",
        "weight_decay": 0.01,
        "optimizer_eps": 1e-6,
        "loss_scale": scale,
        "lr": 6e-3 if phase == 1 else 2.828427e-3,
        "lr_schedule": "linear",
        "lr_end": 1e-7,
        "lr_update_every": 32 if phase == 1 else 8,
        "lr_warmup": 2000.0 if phase == 1 else 274.0,
        "lr_warmup_unit": "steps",
        "total_steps": 7038 if phase == 1 else 2137,
    }


def _nvlamb(phase: int) -> dict[str, Any]:
    return {
        **_sequences(phase, 512, 80),
        "optimizer": "lamb",
        "lamb_flavor": "nvlamb",
        "weight_decay": 0.01,
        "optimizer_eps": 1e-6,
        "lr": 6e-3 if phase == 1 else 4e-3,
        "lr_schedule": "poly",
        "lr_power": 0.5,
        "lr_warmup": 0.2843 if phase == 1 else 0.128,
        "lr_warmup_unit": "run",
        "total_steps": 7038 if phase == 1 else 1563,
    }


def _sequences(phase: int, length: int, predictions: int) -> dict[str, Any]:
    """Phase 1 has short rows, phase 2 those of `length`."""
    if phase == 1:
        return {"max_seq_length": 128, "max_predictions_per_seq": 20}
    return {"max_seq_length": length, "max_predictions_per_seq": predictions}


BERT_RECIPES: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    "google": google,
    "gaudi": gaudi,
    "nvidia": nvidia,
    "dlperf": dlperf,
    "graphcore": graphcore,
}
