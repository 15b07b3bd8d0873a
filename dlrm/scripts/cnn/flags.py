"""The command line of `dlrm.scripts.cnn`, and the effect of recipes and replicas on it."""

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
        "num_classes": "Number of classes of random data; a dataset states its own",
        "norm": one_of(NORMS, "Normalization over a batch or over groups of channels"),
        "groups": "Number of groups of --norm group; default: 32, or 4 for EfficientNet",
        "norm_eps": "Added to the variances in normalization; default: 1e-5, or 1e-3 for "
        "EfficientNet",
        "norm_momentum": "Weight of the newest batch in the running averages of batch "
        "normalization",
        "zero_init_residual": "Initialize each residual block of a ResNet as the identity",
        "group_dim": "Channels per group of EfficientNet's spatial convolutions; default: 1, "
        "depthwise",
        "expand_ratio": "Ratio of the inner to the outer width of EfficientNet's blocks; default: "
        "6",
        "dropout": "Dropout probability before EfficientNet's last layer; default: 0.2 for B0, "
        "0.4 for B4",
        "drop_path": "Probability that training skips EfficientNet's last block, less for earlier "
        "blocks; default: 0.2",
        "depths": "Number of blocks of a ResNet's four stages; default: 3,4,6,3, or 3,4,23,3 for "
        "ResNeXt-101",
        "width": "Multiplier of EfficientNet's channels; default: 1.0 for B0, 1.4 for B4",
    },
    ("Augmentation", Augmentation): {
        "image_size": "Height and width of the network's input, in pixels",
        "random_crop": "Train on resized random crops instead of center crops",
        "min_area": "Minimum area of a random crop, as a share of the image's",
        "max_ratio": "Maximum aspect ratio of a random crop; the minimum is its inverse",
        "horizontal_flip": "Mirror half of the training images, at random",
        "centre_crop": "Side of the center crop used in tests, as a share of the image's side",
        "normalise_input": "Subtract the channels' means and divide by their standard deviations; "
        "otherwise only subtract the means",
        "mixup_alpha": "Parameter of the Beta distribution of mixup; 0: no mixup",
        "cutmix_lambda": "CutMix by Graphcore's rules: 1: no CutMix; lower values, above 0, apply "
        "it to more batches",
    },
    ("Loss", ImageLossConfig): {
        "label_smoothing": "Share of the target distribution that label smoothing spreads over "
        "other classes; 0: none",
        "label_smoothing_style": one_of(
            ("torch", "tf"),
            "torch: --label_smoothing is spread over all K classes; tf: over the K - 1 wrong ones",
        ),
    },
    **CONFIGS,
}
_RUN: Definitions = {
    "mode": (str, "train", one_of(MODES, "Task to perform")),
    "recipe": (
        str | None,
        None,
        one_of(
            RECIPES,
            "Defaults of published runs for the optimizer, the learning rate and the augmentation",
        ),
    ),
}
_DATA: Definitions = {
    "dataset": (str | None, None, "Directory of a dataset that dlrm.preproc.prepare_images wrote"),
    "data": (
        str | None,
        None,
        one_of(
            DATA,
            "Source of images; generated: random images made on the host and copied; synthetic: "
            "one batch made on the device and used for every step; default: dataset if --dataset "
            "is given, generated in benchmarks",
        ),
    ),
    "synthetic_dataset_num_entries": (int, 50000, "Images per epoch of random data"),
    "io": (str, "uint8", one_of(IO, "Type in which images are copied to the device")),
}
_TRAINING: Definitions = {
    "batch_size": (int, 128, "Images per micro-batch and process"),
    "test_batch_size": (int, 128, "Images per test batch, all processes together"),
    "base_lr_exp": (float | None, None, "Set --lr to 2**this times the global batch size"),
    "start_epoch": (
        int,
        0,
        "Epochs already completed in --load_checkpoint_path; training starts after them",
    ),
}
_BENCHMARK: Definitions = {
    "repeat": (
        int,
        10,
        "--mode benchmark_inference: number of passes, 2 or more; the first is not timed",
    ),
}
_FILES: Definitions = {
    "init_checkpoint": (
        str | None,
        None,
        "File of initial weights from torchvision or timm: .safetensors or .pt",
    ),
    "restore_path": (str | None, None, "--mode validate: directory of checkpoints to test"),
    "results": (
        str | None,
        None,
        "--mode validate: CSV file to write; default: validation.csv in --restore_path",
    ),
}
_EXECUTION: Definitions = {
    "channels_last": (
        bool,
        True,
        "Store images with the channels of each pixel together (torch.channels_last)",
    ),
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
    """Returns the flags of a command line; `resolved` adds those of a recipe.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
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
    """Returns the values with the recipe's, and with those that follow from the global batch.

    Raises:
        ValueError: two flags set different learning rates.
    """
    if values["recipe"]:
        recipe = RECIPES[values["recipe"]](values["model"], global_batch)
        if values["data"] in ("synthetic", "generated"):  # there is nothing to mix
            recipe = {k: v for k, v in recipe.items() if k not in ("mixup_alpha", "cutmix_lambda")}
        values = values.filled(recipe)
    if values["data"] == "synthetic":  # one batch, without partners to mix with
        values = Values({**values, "mixup_alpha": 0.0, "cutmix_lambda": 1.0}, values.given)
    if values["base_lr_exp"] is not None:
        if "lr" in values.given:
            raise ValueError(f"--base_lr_exp {values['base_lr_exp']} contradicts --lr")
        values = values.filled({"lr": 2.0 ** values["base_lr_exp"] * global_batch})
    return values
