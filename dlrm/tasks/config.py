"""The settings of a DLRM's run, without torch."""

from dataclasses import dataclass

from dlrm.data.clicks.config import DataConfig
from dlrm.flags import Values
from dlrm.model.config import DLRMConfig
from dlrm.settings import check_settings, resumable_of, setting, settings_of
from dlrm.train.config import CheckpointConfig, PrecisionConfig, SessionConfig, TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.schedule import ScheduleConfig

USER_ERRORS = (ValueError, OSError, FloatingPointError)  # which end a run in a line
RECIPES = ("auto",)
AUTO_PRODUCTS = "auto"
NATIVE, TORCH = PRODUCTS = ("native", "torch")
SCHEDULE, CONSTANT, REWARM = CONTINUE_LR = ("schedule", "constant", "rewarm")


@dataclass(frozen=True)
class StepConfig:
    """The computation of a DLRM's steps and tests; field names are those of the flags."""

    cuda_graphs: bool = setting(
        False,
        "Replay each training step and each prediction as one CUDA graph, with the same results; "
        "for one process, and one id per sample and table",
        topic="Run",
        resumable=True,
    )
    optimized_mlp: bool = setting(
        True,
        "Run each MLP as one autograd node over fused linear layers, instead of torch's modules "
        "one by one",
        topic="Model",
        resumable=True,
    )
    mlp_products: str = setting(
        AUTO_PRODUCTS,
        "Matrix products of the MLPs on a CPU: the native operator's or torch's; auto takes those "
        "that are faster on processors of this kind; a resumed run keeps its own",
        choices=(AUTO_PRODUCTS, *PRODUCTS),
        topic="Model",
    )
    max_grad_norm: float | None = setting(
        None,
        "Clip gradients so that their joint 2-norm is at most this; default: no clipping",
        above=0,
    )
    ema_decay: float | None = setting(
        None,
        "Test and serve an EMA, with this decay, of all weights except the tables; default: no EMA",
        least=0,
        below=1,
    )
    table_files: str | None = setting(
        None,
        "Directory, on a fast local disk, for files of the tables and of their optimizer's state, "
        "which the operating system keeps in memory as far as there is room; CPU only. The "
        "results are the same, bit for bit. The files go with the process",
        topic="Tables larger than memory",
        resumable=True,
    )
    auc_device: str = setting(
        "GPU",
        "Device that collects test scores; GPU: the model's device, whichever it is",
        choices=("GPU", "CPU"),
        resumable=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class DistillConfig:
    """The teacher of a training; field names are those of the flags."""

    distill: str | None = setting(
        None,
        "Checkpoint, or directory of a run, whose best one is taken: train on labels mixed with "
        "the probabilities of this model, which must have the transform of --dataset",
        resumable=True,
        uri="read",
    )
    distill_weight: float = setting(
        0.5,
        "With --distill, weight of the model's probabilities in the labels; 1 takes them alone",
        above=0,
        most=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class ClickCheckpointConfig(CheckpointConfig):
    """The checkpoints of a DLRM; see `CheckpointConfig`."""

    load_optimizer_state: bool = setting(
        False,
        "Load the optimizers' state of --load_checkpoint_path as well: training on further rows "
        "continues where that run ended, and counts its steps from 0",
        resumable=True,
    )
    allow_other_transform: bool = setting(
        False,
        "Accept a dataset whose fitted transform is not the checkpoint's, so that the same ids "
        "stand for other values",
        resumable=True,
    )
    continue_from: str | None = setting(
        None,
        "Checkpoint, or directory of a run, whose newest one is taken: train on with the rows of "
        "--dataset where that run ended, with its weights, optimizers, steps and settings, and "
        "with tables for the ids that --dataset has more",
        resumable=True,
        uri="read, newest",
    )
    continue_lr: str | None = setting(
        None,
        "Learning rate after --continue_from; schedule: of the steps after that run's; constant: "
        "--lr; rewarm: the schedule begins again. Default: schedule, or rewarm where the schedule "
        "depends on the length of the run or has come to 0",
        choices=CONTINUE_LR,
        topic="Learning rate",
    )
    async_checkpoint: bool = setting(
        False,
        "Write checkpoints while training continues; needs memory for a copy of the state",
        resumable=True,
    )


def check_distilled(values: Values) -> None:
    """Raises ValueError for settings that contradict `--distill`, or need it."""
    values.config(DistillConfig)  # checks the weight itself
    teacher, mode = values["distill"], values.get("mode", "train")
    if teacher is None and "distill_weight" in values.given:
        raise ValueError(f"--distill_weight {values['distill_weight']} needs --distill")
    if teacher is not None and mode != "train":
        raise ValueError(f"--distill {teacher} contradicts --mode {mode}: only a training learns")


def check_continued(values: Values) -> None:
    """Raises ValueError for settings that contradict `--continue_from`, or need it."""
    path = values["continue_from"]
    if path is None:
        if values["continue_lr"] is not None and not values["resume"]:
            raise ValueError(f"--continue_lr {values['continue_lr']} needs --continue_from")
        return
    asked = f"--continue_from {path}"
    if values.get("mode", "train") != "train":
        raise ValueError(f"{asked} contradicts --mode {values['mode']}: only a training continues")
    for name, why in {
        "load_checkpoint_path": "both name the weights to begin with",
        "seeds": "it continues from one model; continue each seed by itself",
        "recipe": "the settings are those of the run that is continued",
    }.items():
        if values.get(name) is not None:
            raise ValueError(f"{asked} contradicts --{name} {values[name]}: {why}")


# Everything that opens a run, as (topic of the help, configuration).
CLICK_CONFIGS: tuple[tuple[str, type], ...] = (
    ("Run", SessionConfig),
    ("Precision", PrecisionConfig),
    ("Data", DataConfig),
    ("Model", DLRMConfig),
    ("Training", TrainConfig),
    ("Training", StepConfig),
    ("Training", DistillConfig),
    ("Learning rate", ScheduleConfig),
    ("Optimizers", OptimizerConfig),
    ("Checkpoints and files", ClickCheckpointConfig),
)
RESUMABLE = resumable_of(*(config for _, config in CLICK_CONFIGS))
# Settings that a run takes from the one that it continues, unless they are given.
CARRIED = tuple(
    name
    for name in settings_of(*(config for _, config in CLICK_CONFIGS))
    if name not in {*RESUMABLE, "base_device", "continue_lr", "distill_weight"}
)
