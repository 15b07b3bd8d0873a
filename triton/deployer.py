"""Writes a trained model into a Triton model repository: NVIDIA's name and flags of `export.py`.

    python triton/deployer.py --ts-script --save-dir REPO -- --model_checkpoint DIR --dataset DATA

Flags before `--` are those of `export.py`. The checkpoint after it is ours or NVIDIA's, and
determines the architecture: contradicting flags are refused.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also as `python -m triton.deployer`

from dlrm.command_line import end_while_imported

end_while_imported(__name__)

import export
from command_line import new_parser

from dlrm.command_line import exit_code_of, fail
from dlrm.serving.loading import model_config
from dlrm.train.checkpoints.directory import checkpoint_in_use

_SIZES = ("bottom_mlp_sizes", "top_mlp_sizes")
_ARCHITECTURE = ("num_numerical_features", "embedding_dim", "interaction_op", *_SIZES)
_UNUSED = ("embedding_type", "batch_size")  # which change no exported model


def main() -> int:
    """Runs the command; returns its exit status."""
    return exit_code_of(_run)


def _run() -> int:
    words = sys.argv[1:]
    if "--" not in words and not {"-h", "--help"} & {*words}:
        fail("expected -- --model_checkpoint DIR behind the flags of export.py", 2)
    end = words.index("--") if "--" in words else 0
    options = _parse(words[end + 1 :] if "--" in words else words)
    _check_architecture(options)
    flags = ["--triton-no-cuda" if word == "--deploy_cpu" else word for word in words[:end]]
    flags += [f"--checkpoint={options.model_checkpoint}", *(["--fp16"] if options.fp16 else [])]
    flags += [f"--dataset={options.dataset}"] if options.dataset else []
    sys.argv[1:] = flags + (["--triton-no-cuda"] if options.cpu else [])
    return export.main()


def _parse(words: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    flag = parser.add_argument
    flag("--model_checkpoint", required=True, help="checkpoint, or directory of checkpoints")
    flag(
        "--dataset",
        help="dataset whose rows to compare the exported model on; default: that of the training",
    )
    flag("--fp16", action="store_true", help="clients send numerical features as FP16")
    flag("--cpu", action="store_true", help="the same as --triton-no-cuda")
    flag("--dump_perf_data", help="refused: client.py --input DATASET sends a dataset's rows")
    for name in _ARCHITECTURE:
        flag(f"--{name}", nargs="+" if name in _SIZES else 1, help="that of the checkpoint, if any")
    for name in _UNUSED:
        flag(f"--{name}", help="unused")
    options = parser.parse_args(words)
    if options.dump_perf_data:
        fail("--dump_perf_data: python triton/client.py --input DATASET sends a dataset's rows", 2)
    return options


def _check_architecture(options: argparse.Namespace) -> None:
    """Raises ValueError if a flag contradicts the checkpoint."""
    with checkpoint_in_use(options.model_checkpoint) as path:
        config = model_config(path)
    for name in _ARCHITECTURE:
        has, given = getattr(config, name), getattr(options, name)
        found = ",".join(map(str, has)) if name in _SIZES else str(has).removeprefix("cuda_")
        if given and ",".join(given).removeprefix("cuda_") != found:
            raise ValueError(f"--{name} {' '.join(given)}: expected {found}, as {path} has")


if __name__ == "__main__":
    sys.exit(main())
