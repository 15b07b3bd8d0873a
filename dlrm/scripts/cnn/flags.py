"""The command line of `dlrm.scripts.cnn`, and what recipes and replicas make of it."""

from dlrm.data.images.augmentation import Augmentation
from dlrm.distributed.pipeline import PIPELINE_SCHEDULES
from dlrm.model.networks.vision import NORMS
from dlrm.scripts.common import network_flags
from dlrm.scripts.common.config_flags import ConfigFlags, Definitions, Help, Values, one_of
from dlrm.scripts.common.network_flags import CONFIGS, check_choices
from dlrm.systems.recipes import RECIPES
from dlrm.tasks.images import MODELS, ImageLossConfig, NetworkConfig

MODES = ("train", "validate", "benchmark_training", "benchmark_inference")
DATA = ("dataset", "synthetic", "generated")
IO = ("uint8", "float32")

_CONFIGS: dict[tuple[str, type], dict[str, str | Help]] = {
    ("Network", NetworkConfig): {
        "model": one_of(MODELS, "Network"),
        "num_classes": "Classes of random data; a dataset knows its own",
        "norm": one_of(NORMS, "Normalise over a batch, or over groups of channels"),
        "groups": "Groups of --norm group; default: 32, or 4 for EfficientNet",
        "norm_eps": "Added to the variances of norms; default: 1e-5, or 1e-3 for EfficientNet",
        "norm_momentum": "Weight of the newest batch in batch norm's running averages",
        "zero_init_residual": "Start each residual block of a ResNet as the identity",
        "group_dim": "Channels of a group of EfficientNet's convolutions; default: 1",
        "expand_ratio": "Inner width of EfficientNet's blocks over the outer; default: 6",
        "dropout": "Dropout before EfficientNet's last layer; default: 0.2 for B0, 0.4 for B4",
        "drop_path": "How often EfficientNet's last block is left out; default: 0.2",
        "depths": "Blocks of a ResNet's four stages; default: 3,4,6,3, or 3,4,23,3 for ResNeXt-101",
        "width": "Factor of EfficientNet's channels; default: 1.0 for B0, 1.4 for B4",
    },
    ("Augmentation", Augmentation): {
        "image_size": "Height and width of the network's input",
        "random_crop": "Train on random crops, resized",
        "min_area": "Least share of an image that a random crop has",
        "max_ratio": "Greatest ratio of a random crop's sides",
        "horizontal_flip": "Train on mirrored images half of the time",
        "centre_crop": "Side of the crop that is tested, as a share of the image's",
        "normalise_input": "Divide by the channels' deviation; else subtract their mean only",
        "mixup_alpha": "Parameter of mixup's Beta distribution; 0: no mixup",
        "cutmix_lambda": "Graphcore's strength of cutmix; 1: no cutmix",
    },
    ("Loss", ImageLossConfig): {
        "label_smoothing": "Share of the target that other classes get",
        "label_smoothing_style": one_of(
            ("torch", "tf"), "--label_smoothing is shared by all K classes, or by the K - 1 others"
        ),
    },
    **CONFIGS,
}
_RUN: Definitions = {
    "mode": (str, "train", one_of(MODES, "Task to be performed")),
    "recipe": (str | None, None, one_of(RECIPES, "Other defaults, as published")),
}
_DATA: Definitions = {
    "dataset": (str | None, None, "Directory of a dataset that preproc/prepare_images.py wrote"),
    "data": (
        str | None,
        None,
        one_of(
            DATA,
            "Images to read; generated: one made on the host and copied; synthetic: a batch made "
            "once on the device; default: dataset where one is given, in benchmarks generated",
        ),
    ),
    "synthetic_dataset_num_entries": (int, 50000, "Images of an epoch of random data"),
    "io": (str, "uint8", one_of(IO, "How images travel to the device")),
}
_TRAINING: Definitions = {
    "batch_size": (int, 128, "Images of a micro-batch"),
    "test_batch_size": (int, 128, "Images of a test batch, all processes together"),
    "base_lr_exp": (float | None, None, "Sets --lr to 2 to this power times the global batch"),
    "start_epoch": (int, 0, "Epochs that --load_checkpoint_path has behind it"),
}
_BENCHMARK: Definitions = {
    "repeat": (int, 10, "--mode benchmark_inference: passes, of which the first does not count"),
}
_FILES: Definitions = {
    "init_checkpoint": (str | None, None, "Weights of torchvision or timm: .safetensors, .pt"),
    "restore_path": (str | None, None, "--mode validate: directory of checkpoints"),
    "results": (str | None, None, "--mode validate: CSV to write; default: in --restore_path"),
}
_EXECUTION: Definitions = {
    "channels_last": (bool, True, "Keep a pixel's channels together in memory"),
}
FLAGS = ConfigFlags(
    {
        "Run": network_flags.RUN | _RUN,
        "Data": _DATA,
        "Training": network_flags.TRAINING | _TRAINING,
        "Checkpoints and files": network_flags.FILES | _FILES,
        "Inference benchmark": _BENCHMARK,
        "Execution": _EXECUTION,
    },
    _CONFIGS,
)

RESUME_MAY_CHANGE = network_flags.RESUME_MAY_CHANGE | {"restore_path"}

# Flags of the architecture: those not given are taken from the checkpoint, if there is one.
ARCHITECTURE = (
    *("model", "num_classes", "norm", "groups", "norm_eps", "group_dim", "expand_ratio"),
    *("depths", "width", "image_size", "normalise_input", "centre_crop"),
)


def parse(arguments: list[str]) -> Values:
    """Returns the flags of a command line; see `resolved` for what a recipe adds.

    Raises:
        ValueError: flag and value are named.
    """
    values = FLAGS.parse(arguments)
    check_choices(
        values,
        {
            "mode": MODES,
            "data": (None, *DATA),
            "recipe": (None, *RECIPES),
            "io": IO,
            "pipeline_schedule": PIPELINE_SCHEDULES,
        },
    )
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
