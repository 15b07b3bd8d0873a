"""Recipes of BERT: the settings of published trainings, as values of flags."""

from typing import Any

RECIPES = ("google", "gaudi", "nvidia", "dlperf", "graphcore")
_ADAMW = {
    **{"optimizer": "adamw", "optimizer_eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0},
    **{"lr_schedule": "linear", "lr_warmup": 0.1, "lr_warmup_unit": "run"},
}
_LAMB = {"optimizer": "lamb", "optimizer_eps": 1e-6, "weight_decay": 0.01}
_LENGTHS = {"google": (512, 77), "nvidia": (512, 80), "graphcore": (384, 56)}  # of phase 2
_MRPC_RATES = {"gaudi": 2e-5, "nvidia": 2.4e-5}
_GAUDI = {"optimizer_eps": 1e-8, "weight_decay": 0.0, "lr_warmup": 0.0}
_DLPERF = {
    **{"lr_warmup": 0.1, "total_steps": 120, "benchmark_warmup_steps": 20, "no_validation": True},
}
_GRAPHCORE = {
    "vocab_size": 30400,
    "unknown_id": 100,  # [UNK] of the vocabulary that its data are tokenized with
    "attention_bias": False,
    "norm_eps": 1e-3,
    "attention_dropout": 0.0,
    "amp": True,
}


def recipe(name: str, task: str, size: str, phase: int) -> dict[str, Any]:
    """Returns the flags of a recipe.

    Args:
        name: "google", its program of 2018; "gaudi", Habana's PyTorch BERT, with NVIDIA's
            pre-training and Hugging Face's fine-tuning of 2020; "nvidia", DeepLearningExamples;
            "dlperf", OneFlow's throughput of 120 steps without the first 20; "graphcore", PopART's,
            of a smaller vocabulary and without biases in the attention.
        task: "pretrain", "squad" or "mrpc".
        size: that of `--size`.
        phase: that of the pre-training, 1 or 2.
    """
    if name == "dlperf":
        return recipe("google", task, size, phase) | _DLPERF
    if task == "pretrain":
        return _pretraining("nvidia" if name == "gaudi" else name, size, phase)
    if name == "graphcore":
        return recipe("google", task, size, phase) | _GRAPHCORE
    rate = 3e-5 if (name, size) == ("gaudi", "large") else _MRPC_RATES.get(name, 2e-5)
    rates = {"lr": 3e-5, "epochs": 2} if task == "squad" else {"lr": rate, "epochs": 3}
    return _ADAMW | (_GAUDI if name == "gaudi" else {}) | rates


def _pretraining(name: str, size: str, phase: int) -> dict[str, Any]:
    is_first = phase == 1
    length, predictions = (128, 20) if is_first else _LENGTHS[name]
    rows = {"max_seq_length": length, "max_predictions_per_seq": predictions}
    if name == "google":
        return _ADAMW | rows | {"lr": 1e-4, "lr_warmup": 0.01}
    if name == "nvidia":
        return (
            _LAMB
            | rows
            | {
                **{
                    "lamb_flavor": "nvlamb",
                    "lr": 6e-3 if is_first else 4e-3,
                    "lr_schedule": "poly",
                },
                **{"lr_power": 0.5, "lr_warmup": 0.2843 if is_first else 0.128},
                **{"lr_warmup_unit": "run", "total_steps": 7038 if is_first else 1563},
            }
        )
    scale = 64.0 if size == "large" else 512.0 if is_first else 128.0
    return (
        _GRAPHCORE
        | _LAMB
        | rows
        | {
            **{
                "lamb_flavor": "popart",
                "loss_scale": scale,
                "lr": 6e-3 if is_first else 2.828427e-3,
            },
            **{"lr_schedule": "linear", "lr_end": 1e-7, "lr_update_every": 32 if is_first else 8},
            **{"lr_warmup": 2000.0 if is_first else 274.0, "lr_warmup_unit": "steps"},
            **{"total_steps": 7038 if is_first else 2137},
        }
    )
