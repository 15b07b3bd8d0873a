"""The command line of `dlrm.scripts.main` and `dist_main`.

Names, defaults and meanings are those of NVIDIA's PyTorch DLRM of June 2020, with its later flags
and ours added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm.api.defaults import RECIPES
from dlrm.flags import ConfigFlags, UsageError, Values
from dlrm.model.layers.choices import ensemble_kinds, interaction_names
from dlrm.settings import setting
from dlrm.tasks.config import ADAM_SWITCHES, CLICK_CONFIGS
from dlrm.tasks.presets import DLRM_PRESETS

# Runtimes that may be measured besides the model as trained, with their meanings.
RUNTIMES = {
    "eager": "plain torch",
    "onnx": "ONNX Runtime",
    "torchscript": "traced TorchScript",
    "aot": "AOTInductor, which takes a minute to compile",
}
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
# Those of October 2021 and later, on one GPU and on several.
NVIDIA_2021: dict[str, Any] = DIST_MAIN | {
    "test_batch_size": 65536,
    "embedding_type": "custom_cuda",
    "dataset_type": "parametric",
}


@dataclass(frozen=True)
class CommandConfig:
    """The task of the command, and sources of other flags; field names are those of the flags."""

    mode: str = setting("train", "Task to perform", choices=MODES, resumable=True)
    preset: str | None = setting(
        None,
        "Defaults of a published run instead; gaudi_medium: Habana's medium DLRM for Gaudi, on "
        "random samples; mlperf_dcnv2: DLRM-DCNv2 of MLPerf Training, with three cross layers of "
        "rank 512, on random samples of its sizes unless --dataset is given",
        choices=DLRM_PRESETS,
        resumable=True,  # the flags that presets, defaults and recipes set are compared themselves
    )
    recipe: str | None = setting(
        None,
        "Choose the flags that are not given from the number of training rows and from their "
        "fields, and print the choices; for training on --dataset",
        choices=RECIPES,
        resumable=True,
    )
    defaults: str = setting(
        "2020",
        "Defaults of the flags: NVIDIA's of June 2020, which differ between main and dist_main, "
        "or those of October 2021 and later",
        choices=("2020", "2021"),
        resumable=True,
    )
    bottom_features_ordered: bool = setting(
        False, "Accepted; features always keep the dataset's order", resumable=True
    )
    seeds: str | None = setting(
        None,
        "Several seeds instead of --seed, as 1-5 or 1,2,7: train a model for each, one after "
        "another, in --save_checkpoint_path, and save the mean of their logits there as one model",
        topic="Training",
        resumable=True,
    )
    Adam_embedding_optimizer: bool = setting(
        False, "The same as --embedding_optimizer adam", topic="Optimizers"
    )
    Adam_MLP_optimizer: bool = setting(
        False, "The same as --mlp_optimizer adam", topic="Optimizers"
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
# Parts of errors about NVIDIA's earlier flags, and their replacements here.
_GONE = {
    "--mode=prof-train": "--mode train --profile 10 records steps",
    "'fp16'": "--amp computes in half precision",
    "'nofp16'": "float32 is the default",
    "'self_interaction'": "NVIDIA's later versions have none, either",
    # Formerly a switch, now followed by a name.
    **dict.fromkeys(
        ("flag --synthetic_dataset ", "flag --synthetic_dataset="),
        "--dataset_type synthetic_gpu makes random rows",
    ),
}


def make_flags(defaults: Mapping[str, Any] | None = None) -> ConfigFlags:
    """Returns the command line, with other defaults for some flags."""
    return ConfigFlags((("Run", CommandConfig), *CLICK_CONFIGS), _TOPICS, defaults)


def parse(arguments: list[str], flags: ConfigFlags | None = None) -> Values:
    """Returns the flags of a command line, by name; a preset overrides other defaults.

    Args:
        flags: flags of the command; by default those of `dlrm.scripts.main`.
    """
    try:
        values = (flags or make_flags()).parse(arguments)
    except UsageError as error:
        for text, instead in _GONE.items():
            if text in f"{error} ":
                raise UsageError(f"{error}; {instead}") from None
        raise
    interaction_names(values["interaction_op"])
    ensemble_kinds(values["ensemble"])
    values = Values(dict(sorted(values.items())), values.given)
    values = values.filled(NVIDIA_2021 if values["defaults"] == "2021" else {})
    return _with_switches(_with_preset(values))


def _with_preset(values: Values) -> Values:
    """Fills in the preset's values, including those of its data unless other data are given."""
    preset = DLRM_PRESETS.get(values["preset"], {})
    named, shape = values["dataset"], values["synthetic_dataset_use_feature_spec"]
    kind = values["dataset_type"] if "dataset_type" in values.given else None
    if not kind.startswith("synthetic") if kind else named and not shape:
        of_data = ("synthetic_", "dataset_type", "num_numerical_features")
        preset = {name: value for name, value in preset.items() if not name.startswith(of_data)}
    return values.filled(preset)


def _with_switches(values: Values) -> Values:
    """Translates NVIDIA's switches for Adam to the flags that they stand for."""
    for switch, flag in ADAM_SWITCHES.items():
        if values[switch]:
            if flag in values.given and values[flag] != "adam":
                raise ValueError(f"--{switch} contradicts --{flag} {values[flag]}")
            values = Values({**values, flag: "adam"}, values.given)
    return values
