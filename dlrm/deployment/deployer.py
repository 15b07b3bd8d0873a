"""Writes a trained model into a Triton model repository: NVIDIA's name and flags of `dlrm export`.

    python triton/deployer.py --ts-script --save-dir REPO -- --model_checkpoint DIR --dataset DATA

Flags before `--` are those of `dlrm export`. The checkpoint after it is ours or NVIDIA's, and
determines the architecture: contradicting flags are refused.
"""

import sys

from dlrm.command_line import say_error, text_of
from dlrm.deployment import export
from dlrm.deployment.config import DeployConfig
from dlrm.flags import ConfigFlags, UsageError, Values, run_command
from dlrm.settings import architecture_of


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    words = own = sys.argv[1:] if arguments is None else arguments
    if "--" in words:
        end = words.index("--")
        words, own = words[:end], words[end + 1 :]
    elif not {"-h", "--help"} & {*words}:
        return say_error("expected -- --model_checkpoint DIR behind the flags of export.py", 2)
    line = ConfigFlags([("Flags", DeployConfig)])
    return run_command(line, lambda values: _deploy(words, values), __doc__, own, usage=2)


def _deploy(words: list[str], values: Values) -> int:
    options = values.config(DeployConfig)
    if options.dump_perf_data:
        raise UsageError("--dump_perf_data: dlrm client --input DATASET sends a dataset's rows")
    _check_architecture(options)
    flags = ["--triton-no-cuda" if word == "--deploy_cpu" else word for word in words]
    flags += [f"--checkpoint={options.model_checkpoint}", *(["--fp16"] if options.fp16 else [])]
    flags += [f"--dataset={options.dataset}"] if options.dataset else []
    return export.main(flags + (["--triton-no-cuda"] if options.cpu else []))


def _check_architecture(options: DeployConfig) -> None:
    """Raises ValueError if a flag contradicts the checkpoint."""
    from dlrm.serving.loading import model_config  # torch takes seconds to import
    from dlrm.train.checkpoints.checkpoint import Checkpoint

    with Checkpoint.held(options.model_checkpoint) as held:
        config = model_config(held.path)
    for name in architecture_of(DeployConfig):
        has, given = getattr(config, name), getattr(options, name)
        found, asked = (text_of(value).removeprefix("cuda_") for value in (has, given))
        if given and asked != found:
            raise ValueError(f"--{name} {text_of(given)}: expected {found}, as {held.path} has")


if __name__ == "__main__":
    sys.exit(main())
