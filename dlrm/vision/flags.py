"""The command line of `dlrm.scripts.cnn`, and the effect of recipes and replicas on it."""

from dataclasses import dataclass

from dlrm.flags import Values
from dlrm.settings import architecture_of, check_settings, setting
from dlrm.tasks.networks import flags as network_flags
from dlrm.vision.config import AugmentationConfig, ImageLossConfig, ImagesConfig, NetworkConfig
from dlrm.vision.recipes import RECIPES

MODES = ("train", "validate", "benchmark_training", "benchmark_inference")
TRAINING = ("train", "benchmark_training")
_FILES = "Checkpoints and files"


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
        "Folder of images: class folders, which may be in train/ and val/, or TFRecords such as "
        "train-00000-of-01024",
        topic="Data",
        resumable=True,
        uri="read",
    )
    synthetic_dataset_num_entries: int = setting(
        50000, "Images per epoch of random data", topic="Data"
    )
    io: str = setting(
        "uint8", "Type of images copied to the device", topic="Data", choices=("uint8", "float32")
    )
    batch_size: int = setting(128, "Images per micro-batch and process", topic="Training")
    test_batch_size: int = setting(
        128, "Images per test batch, all processes together", topic="Training", resumable=True
    )
    base_lr_exp: float | None = setting(
        None, "Set --lr to 2**this times the global batch size", topic="Training"
    )
    start_epoch: int = setting(
        0, "Epochs completed in --load_checkpoint_path, which training skips", topic="Training"
    )
    init_checkpoint: str | None = setting(
        None,
        "File of initial weights from torchvision or timm: .safetensors or .pt",
        topic=_FILES,
        resumable=True,
    )
    restore_path: str | None = setting(
        None, "--mode validate: directory of checkpoints to test", topic=_FILES, resumable=True
    )
    results: str | None = setting(
        None,
        "CSV file for the metrics of all tested checkpoints; default: beside the checkpoints",
        topic=_FILES,
        resumable=True,
    )
    channels_last: bool = setting(
        True, "Store the channels of each pixel together (torch.channels_last)", topic="Execution"
    )

    def __post_init__(self) -> None:
        check_settings(self)


FLAGS = network_flags.network_flags(
    ("Run", ImageRunConfig),
    ("Network", NetworkConfig),
    ("Data", ImagesConfig),
    ("Augmentation", AugmentationConfig),
    ("Loss", ImageLossConfig),
    without=("verify_data", "allow_links"),  # folders of images have no manifest
)

# Flags of the architecture: those not given are taken from the checkpoint, if there is one.
ARCHITECTURE = architecture_of(NetworkConfig, ImagesConfig, AugmentationConfig)


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
        values = values.replaced({"mixup_alpha": 0.0, "cutmix_lambda": 1.0})
    if values["base_lr_exp"] is not None:
        if "lr" in values.given:
            raise ValueError(f"--base_lr_exp {values['base_lr_exp']} contradicts --lr")
        values = values.filled({"lr": 2.0 ** values["base_lr_exp"] * global_batch})
    return values
