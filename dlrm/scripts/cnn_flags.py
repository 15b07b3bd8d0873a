"""The command line of `dlrm.scripts.cnn`, and what recipes and replicas make of it."""

from dataclasses import dataclass

from dlrm.data.augment import Augmentation
from dlrm.scripts.config_flags import ConfigFlags, Values
from dlrm.systems.recipes import RECIPES
from dlrm.tasks.images import ImageLossConfig, NetworkConfig
from dlrm.train.execution import ExecutionConfig
from dlrm.train.optim import NetworkOptimizerConfig
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import CurveConfig
from dlrm.train.trainer import TrainConfig

MODES = ("train", "validate", "benchmark_training", "benchmark_inference")
DATA = ("dataset", "synthetic", "generated")
SCHEDULES = ("gpipe", "1f1b", "sequential")

_CONFIGS = {
    NetworkConfig: {
        "model": "resnet50, resnext101_32x4d, efficientnet_b0 or efficientnet_b4",
        "num_classes": "Classes of data that are made up; a dataset knows its own",
        "norm": "batch or group",
        "groups": "Groups of group norm; default: 32, or 4 for EfficientNet",
        "norm_eps": "Added to variances; default: 1e-5, or 1e-3 for EfficientNet",
        "norm_momentum": "Weight of the newest batch in batch norm's running averages",
        "zero_init_residual": "Start each residual block of a ResNet as the identity",
        "group_dim": "Channels of a group of EfficientNet's convolutions; default: 1",
        "expand_ratio": "Of the inner width of EfficientNet's blocks; default: 6",
        "dropout": "Before EfficientNet's last layer; default: 0.2 for B0, 0.4 for B4",
        "drop_path": "Of EfficientNet's last block; default: 0.2",
    },
    Augmentation: {
        "image_size": "Height and width of the network's input",
        "random_crop": "Train on random crops, resized",
        "min_area": "Least share of an image that a random crop has",
        "max_ratio": "Greatest ratio of a random crop's sides",
        "horizontal_flip": "Train on mirrored images half of the time",
        "centre_crop": "Side of the crop that is tested, as a share of the image's",
        "normalise_input": "Divide by the channels' deviation; else subtract their mean only",
        "mixup_alpha": "Of mixup's Beta distribution; 0: no mixup",
        "cutmix_lambda": "Graphcore's strength of cutmix; 1: no cutmix",
    },
    ImageLossConfig: {
        "label_smoothing": "Share of the target that other classes get",
        "label_smoothing_style": "torch: all K classes share it; tf: the K - 1 others",
    },
    PrecisionConfig: {
        "precision": "fp32, bf16, fp16, 16.16, 16.32 or 32.32 (bits of products and of weights)",
        "half_dtype": "fp16 or bf16: the 16 bits of --precision; default: fp16 on cuda, else bf16",
        "loss_scale": "Static loss scale in fp16",
        "tf32": "Allow TensorFloat-32 in float32 matrix products on cuda",
    },
    ExecutionConfig: {
        "execution": "eager, op by op, or graph",
        "graph_backend": "Of --execution graph: compile (torch.compile) or trace (torch.jit.trace)",
        "recompute": "Keep only the inputs of stages for the backward pass",
    },
    NetworkOptimizerConfig: {
        "optimizer": "sgd, momentum, nesterov, rmsprop_tf, adam or adamw",
        "momentum": "Of momentum, nesterov and rmsprop_tf",
        "rmsprop_decay": "Weight of the past in rmsprop_tf's mean squares",
        "optimizer_eps": "Added to what is divided by; default: 1e-3 for rmsprop_tf, else 1e-8",
        "weight_decay": "Weight decay",
        "decay_norm_and_bias": "Decay weights of norms and biases, too",
    },
    CurveConfig: {
        "lr_schedule": "constant, cosine, exponential or stepped",
        "lr": "Learning rate that the schedule multiplies",
        "lr_warmup": "Length of the linear warm-up",
        "lr_warmup_unit": "epochs, steps or run (a share of the run)",
        "lr_drops": "Where stepped drops",
        "lr_drops_unit": "epochs, steps or run",
        "lr_decay_rate": "Factor of exponential at each of its points",
        "lr_num_decays": "Equally spaced points of exponential",
        "lr_drop_rate": "Factor of stepped at each drop",
    },
    TrainConfig: {
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
_OWN = {
    "help": (bool, False, "Show the flags"),
    "mode": (str, "train", ", ".join(MODES)),
    "recipe": (str | None, None, f"Other defaults, as published: {', '.join(RECIPES)}"),
    "seed": (int, 12345, "Random seed"),
    "base_device": (
        str | None,
        None,
        "cuda or cpu; default: cuda where there is one",
    ),
    "backend": (str, "nccl", "Of several processes on cuda"),
    "rank_timeout": (float, 1800.0, "Seconds after which a process that does not answer is lost"),
    "channels_last": (bool, True, "Keep a pixel's channels together in memory"),
    "dataset": (str | None, None, "Directory of a dataset that preproc/prepare_images.py wrote"),
    "data": (
        str | None,
        None,
        "dataset; generated: one image made on the host and copied; synthetic: a batch made once "
        "on the device; default: dataset where one is given, in benchmarks generated",
    ),
    "synthetic_dataset_num_entries": (int, 50000, "Images of an epoch of data that are made up"),
    "io": (str, "uint8", "How images travel to the device: uint8 or float32"),
    "batch_size": (int, 128, "Images of a micro-batch"),
    "replicas": (
        int | None,
        None,
        "Replicas of the global batch, batch_size x gradient_accumulation_steps x replicas; "
        "default: the processes. Where these are fewer, more micro-batches make up for it",
    ),
    "test_batch_size": (int, 128, "Images of a test batch, all processes together"),
    "base_lr_exp": (float | None, None, "lr is 2 to this power times the global batch"),
    "max_grad_norm": (float | None, None, "Gradients of a greater norm are scaled down to it"),
    "ema_decay": (
        float | None,
        None,
        "Test a moving average of the weights, of this decay",
    ),
    "weight_avg_exp": (
        float | None,
        None,
        "After the training save an average of the checkpoints, V = this * V + (1 - this) * W",
    ),
    "pipeline_splits": (tuple[str, ...], (), "Stages that begin a part of the pipeline"),
    "pipeline_schedule": (
        str,
        "gpipe",
        f"{', '.join(SCHEDULES)}; one process runs all parts",
    ),
    "no_validation": (bool, False, "Do not test while training"),
    "ckpts_per_epoch": (
        float | None,
        None,
        "Instead of --checkpoint_freq: so many an epoch",
    ),
    "start_epoch": (
        int,
        0,
        "Epochs that --load_checkpoint_path has behind it",
    ),
    "load_checkpoint_path": (str | None, None, "Checkpoint, or directory of them, to load"),
    "init_checkpoint": (
        str | None,
        None,
        "Weights of torchvision or timm: .safetensors, .pt",
    ),
    "save_checkpoint_path": (str | None, None, "Directory in which to save checkpoints"),
    "keep_checkpoints": (int, 1000, "How many of the last checkpoints to keep besides the best"),
    "resume": (bool, False, "Go on from the last checkpoint in --save_checkpoint_path"),
    "restore_path": (str | None, None, "--mode validate: directory of checkpoints"),
    "results": (
        str | None,
        None,
        "--mode validate: CSV; default: in --restore_path",
    ),
    "repeat": (int, 10, "--mode benchmark_inference: passes, of which the first does not count"),
    "log_path": (str, "./log.json", "Destination for the log file with results and statistics"),
}
FLAGS = ConfigFlags(_CONFIGS, _OWN)  # type: ignore[arg-type]

# Flags that a resumed run may change: how long it is, where things lie, what it reports and when.
RESUME_MAY_CHANGE = frozenset(
    [
        *("mode", "epochs", "max_steps", "resume", "backend", "rank_timeout", "dataset"),
        *("log_path", "load_checkpoint_path", "init_checkpoint", "save_checkpoint_path"),
        *("checkpoint_freq", "ckpts_per_epoch", "keep_checkpoints", "no_validation"),
        *("print_freq", "test_freq", "test_after", "test_batch_size", "benchmark_warmup_steps"),
        *("restore_path", "results", "repeat", "help", "weight_avg_exp"),
    ]
)

# Flags of the architecture: those not given are taken from the checkpoint, if there is one.
ARCHITECTURE = (
    *("model", "num_classes", "norm", "groups", "norm_eps", "group_dim", "expand_ratio"),
    *("image_size", "normalise_input", "centre_crop"),
)


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is computed by the processes that there are.

    Attributes:
        global_batch: images of an optimization step.
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
            f"--replicas {replicas}, here are {processes} processes: each computes {accumulation} "
            f"micro-batches a step instead of {asked}, and the global batch stays {whole}"
        )
    return BatchPlan(whole, accumulation, note)


def parse(arguments: list[str]) -> Values:
    """Returns the flags of a command line; see `resolved` for what a recipe adds.

    Raises:
        ValueError: flag and value are named.
    """
    values = FLAGS.parse(arguments)
    for flag, choices in (
        ("mode", MODES),
        ("data", (None, *DATA)),
        ("recipe", (None, *RECIPES)),
        ("io", ("uint8", "float32")),
        ("pipeline_schedule", SCHEDULES),
    ):
        if values[flag] not in choices:
            raise ValueError(f"--{flag} {values[flag]}: expected one of {_shown(choices)}")
    made_up = "generated" if values["mode"].startswith("benchmark") else None
    return values.filled({"data": "dataset" if values["dataset"] else made_up})


def resolved(values: Values, global_batch: int) -> Values:
    """Returns the values with the recipe's, and with what follows from the global batch.

    Raises:
        ValueError: two flags say different things of the learning rate.
    """
    if values["recipe"]:
        recipe = RECIPES[values["recipe"]](values["model"], global_batch)
        if values["data"] in ("synthetic", "generated"):  # there is nothing to mix
            recipe = {k: v for k, v in recipe.items() if k not in ("mixup_alpha", "cutmix_lambda")}
        values = values.filled(recipe)
    if values["data"] == "synthetic":  # one batch, without the partners that mixing needs
        values = Values({**values, "mixup_alpha": 0.0, "cutmix_lambda": 1.0}, values.given)
    if values["base_lr_exp"] is not None:
        if "lr" in values.given:
            raise ValueError(f"--base_lr_exp {values['base_lr_exp']} contradicts --lr")
        values = values.filled({"lr": 2.0 ** values["base_lr_exp"] * global_batch})
    return values


def _shown(choices: tuple[str | None, ...]) -> str:
    return ", ".join(choice for choice in choices if choice)
