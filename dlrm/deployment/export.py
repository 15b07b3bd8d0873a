"""Writes a trained model into a Triton model repository.

    dlrm export --checkpoint DIR --save-dir REPO

The architecture is read from the checkpoint. Before anything is written, the exported model scores
real rows, and must agree with the checkpoint; `report.json` beside it has the differences. A model
whose dataset is gone, as that of `dlrm.fit` on a table in memory, is compared on generated rows.
"""

import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path

from dlrm.command_line import importing
from dlrm.flags import ConfigFlags, UsageError, Values, run_command
from dlrm.serving.network.platforms import PLATFORMS, require
from dlrm.settings import REQUIRED, setting

_DEFAULT = "python"  # of the platforms


@dataclass(frozen=True)
class ExportConfig:
    """The model, and how it is served; field names are those of the flags."""

    checkpoint: str = setting(
        REQUIRED,
        "checkpoint, or a run's directory of checkpoints, whose best one is used",
        uri="read",
    )
    save_dir: Path = setting(
        Path("./triton_models"), "directory of the model repository", uri="add"
    )
    dataset: Path | None = setting(
        None,
        "dataset whose rows to compare the exported model on; default: that of the training, "
        "or generated rows if it is gone and the checkpoint has its transform",
        uri="read",
    )
    dataset_type: str | None = setting(
        None, "type of the dataset; default: as in training", choices=("split", "binary")
    )
    allow_other_transform: bool = setting(
        False, "accept a dataset whose fitted transform is not the checkpoint's"
    )
    allow_links: bool = setting(
        False,
        "allow files of the dataset to be symbolic links to files outside its directory",
    )
    verify_rows: int = setting(65536, "maximum rows to compare the exported model on")
    triton_model_name: str = setting("model", "directory in the repository")
    triton_model_version: int | None = setting(
        None, "version to write; default: 1, or the next one with --update"
    )
    triton_max_batch_size: int = setting(4096, "maximum rows of a batch")
    triton_dyn_batching_delay: float = setting(
        0.0, "milliseconds that dynamic batching waits for further requests"
    )
    triton_no_dyn_batching: bool = setting(False, "do not batch requests")
    triton_engine_count: int = setting(1, "number of model instances")
    triton_no_cuda: bool = setting(False, "serve on the CPU even if there are GPUs")
    triton_keep_versions: int = setting(1, "number of latest versions to serve")
    threads: int = setting(0, "threads of a python instance; default: one per core")
    fp16: bool = setting(False, "clients send numerical features as FP16, as datasets store them")
    ids: str = setting("int64", "type of the ids that clients send", choices=("int64", "int32"))
    output_kind: str = setting("logit", "contents of output__0", choices=("logit", "probability"))
    no_raw: bool = setting(False, "accept ids only, no raw rows")
    embedding_precision: str = setting(
        "fp32", "precision of the embedding tables", choices=("fp32", "fp16")
    )
    update: bool = setting(False, "add a version to an existing model")
    platform: str = _DEFAULT


_PLATFORM_FLAGS = {name.replace("-", "_"): name for name in PLATFORMS}
PlatformConfig = make_dataclass(
    "PlatformConfig",
    [
        (
            flag,
            bool,
            setting(
                False,
                f"{one.help}, by Triton's {' '.join(one.triton)}"
                + " (default)" * (name == _DEFAULT),
            ),
        )
        for (flag, name), one in zip(_PLATFORM_FLAGS.items(), PLATFORMS.values(), strict=True)
    ],
)
LINE = ConfigFlags([("Flags", ExportConfig), ("Platform, one of", PlatformConfig)])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    errors = (ValueError, OSError, ImportError)
    return run_command(
        LINE, lambda values: run(_config(values)), __doc__, arguments, usage=2, errors=errors
    )


def parse(arguments: list[str]) -> ExportConfig:
    """Reads a command line."""
    return _config(LINE.parse(arguments))


def _config(values: Values) -> ExportConfig:
    chosen = [name for flag, name in _PLATFORM_FLAGS.items() if values[flag]]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]}, --{chosen[1]}: expected one platform, got both")
    return values.config(ExportConfig, platform=[*chosen, _DEFAULT][0])


def run(options: ExportConfig) -> None:
    """Runs the command.

    Raises:
        ValueError, OSError, ImportError: errors that the user can fix.
    """
    require("tritonclient.grpc")
    with importing():
        from dlrm.deployment.exporter import export_model

    export_model(options)


if __name__ == "__main__":
    sys.exit(main())
