"""The command line of `dlrm.scripts.main` and `dist_main`.

Names, defaults and meanings are those of NVIDIA's PyTorch DLRM of June 2020, with its later flags
and ours added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm.flags import ConfigFlags, Values
from dlrm.model.layers.choices import ensemble_kinds, interaction_names
from dlrm.serving.network.platforms import RUNTIMES
from dlrm.settings import setting
from dlrm.tasks.config import CLICK_CONFIGS, RECIPES

MODES = ("train", "test", "inference_benchmark")
# The defaults of `dist_main`: those of NVIDIA's program of June 2020 on several GPUs.
DIST_MAIN: dict[str, Any] = {
    "batch_size": 65536,
    "test_batch_size": 131072,
    "lr": 24.0,
    "warmup_steps": 8000,
    "decay_steps": 24000,
    "decay_start_step": 48000,
    "embedding_type": "joint_sparse",
}


@dataclass(frozen=True)
class CommandConfig:
    """The task of the command, and sources of other flags; field names are those of the flags."""

    mode: str = setting("train", "Task to perform", choices=MODES, resumable=True)
    recipe: str | None = setting(
        None,
        "Choose the flags that are not given from the number of training rows and from their "
        "fields, and print the choices; for training on --dataset",
        choices=RECIPES,
        resumable=True,
    )
    bottom_features_ordered: bool = setting(
        False, "Accepted; features always keep the dataset's order", resumable=True
    )
    seeds: str | None = setting(
        None,
        "Several seeds instead of --seed, as 1-5 or 1,2,7: train a model for each, one after "
        "another, in --save_checkpoint_path, and report the mean and spread of each metric",
        topic="Training",
        resumable=True,
    )
    output_dir: str = setting(
        "/tmp",
        "Accepted, and unused; see --save_checkpoint_path",
        topic="Checkpoints and files",
        resumable=True,
    )
    inference_benchmark_batch_sizes: tuple[int, ...] = setting(
        (1, 64, 4096),
        "Batch sizes for inference throughput and latency measurements; by default at most the "
        "rows of the test set",
        topic="Inference benchmark",
        resumable=True,
    )
    inference_benchmark_steps: int = setting(
        200,
        "Number of batches that are timed for each batch size and runtime",
        topic="Inference benchmark",
        least=1,
        resumable=True,
    )
    inference_benchmark_runtimes: tuple[str, ...] = setting(
        ("native",),
        f"Runtimes to measure, of {', '.join(('native', *RUNTIMES))}: the model as trained, "
        + ", ".join(RUNTIMES.values()),
        topic="Inference benchmark",
        resumable=True,
    )


_TOPICS = (
    *("Data", "Checkpoints and files", "Training", "Learning rate", "Optimizers", "Model", "Run"),
    *("Precision", "Tables larger than memory", "Inference benchmark", "Synthetic data"),
)


def make_flags(defaults: Mapping[str, Any] | None = None) -> ConfigFlags:
    """Returns the command line, with other defaults for some flags."""
    return ConfigFlags((("Run", CommandConfig), *CLICK_CONFIGS), _TOPICS, defaults)


def parse(arguments: list[str], flags: ConfigFlags | None = None) -> Values:
    """Returns the flags of a command line, by name.

    Args:
        flags: flags of the command; by default those of `dlrm.scripts.main`.
    """
    values = (flags or make_flags()).parse(arguments)
    interaction_names(values["interaction_op"])
    ensemble_kinds(values["ensemble"])
    return Values(dict(sorted(values.items())), values.given)
