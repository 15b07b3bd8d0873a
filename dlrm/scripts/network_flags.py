"""Flags that the commands of image and language networks share, and the batch they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm.scripts.config_flags import Values
from dlrm.train.execution import ExecutionConfig
from dlrm.train.optim import NetworkOptimizerConfig
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import CurveConfig
from dlrm.train.trainer import TrainConfig

SCHEDULES = ("gpipe", "1f1b", "sequential")

CONFIGS: dict[tuple[str, type], dict[str, str]] = {
    ("Precision", PrecisionConfig): {
        "precision": "fp32, bf16, fp16, 16.16, 16.32 or 32.32 (bits of products and of weights)",
        "half_dtype": "fp16 or bf16: the 16 bits of --precision; default: fp16 on cuda, else bf16",
        "loss_scale": "Static loss scale in fp16",
        "tf32": "Allow TensorFloat-32 in float32 matrix products on cuda",
    },
    ("Execution", ExecutionConfig): {
        "execution": "eager, op by op, or graph",
        "graph_backend": "Of --execution graph: compile (torch.compile) or trace (torch.jit.trace)",
        "recompute": "Keep only the inputs of stages for the backward pass",
    },
    ("Optimizer", NetworkOptimizerConfig): {
        "optimizer": "sgd, momentum, nesterov, rmsprop_tf, adam, adamw or lamb",
        "momentum": "Of momentum, nesterov and rmsprop_tf",
        "rmsprop_decay": "Weight of the past in rmsprop_tf's mean squares",
        "optimizer_eps": "Added to what is divided by; default: 1e-3 for rmsprop_tf, 1e-6 for "
        "lamb, else 1e-8",
        "lamb_flavour": "nvlamb (NVIDIA, Habana), popart (Graphcore) or paper",
        "lamb_max_weight_norm": "Greatest norm of weights that sizes a step of lamb",
        "weight_decay": "Weight decay",
        "decay_norm_and_bias": "Decay weights of norms and biases, too",
    },
    ("Learning rate", CurveConfig): {
        "lr_schedule": "constant, cosine, exponential, stepped, poly or linear",
        "lr": "Learning rate that the schedule multiplies",
        "lr_warmup": "Length of the linear warm-up",
        "lr_warmup_unit": "epochs, steps or run (a share of the run)",
        "lr_drops": "Where stepped drops",
        "lr_drops_unit": "epochs, steps or run",
        "lr_decay_rate": "Factor of exponential at each of its points",
        "lr_num_decays": "Equally spaced points of exponential",
        "lr_drop_rate": "Factor of stepped at each drop",
        "lr_power": "Exponent of poly",
        "lr_end": "Rate that linear starts and ends at",
        "lr_update_every": "Steps for which linear keeps a rate",
    },
    ("Training", TrainConfig): {
        "epochs": "Number of epochs to train for",
        "max_steps": "Stop after exactly this many optimization steps",
        "print_freq": "Optimization steps between printed lines",
        "test_freq": "Optimization steps between tests; default: test after each epoch",
        "test_after": "Don't test the model unless this many epochs has been completed",
        "checkpoint_freq": "Optimization steps between checkpoints",
        "benchmark_warmup_steps": "Number of initial steps to exclude from the throughput",
        "gradient_accumulation_steps": "Micro-batches of a step and replica",
    },
}

Definitions = dict[str, tuple[Any, Any, str]]

RUN: Definitions = {
    "help": (bool, False, "Show the flags"),
    "seed": (int, 12345, "Random seed"),
    "base_device": (str | None, None, "cuda or cpu; default: cuda where there is one"),
    "deterministic": (
        bool,
        False,
        "The same bits from run to run on cuda, too; on the CPU runs have them anyway",
    ),
    "backend": (str, "nccl", "Of several processes on cuda"),
    "rank_timeout": (float, 1800.0, "Seconds after which a process that does not answer is lost"),
}
TRAINING: Definitions = {
    "replicas": (
        int | None,
        None,
        "Replicas of the global batch, batch_size x gradient_accumulation_steps x replicas; "
        "default: the processes. Where these are fewer, more micro-batches make up for it",
    ),
    "max_grad_norm": (float | None, None, "Gradients of a greater norm are scaled down to it"),
    "ema_decay": (float | None, None, "Test a moving average of the weights, of this decay"),
    "pipeline_splits": (tuple[str, ...], (), "Stages that begin a part of the pipeline"),
    "pipeline_schedule": (str, "gpipe", f"{', '.join(SCHEDULES)}; one process runs all parts"),
    "no_validation": (bool, False, "Do not test while training"),
}
FILES: Definitions = {
    "load_checkpoint_path": (str | None, None, "Checkpoint, or directory of them, to load"),
    "save_checkpoint_path": (str | None, None, "Directory in which to save checkpoints"),
    "ckpts_per_epoch": (float | None, None, "Instead of --checkpoint_freq: so many an epoch"),
    "keep_checkpoints": (int, 1000, "How many of the last checkpoints to keep besides the best"),
    "weight_avg_exp": (
        float | None,
        None,
        "After the training save an average of the checkpoints, V = this * V + (1 - this) * W",
    ),
    "resume": (bool, False, "Go on from the last checkpoint in --save_checkpoint_path"),
    "log_path": (str, "./log.json", "Destination for the log file with results and statistics"),
}

# Flags that a resumed run may change: how long it is, where things lie, what it reports and when.
RESUME_MAY_CHANGE = frozenset(
    [
        *("mode", "epochs", "max_steps", "resume", "backend", "rank_timeout", "dataset"),
        *("log_path", "load_checkpoint_path", "init_checkpoint", "save_checkpoint_path"),
        *("checkpoint_freq", "ckpts_per_epoch", "keep_checkpoints", "no_validation"),
        *("print_freq", "test_freq", "test_after", "test_batch_size", "benchmark_warmup_steps"),
        *("results", "repeat", "help", "weight_avg_exp", "deterministic"),
    ]
)


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is computed by the processes that there are.

    Attributes:
        global_batch: samples of an optimization step.
        accumulation: micro-batches of each process.
        note: what the user is told, where it is not as asked for.
    """

    global_batch: int
    accumulation: int
    note: str | None = None


def batch_plan(values: Values, processes: int) -> BatchPlan:
    """Returns how the batch of the flags is computed.

    Raises:
        ValueError: there are more processes than replicas, or a size is impossible.
    """
    micro, asked = values["batch_size"], values["gradient_accumulation_steps"]
    replicas = values["replicas"] or processes
    for flag, value in (("batch_size", micro), ("gradient_accumulation_steps", asked)):
        if value < 1:
            raise ValueError(f"--{flag} {value}: expected 1 or more")
    if replicas < processes:
        raise ValueError(
            f"--replicas {replicas}: expected at least the number of processes, {processes}"
        )
    whole = micro * asked * replicas
    accumulation = -(-asked * replicas // processes)
    note = None
    if replicas != processes:
        note = (
            f"--replicas {replicas}, processes: {processes}; each computes {accumulation} "
            f"micro-batches a step instead of {asked}, and the global batch stays {whole}"
        )
    return BatchPlan(whole, accumulation, note)


def check_choices(values: Values, choices: Mapping[str, Sequence[str | None]]) -> None:
    """Raises ValueError for a flag with none of the values that it may have."""
    for flag, allowed in choices.items():
        if values[flag] not in allowed:
            shown = ", ".join(choice for choice in allowed if choice)
            raise ValueError(f"--{flag} {values[flag]}: expected one of {shown}")


def check(values: Values, training_modes: Sequence[str]) -> None:
    """Raises ValueError for flags that contradict each other in any network's training."""
    saves = values["save_checkpoint_path"] is not None
    if values["resume"] and not (values["mode"] in training_modes and saves):
        modes = " or ".join(training_modes)
        raise ValueError(f"--resume needs --mode {modes} and --save_checkpoint_path")
    for flag in ("checkpoint_freq", "ckpts_per_epoch", "weight_avg_exp"):
        if flag in values.given and values[flag] and not saves:
            raise ValueError(f"--{flag} {values[flag]} needs --save_checkpoint_path")
    if values["repeat"] < 2:
        raise ValueError(f"--repeat {values['repeat']}: expected 2 or more; the first is left out")
    if values["max_grad_norm"] is not None and not values["max_grad_norm"] > 0:
        raise ValueError(f"--max_grad_norm {values['max_grad_norm']}: expected a number above 0")
