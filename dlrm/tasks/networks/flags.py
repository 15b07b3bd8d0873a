"""Flags that the commands of image and language networks share, and their global batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm.data.clicks.config import DataConfig
from dlrm.flags import ConfigFlags, Values
from dlrm.settings import check_settings, same_setting, setting
from dlrm.tasks.config import StepConfig
from dlrm.train.config import (
    CheckpointConfig,
    ExecutionConfig,
    PrecisionConfig,
    SessionConfig,
    TrainConfig,
)
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.schedule import CurveConfig

_FILES = "Checkpoints and files"


@dataclass(frozen=True)
class NetworkRunConfig:
    """Settings of both image and language networks; field names are those of the flags."""

    seed: int = setting(12345, "Random seed", topic="Run")
    verify_data: str = same_setting(DataConfig, "verify_data", topic="Run")
    allow_links: bool = same_setting(DataConfig, "allow_links", topic="Run")
    data: str | None = setting(
        None,
        "Source of samples; generated: random ones made on the host; synthetic: one random batch "
        "made on the device and used for every step; default: dataset if one is named, generated "
        "in benchmarks",
        topic="Data",
        choices=("dataset", "generated", "synthetic"),
    )
    replicas: int | None = setting(
        None,
        "Number of replicas that a global batch of batch_size x gradient_accumulation_steps x "
        "replicas samples assumes; default: the number of processes. Fewer processes each compute "
        "more micro-batches",
        least=1,
    )
    max_grad_norm: float | None = same_setting(StepConfig, "max_grad_norm")
    ema_decay: float | None = setting(
        None, "Test an EMA of the weights, with this decay; default: no EMA", least=0, below=1
    )
    pipeline_splits: tuple[str, ...] = setting(
        (),
        "Names of the stages at which a new part of the pipeline begins. With --replicas R and R "
        "processes per part, each process holds one part; with at most R processes, each runs all "
        "parts",
        resumable=True,
    )
    pipeline_schedule: str = setting(
        "gpipe",
        "Order of micro-batches in a pipeline of processes: gpipe, all forward passes first; "
        "1f1b, forward and backward passes in turn; sequential, one micro-batch at a time",
        choices=("gpipe", "1f1b", "sequential"),
        resumable=True,
    )
    no_validation: bool = setting(False, "Run no tests during training", resumable=True)
    ckpts_per_epoch: float | None = setting(
        None,
        "Checkpoints per epoch, also a fraction, for --checkpoint_freq",
        topic=_FILES,
        resumable=True,
    )
    weight_avg_exp: float | None = setting(
        None,
        "Save an average V of the checkpoints' weights W after training: V = this * V + (1 - "
        "this) * W for each checkpoint in turn; default: no average",
        topic=_FILES,
        least=0,
        below=1,
        resumable=True,
    )
    repeat: int = setting(
        10,
        "Passes of the benchmark; the first is not timed",
        topic="Inference benchmark",
        resumable=True,
        least=2,
    )

    def __post_init__(self) -> None:
        check_settings(self)


_CONFIGS: tuple[tuple[str, type], ...] = (
    ("Precision", PrecisionConfig),
    ("Execution", ExecutionConfig),
    ("Optimizer", NetworkOptimizerConfig),
    ("Learning rate", CurveConfig),
    ("Training", TrainConfig),
    ("Training", NetworkRunConfig),
    ("Run", SessionConfig),
    (_FILES, CheckpointConfig),
)
_TOPICS = ("Run", "Data", "Text", "Training", _FILES, "Inference benchmark")
# What the trainings of image and language networks do not have, or describe differently.
_WITHOUT = ("auc_threshold", "early_stop", "plateau_patience", "plateau_factor")
_DEFAULTS = {"keep_checkpoints": 1000}
_HELPS = {
    "save_checkpoint_path": "Directory in which to save checkpoints",
    "gradient_accumulation_steps": "Number of micro-batches that each replica computes in a step",
}


def network_flags(*configs: tuple[str, type], without: tuple[str, ...] = ()) -> ConfigFlags:
    """Returns the command line of a network, whose own configurations come first."""
    return ConfigFlags((*configs, *_CONFIGS), _TOPICS, _DEFAULTS, _HELPS, (*_WITHOUT, *without))


@dataclass(frozen=True)
class BatchDivision:
    """Division of a global batch among the processes.

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


def divide_batch(values: Values, processes: int) -> BatchDivision:
    """Returns the division of the flags' global batch.

    Args:
        processes: processes, or pipelines of processes, that each compute a share of the batch.

    Raises:
        ValueError: there are more processes than replicas, or a size is impossible.
    """
    micro, asked = values["batch_size"], values["gradient_accumulation_steps"]
    replicas = values["replicas"] or processes
    if min(micro, asked) < 1:
        raise ValueError(
            f"--batch_size {micro}, --gradient_accumulation_steps {asked}: expected 1 or more"
        )
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
    return BatchDivision(whole, accumulation, note)


def check(values: Values, training_modes: Sequence[str]) -> None:
    """Raises ValueError for flags that contradict each other in any network's training."""
    values.config(NetworkRunConfig)
    saves = bool(values["save_checkpoint_path"])
    if values["resume"] and not (values["mode"] in training_modes and saves):
        modes = " or ".join(training_modes)
        raise ValueError(f"--resume needs --mode {modes} and --save_checkpoint_path")
    for flag in ("checkpoint_freq", "ckpts_per_epoch", "weight_avg_exp"):
        if flag in values.given and values[flag] and not saves:
            raise ValueError(f"--{flag} {values[flag]} needs --save_checkpoint_path")
