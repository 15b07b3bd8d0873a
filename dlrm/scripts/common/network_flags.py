"""Flags that the commands of image and language networks share, and their global batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrm.data.verification import VERIFY_DATA
from dlrm.distributed.pipeline import PIPELINE_SCHEDULES
from dlrm.scripts.common.config_flags import (
    ALLOW_LINKS_HELP,
    LOG_FLAGS,
    PROFILE_HELP,
    VERDICT_HELP,
    VERIFY_DATA_HELP,
    Definitions,
    Help,
    Values,
    one_of,
)
from dlrm.train.execution import EXECUTIONS, GRAPH_BACKENDS, ExecutionConfig
from dlrm.train.optim.dense import NETWORK_OPTIMIZERS
from dlrm.train.optim.lamb import LAMB_FLAVOURS
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.precision import PRECISIONS, PrecisionConfig
from dlrm.train.schedule import LR_SCHEDULES, CurveConfig
from dlrm.train.task import TrainConfig

_LR_UNITS = ("epochs", "steps", "run")

CONFIGS: dict[tuple[str, type], dict[str, str | Help]] = {
    ("Precision", PrecisionConfig): {
        "precision": one_of(
            PRECISIONS,
            "fp32, bf16 or fp16, or the bits of matrix products and of weights, such as "
            "16.32; default: fp32",
        ),
        "half_dtype": one_of(
            ("fp16", "bf16"),
            "16-bit type of --precision 16.16 and 16.32; default: fp16 on cuda, otherwise bf16",
        ),
        "loss_scale": "Static loss scale in fp16",
        "tf32": "Allow TensorFloat-32 in float32 matrix products on cuda",
    },
    ("Execution", ExecutionConfig): {
        "execution": one_of(EXECUTIONS, "Run the network operator by operator, or as a graph"),
        "graph_backend": one_of(
            GRAPH_BACKENDS, "Compiler of --execution graph: torch.compile or torch.jit.trace"
        ),
        "recompute": "Keep only the inputs of the network's stages for the backward pass and "
        "compute the rest again, which takes less memory",
    },
    ("Optimizer", NetworkOptimizerConfig): {
        "optimizer": one_of(NETWORK_OPTIMIZERS, "Optimizer of all weights"),
        "momentum": "Momentum of --optimizer momentum, nesterov and rmsprop_tf",
        "rmsprop_decay": "Decay rate of the mean squares of --optimizer rmsprop_tf",
        "optimizer_eps": "Added to the optimizer's denominator; default: 1e-3 for rmsprop_tf, "
        "1e-6 for lamb, otherwise 1e-8",
        "lamb_flavour": one_of(
            LAMB_FLAVOURS,
            "Variant of LAMB; nvlamb: NVIDIA's and Habana's; popart: Graphcore's; paper: "
            "another name of nvlamb",
        ),
        "lamb_max_weight_norm": "Upper limit of the weight norm that scales a step of --optimizer "
        "lamb; default: none",
        "weight_decay": "Weight decay; decoupled for adamw and lamb, otherwise added to the "
        "gradients",
        "decay_norm_and_bias": "Apply weight decay to biases and weights of norms as well",
    },
    ("Learning rate", CurveConfig): {
        "lr_schedule": one_of(LR_SCHEDULES, "Shape of the learning rate's curve after the warm-up"),
        "lr": "Highest learning rate, which the schedule scales down",
        "lr_warmup": "Length of the learning rate's linear warm-up, in --lr_warmup_unit",
        "lr_warmup_unit": one_of(_LR_UNITS, "Unit of --lr_warmup; run: a share of the run"),
        "lr_drops": "Points at which --lr_schedule stepped drops, in --lr_drops_unit",
        "lr_drops_unit": one_of(_LR_UNITS, "Unit of --lr_drops; run: shares of the run"),
        "lr_decay_rate": "Factor of --lr_schedule exponential at each of --lr_num_decays points",
        "lr_num_decays": "Number of equally spaced points at which --lr_schedule exponential "
        "decays",
        "lr_drop_rate": "Factor of --lr_schedule stepped at each drop",
        "lr_power": "Exponent of --lr_schedule poly",
        "lr_end": "Learning rate at which --lr_schedule linear and cosine end, and linear also "
        "starts",
        "lr_update_every": "Number of steps for which --lr_schedule linear keeps a rate",
    },
    ("Training", TrainConfig): {
        "epochs": "Number of passes over the training set",
        "max_steps": "Stop after exactly this many optimization steps; default: no limit",
        "print_freq": "Optimization steps between printed lines",
        "verdict": VERDICT_HELP,
        "test_freq": "Optimization steps between tests; default: test after each epoch",
        "test_after": "Run no test before this many epochs; may be a fraction",
        "checkpoint_freq": "Optimization steps between checkpoints; default: best and last only",
        "benchmark_warmup_steps": "Initial steps that the throughput leaves out",
        "gradient_accumulation_steps": "Number of micro-batches that each replica computes in a "
        "step",
    },
}

RUN: Definitions = {
    "seed": (int, 12345, "Random seed"),
    "base_device": (
        str | None,
        None,
        "Device to run on: cuda, cuda:<index> or cpu; default: cuda if available",
    ),
    "deterministic": (
        bool,
        False,
        "Make runs on cuda reproducible bit for bit; runs on the CPU always are",
    ),
    "backend": (
        str,
        "nccl",
        "torch.distributed backend of processes on cuda; processes on the CPU use gloo",
    ),
    "rank_timeout": (
        float,
        1800.0,
        "Seconds without progress after which the run reports the rank that hangs, and ends",
    ),
    "profile": (int | None, None, PROFILE_HELP),
    "verify_data": (str, "first", one_of(VERIFY_DATA, VERIFY_DATA_HELP)),
    "allow_links": (bool, False, ALLOW_LINKS_HELP),
}
TRAINING: Definitions = {
    "replicas": (
        int | None,
        None,
        "Number of replicas that a global batch of batch_size x gradient_accumulation_steps x "
        "replicas samples assumes; default: the number of processes. Fewer processes each compute "
        "more micro-batches",
    ),
    "max_grad_norm": (
        float | None,
        None,
        "Clip gradients so that their joint 2-norm is at most this; default: no clipping",
    ),
    "ema_decay": (
        float | None,
        None,
        "Test an EMA of the weights, with this decay; default: no EMA",
    ),
    "pipeline_splits": (
        tuple[str, ...],
        (),
        "Names of the stages at which a new part of the pipeline begins. With --replicas R and R "
        "processes per part, each process holds one part; with at most R processes, each runs all "
        "parts",
    ),
    "pipeline_schedule": (
        str,
        "gpipe",
        one_of(
            PIPELINE_SCHEDULES,
            "Order of micro-batches in a pipeline of processes: gpipe, all forward passes first; "
            "1f1b, forward and backward passes in turn; sequential, one micro-batch at a time",
        ),
    ),
    "no_validation": (bool, False, "Run no tests during training"),
}
FILES: Definitions = {
    "load_checkpoint_path": (str | None, None, "Checkpoint, or directory of checkpoints, to load"),
    "save_checkpoint_path": (str | None, None, "Directory in which to save checkpoints"),
    "ckpts_per_epoch": (
        float | None,
        None,
        "Number of checkpoints per epoch, instead of --checkpoint_freq; may be a fraction",
    ),
    "keep_checkpoints": (int, 1000, "Number of latest checkpoints to keep besides the best"),
    "weight_avg_exp": (
        float | None,
        None,
        "Save an average V of the checkpoints' weights W after training: V = this * V + (1 - "
        "this) * W for each checkpoint in turn; default: no average",
    ),
    "resume": (
        bool,
        False,
        "Resume from the last checkpoint in --save_checkpoint_path, if there is one",
    ),
    **LOG_FLAGS,
}

# Flags that a resumed run may change: its length, locations, and its reports.
RESUME_MAY_CHANGE = frozenset(
    [
        *("mode", "epochs", "max_steps", "resume", "backend", "rank_timeout", "verify_data"),
        *("dataset", "allow_links"),
        *("log_path", "load_checkpoint_path", "init_checkpoint", "save_checkpoint_path"),
        *("checkpoint_freq", "ckpts_per_epoch", "keep_checkpoints", "no_validation"),
        *(
            "print_freq",
            "verdict",
            "test_freq",
            "test_after",
            "test_batch_size",
            "benchmark_warmup_steps",
        ),
        *("results", "repeat", "help", "weight_avg_exp", "deterministic"),
        *("pipeline_splits", "pipeline_schedule", "profile"),
        *("tensorboard", "mlflow"),
    ]
)


@dataclass(frozen=True)
class BatchPlan:
    """SplitConfig of a global batch among the processes.

    Attributes:
        global_batch: samples of an optimization step.
        accumulation: micro-batches of each process, or of each pipeline of processes.
        note: a note for the user, if the division differs from the flags.
    """

    global_batch: int
    accumulation: int
    note: str | None = None


def pipeline_parts(values: Values, processes: int, training_modes: Sequence[str]) -> int:
    """Returns the processes of a pipeline; 1 if each process runs the whole network.

    Raises:
        ValueError: there are more processes than replicas, but not one per part of each replica.
    """
    layers, replicas = values.get("layers_per_stage"), values["replicas"]
    parts = len(values["pipeline_splits"]) + 1
    if layers:
        parts = len(layers) + values["encoder_start_stage"]
    if not replicas or processes <= replicas or values["mode"] not in training_modes or parts == 1:
        return 1
    if processes != replicas * parts:
        raise ValueError(
            f"--replicas {replicas} with --pipeline_splits of {parts} parts: expected "
            f"{replicas * parts} processes, one for each part of each replica, or at most "
            f"{replicas}, which run all parts; got {processes}"
        )
    return parts


def batch_plan(values: Values, processes: int) -> BatchPlan:
    """Returns the division of the flags' global batch.

    Args:
        values: the flags.
        processes: processes, or pipelines of processes, that each compute a share of the batch.

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
            f"--replicas {replicas}: expected at least the number of processes, {processes}, or "
            "--pipeline_splits, whose parts more processes can hold"
        )
    whole = micro * asked * replicas
    accumulation = -(-asked * replicas // processes)
    note = None
    if replicas != processes:
        note = (
            f"note: --replicas {replicas}, processes: {processes}; each computes {accumulation} "
            f"micro-batches a step instead of {asked}, and the global batch stays {whole}"
        )
    return BatchPlan(whole, accumulation, note)


def check_choices(values: Values, choices: Mapping[str, Sequence[str | None]]) -> None:
    """Raises ValueError for a flag with a value that it cannot have."""
    for flag, allowed in choices.items():
        if values[flag] not in allowed:
            shown = ", ".join(choice for choice in allowed if choice)
            raise ValueError(f"--{flag} {values[flag]}: expected one of {shown}")


def check(values: Values, training_modes: Sequence[str]) -> None:
    """Raises ValueError for flags that contradict each other in any network's training."""
    saves = bool(values["save_checkpoint_path"])
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
