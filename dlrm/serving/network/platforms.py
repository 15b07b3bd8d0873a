"""Platforms that run an exported network: TorchScript and ONNX Runtime.

The exporter writes a network by one of them, and opens it as a function from numpy arrays to numpy
arrays, to compare it with the trained one.
"""

import logging
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dlrm.command_line import missing_extra
from dlrm.serving.server.names import INPUTS, ONNX

if TYPE_CHECKING:  # the help of commands names platforms, and is quick without them
    import numpy as np
    from torch import Tensor, nn

Score = Callable[..., "np.ndarray"]  # `Inputs.arrays` -> scores [rows, 1]
OUTPUT = "output__0"
_OPSET = 18
_IR_VERSION = 10  # supported by the ONNX Runtime of 2024, and so by Triton images of that year
_SCRIPT = "model.pt"


class Platform(NamedTuple):
    """A form of an exported network, and the runtime that scores by it.

    Attributes:
        triton: field of `config.pbtxt` that chooses the runtime, and its value.
        write: writes a network into a directory; its example is `Inputs.arrays` of some rows.
            ModuleNotFoundError if a package is not installed; the message has the command.
        open: opens, on the CPU, the network that `write` wrote into a directory.
        takes_raw: whether Triton's Python backend runs it by `dlrm/deployment/model.py`, on the
            CPU, which takes raw rows as well; runtimes of Triton take ids only.
        packages: packages of the extra `serve` that it needs.
    """

    triton: tuple[str, str]
    write: Callable[["nn.Module", "tuple[Tensor, ...]", Path], None]
    open: Callable[[Path], Score]
    takes_raw: bool = False
    packages: tuple[str, ...] = ()


def _write_onnx(module: "nn.Module", example: "tuple[Tensor, ...]", directory: Path) -> None:
    """Writes ONNX, with the weights in a file beside the graph, since they may exceed 2 GB."""
    import torch

    require(*_OF_ONNX)
    (directory / ONNX).mkdir(parents=True)
    # Otherwise they report each node, and missing packages that are not needed.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    batch, total = {0: torch.export.Dim("batch")}, {0: torch.export.Dim("total")}
    dynamic = (batch, total, batch, total) if len(example) > 2 else (batch, batch)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            example,
            dynamo=True,
            input_names=list(INPUTS[: len(example)]),
            output_names=[OUTPUT],
            dynamic_shapes=dynamic[: len(example)],
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.ir_version = _IR_VERSION
    program.save(directory / ONNX / "model.onnx", external_data=True)


def _open_onnx(directory: Path) -> Score:
    require("onnxruntime")
    from dlrm.serving.server.scorer import open_session

    return open_session(directory / ONNX)


def _write_script(
    module: "nn.Module", example: "tuple[Tensor, ...]", directory: Path, traced: bool
) -> None:
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        # Triton's PyTorch backend reads TorchScript, which torch warns is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        made = torch.jit.trace(module, example) if traced else torch.jit.script(module)
        torch.jit.save(made, os.fspath(directory / _SCRIPT))


def _open_script(directory: Path) -> Score:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(os.fspath(directory / _SCRIPT))

    @torch.inference_mode()
    def score(*arrays: "np.ndarray") -> "np.ndarray":
        return module(*map(torch.from_numpy, arrays)).numpy()

    return score


def require(*packages: str) -> None:
    """Checks that packages of the extra `serve` can be imported.

    Raises:
        ModuleNotFoundError: one cannot; the message has the command that installs it.
    """
    for package in packages:
        try:
            __import__(package)
        except (ImportError, RuntimeError) as error:  # RuntimeError: of tritonclient without grpc
            raise ModuleNotFoundError(missing_extra(error, "serve")) from error


_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
_SCRIPTED = ("platform", "pytorch_libtorch")
PLATFORMS = {
    "python": Platform(("backend", "python"), _write_onnx, _open_onnx, True, _OF_ONNX),
    "onnx": Platform(("platform", "onnxruntime_onnx"), _write_onnx, _open_onnx, packages=_OF_ONNX),
    "ts-trace": Platform(_SCRIPTED, partial(_write_script, traced=True), _open_script),
    "ts-script": Platform(_SCRIPTED, partial(_write_script, traced=False), _open_script),
}
# What `--inference_benchmark_runtimes` measures besides the model as trained.
RUNTIMES = {
    "eager": "plain torch",
    "onnx": "ONNX Runtime",
    "torchscript": "traced TorchScript",
}
