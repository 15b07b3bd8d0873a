"""The steps of a DLRM's training, and the checkpoints that it begins with; without torch."""

from dataclasses import dataclass

from dlrm.settings import check_settings, setting
from dlrm.train.config import CheckpointConfig

OVERLAPS = ("none", "stale")
AUTO_PRODUCTS = "auto"
PRODUCTS = ("native", "torch")
CLICK_EXECUTIONS = ("eager", "graph", "lazy")


@dataclass(frozen=True)
class StepConfig:
    """The computation of a DLRM's steps and tests; field names are those of the flags.

    Raises:
        ValueError: values do not fit together; the message names flag and value.
    """

    execution: str = setting(
        "eager",
        "Execution of the MLPs and the interaction: eager, with native operators; graph, with "
        "torch.compile, each part as one graph; lazy, on torch's lazy device if available, "
        "otherwise as graph",
        choices=CLICK_EXECUTIONS,
        topic="Run",
        resumable=True,
    )
    cuda_graphs: bool = setting(
        False,
        "Replay each training step and each prediction as one CUDA graph per process, with the "
        "same results; needs one id per sample and table, and --backend nccl",
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
        "that are faster on this processor, by a table that dlrm.scripts.doctor --tune extends; a "
        "resumed run keeps its own",
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
    overlap: str = setting(
        "none",
        "stale: look up rows and exchange their vectors while the previous step computes; these "
        "rows lack that step's update, so results differ",
        choices=OVERLAPS,
    )
    auc_device: str = setting(
        "GPU",
        "Device that collects test scores; GPU: the model's device, whichever it is",
        choices=("GPU", "CPU"),
        resumable=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.execution != "eager" and self.cuda_graphs:
            raise ValueError(
                f"--cuda_graphs contradicts --execution {self.execution}: it records what "
                "--execution eager runs"
            )
        if self.overlap != "none" and self.cuda_graphs:
            raise ValueError(
                f"--overlap {self.overlap} contradicts --cuda_graphs: a recorded step looks up its "
                "own rows"
            )


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
    async_checkpoint: bool = setting(
        False,
        "Write checkpoints while training continues; needs memory for a copy of the state",
        resumable=True,
    )
