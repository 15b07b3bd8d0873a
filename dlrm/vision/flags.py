"""The command line of `dlrm.scripts.cnn`, and the effect of recipes and replicas on it."""

from dataclasses import dataclass

from dlrm.flags import Values
from dlrm.settings import architecture_of, check_settings, setting
from dlrm.tasks.networks import flags as network_flags
from dlrm.vision.config import AugmentationConfig, ImageLossConfig, NetworkConfig
from dlrm.vision.recipes import RECIPES

MODES = ("train", "validate", "benchmark_training", "benchmark_inference")
DATA = ("dataset", "synthetic", "generated")
IO = ("uint8", "float32")


@dataclass(frozen=True)
class ImageRunConfig:
    """A run of an image network; field names are those of the flags."""

    mode: str = setting("train", "Task to perform", choices=MODES, resumable=True)
    recipe: str | None = setting(
        None,
        "Defaults of published runs for the optimizer, the learning rate and the augmentation",
        choices=RECIPES,
    )
    dataset: str | None = setting(
        None,
        "Directory of a dataset that dlrm prepare-images wrote",
        topic="Data",
        resumable=True,
    )
    data: str | None = setting(
        None,
        "Source of images; generated: random images made on the host and copied; synthetic: one "
        "batch made on the device and used for every step; default: dataset if --dataset is "
        "given, generated in benchmarks",
        topic="Data",
        choices=DATA,
    )
    synthetic_dataset_num_entries: int = setting(
        50000, "Images per epoch of random data", topic="Data"
    )
    io: str = setting(
        "uint8", "Type in which images are copied to the device", topic="Data", choices=IO
    )
    batch_size: int = setting(128, "Images per micro-batch and process", topic="Training")
    test_batch_size: int = setting(
        128, "Images per test batch, all processes together", topic="Training", resumable=True
    )
    base_lr_exp: float | None = setting(
        None, "Set --lr to 2**this times the global batch size", topic="Training"
    )
    start_epoch: int = setting(
        0,
        "Epochs already completed in --load_checkpoint_path; training starts after them",
        topic="Training",
    )
    init_checkpoint: str | None = setting(
        None,
        "File of initial weights from torchvision or timm: .safetensors or .pt",
        topic="Checkpoints and files",
        resumable=True,
    )
    restore_path: str | None = setting(
        None,
        "--mode validate: directory of checkpoints to test",
        topic="Checkpoints and files",
        resumable=True,
    )
    results: str | None = setting(
        None,
        "--mode validate: CSV file to write; default: validation.csv in --restore_path",
        topic="Checkpoints and files",
        resumable=True,
    )
    repeat: int = setting(
        10,
        "--mode benchmark_inference: number of passes, 2 or more; the first is not timed",
        topic="Inference benchmark",
        resumable=True,
    )
    channels_last: bool = setting(
        True,
        "Store images with the channels of each pixel together (torch.channels_last)",
        topic="Execution",
    )

    def __post_init__(self) -> None:
        check_settings(self)


FLAGS = network_flags.network_flags(
    ("Run", ImageRunConfig),
    ("Network", NetworkConfig),
    ("Augmentation", AugmentationConfig),
    ("Loss", ImageLossConfig),
)
RESUME_MAY_CHANGE = FLAGS.resumable

# Flags of the architecture: those not given are taken from the checkpoint, if there is one.
ARCHITECTURE = architecture_of(NetworkConfig, AugmentationConfig)


def parse(arguments: list[str]) -> Values:
    """Returns the flags of a command line; `resolved` adds those of a recipe."""
    values = FLAGS.parse(arguments)
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
