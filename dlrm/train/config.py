"""Length, reports and precision of a training; the configurations import no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    import torch

HALF_DTYPES = ("fp16", "bf16")
LOG_FORMATS = ("nvidia", "short")
EXECUTIONS = ("eager", "graph")


@dataclass(frozen=True)
class TrainConfig:
    """Length and reports of a training; field names are those of the command line's flags."""

    epochs: int = setting(1, "Number of passes over the training set", resumable=True, least=1)
    max_steps: int | None = setting(
        None,
        "Stop after exactly this many optimization steps; default: no limit",
        resumable=True,
        least=1,
    )
    print_freq: int = setting(
        200, "Optimization steps between printed lines", resumable=True, least=1
    )
    test_freq: int | None = setting(
        None,
        "Optimization steps between tests; default: test after each epoch",
        resumable=True,
        least=1,
    )
    test_after: float = setting(
        0.0, "Run no test before this many epochs; may be a fraction", resumable=True, least=0
    )
    checkpoint_freq: int | None = setting(
        None,
        "Optimization steps between checkpoints; default: best and last only",
        topic="Checkpoints and files",
        resumable=True,
        least=1,
    )
    auc_threshold: float | None = setting(
        None, "Stop when a test reaches this AUC; default: never", above=0, most=1, resumable=True
    )
    plateau_patience: int | None = setting(
        None,
        "Multiply the learning rate by --plateau_factor after this many tests in a row without a "
        "new best AUC; default: never",
        topic="Learning rate",
        least=1,
    )
    plateau_factor: float = setting(
        0.1,
        "Factor of --plateau_patience, between 0 and 1",
        topic="Learning rate",
        above=0,
        below=1,
    )
    early_stop: int | None = setting(
        None,
        "Stop after this many tests in a row without a new best AUC, and keep the best weights; "
        "default: never",
        least=1,
        resumable=True,
    )
    benchmark_warmup_steps: int = setting(
        0, "Initial steps that the throughput leaves out", resumable=True, least=0
    )
    gradient_accumulation_steps: int = setting(
        1,
        "Split each batch into this many micro-batches, computed one after another, which takes "
        "less memory",
        least=1,
    )
    verdict: bool = setting(
        True,
        "Print after each line of training how the steps spent their time, what limits them, and "
        "a flag to try",
        resumable=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def num_steps(self, steps_per_epoch: int) -> int:
        """Returns the steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision of a network; field names are those of the command line's flags."""

    amp: bool = setting(False, "Compute in half precision (automatic mixed precision)")
    amp_dtype: str | None = setting(
        None, "Type of --amp; default: fp16 on cuda, otherwise bf16", choices=HALF_DTYPES
    )
    loss_scale: float = setting(1024.0, "Static loss scale of --amp in fp16", least=0, above=0)
    tf32: bool = setting(True, "Allow TensorFloat-32 in float32 matrix products on cuda")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.amp_dtype is not None and not self.amp:
            raise ValueError(f"--amp_dtype {self.amp_dtype} needs --amp")

    def dtype(self, device: str) -> "torch.dtype":
        """Returns the dtype to compute in on a device."""
        import torch  # only a run needs it

        if not self.amp:
            return torch.float32
        half = self.amp_dtype or ("fp16" if device.startswith("cuda") else "bf16")
        return torch.float16 if half == "fp16" else torch.bfloat16


@dataclass(frozen=True)
class SessionConfig:
    """The processes of a run, and its reports; field names are those of the flags."""

    base_device: str | None = setting(
        None, "Device to run on: cuda, cuda:<index> or cpu; default: cuda if available"
    )
    backend: str = setting(
        "nccl",
        "torch.distributed backend of processes on cuda; processes on the CPU use gloo",
        resumable=True,
    )
    deterministic: bool = setting(
        False,
        "Make runs on cuda reproducible bit for bit; runs on the CPU always are",
        resumable=True,
    )
    log_format: str = setting(
        "nvidia",
        "Form of the lines on standard output: nvidia, close to those of NVIDIA's program; "
        "short, a line for each test and a closing block, for people",
        choices=LOG_FORMATS,
        resumable=True,
    )
    verbose: bool = setting(
        False,
        "With --log_format short: also print the progress and the parts of the time after each "
        "--print_freq steps, and all settings of --recipe",
        resumable=True,
    )
    profile: int | None = setting(
        None,
        "Record this many training steps, after a warm-up of --benchmark_warmup_steps or 5 steps, "
        "whichever is more: writes a trace beside the log, and prints the longest "
        "operators",
        least=1,
        resumable=True,
    )
    log_path: str = setting(
        "./log.json",
        "Path of the log; the curves are saved next to it. Default with --save_checkpoint_path: "
        "log.json in that directory",
        topic="Checkpoints and files",
        resumable=True,
        uri="write",
    )
    tensorboard: str | None = setting(
        None,
        "Directory to write TensorBoard events to: flags, scalars, curves and the model card",
        topic="Checkpoints and files",
        resumable=True,
        uri="write",
    )
    mlflow: str | None = setting(
        None,
        "URI of an MLflow server or store to send flags, scalars, curves and the model card to",
        topic="Checkpoints and files",
        resumable=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints that a run loads and saves; field names are those of the flags."""

    load_checkpoint_path: str | None = setting(
        None, "Checkpoint, or directory of checkpoints, to load", resumable=True, uri="read"
    )
    save_checkpoint_path: str | None = setting(
        None,
        "Directory in which to save the best and the last checkpoint",
        resumable=True,
        uri="write",
    )
    keep_checkpoints: int = setting(
        1, "Number of latest checkpoints to keep besides the best", least=1, resumable=True
    )
    resume: bool = setting(
        False,
        "Resume from the last checkpoint in --save_checkpoint_path, if there is one",
        resumable=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class ExecutionConfig:
    """Execution of an image or language network; field names are those of the flags."""

    execution: str = setting(
        "eager",
        "Run the network operator by operator, or as a graph of torch.compile",
        choices=EXECUTIONS,
    )
    recompute: bool = setting(
        False,
        "Keep only the inputs of the network's stages for the backward pass and compute the rest "
        "again, which takes less memory",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.recompute and self.execution == "graph":
            raise ValueError(
                "--recompute contradicts --execution graph: a graph chooses by itself what its "
                "backward pass keeps; use --execution eager"
            )
