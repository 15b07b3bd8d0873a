"""Model files of the runtimes that serve: TorchScript, ONNX, AOTInductor.

One function writes each kind, and another opens it as a function from numpy arrays to numpy arrays,
so that the exported model can be compared with the trained one.
"""

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Score = Callable[..., np.ndarray]  # `Inputs.arrays` -> scores [rows, 1]
INPUTS = ("input__0", "input__1", "input__2", "input__3")
OUTPUT = "output__0"
ONNX_FILE = "model.onnx"
TORCHSCRIPT_FILE = "model.pt"
_OPSET = 18
_IR_VERSION = 10  # supported by the ONNX Runtime of 2024, and so by Triton images of that year


def write_torchscript(module: nn.Module, example: tuple[Tensor, ...], path: Path, how: str) -> None:
    """Writes `model.pt` by tracing or scripting.

    Args:
        module: the network, in plain operators.
        example: `Inputs.arrays` of some rows.
        path: the file.
        how: "trace" or "script".
    """
    with torch.no_grad(), warnings.catch_warnings():
        # Triton's PyTorch backend reads TorchScript, which torch warns is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(module, example) if how == "trace" else torch.jit.script(module)
        torch.jit.save(scripted, os.fspath(path))


def open_torchscript(path: Path) -> Score:
    """Opens a file of `write_torchscript`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(os.fspath(path))
    return _score_by(module)


def write_onnx(module: nn.Module, example: tuple[Tensor, ...], directory: Path) -> None:
    """Writes `model.onnx` and, beside it, the weights, which may exceed 2 GB.

    Raises:
        ModuleNotFoundError: onnx or onnxscript is not installed; the message has the command.
    """
    _require("onnx", "onnxscript")
    directory.mkdir()
    # Otherwise they report each node, and missing packages that are not needed.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            example,
            dynamo=True,
            input_names=list(INPUTS[: len(example)]),
            output_names=[OUTPUT],
            dynamic_shapes=_dynamic(example),
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    program.model.ir_version = _IR_VERSION
    program.save(directory / ONNX_FILE, external_data=True)


def open_onnx(directory: Path, threads: int | None = None) -> Score:
    """Opens a directory of `write_onnx` in ONNX Runtime on the CPU.

    Args:
        directory: directory with `model.onnx`.
        threads: number of threads; None is one per core.
    """
    _require("onnxruntime")
    from dlrm.serving.scorer import open_session

    return open_session(directory, threads)


def write_package(module: nn.Module, example: tuple[Tensor, ...], path: Path) -> None:
    """Compiles the network by AOTInductor into `model.pt2`; needs a C++ compiler."""
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=_dynamic(example, 1))
        torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path))


def open_package(path: Path) -> Score:
    """Opens a file of `write_package`."""
    return _score_by(torch._inductor.aoti_load_package(os.fspath(path)))


def _score_by(module: Callable[..., Any]) -> Score:
    @torch.inference_mode()
    def score(*arrays: np.ndarray) -> np.ndarray:
        return module(*map(torch.from_numpy, arrays)).numpy()

    return score


def _dynamic(example: tuple[Tensor, ...], least: int | None = None) -> tuple[dict, ...]:
    """Returns the dynamic dimensions of each input: rows and, for bags, the total number of ids."""
    batch = {0: torch.export.Dim("batch", min=least)}
    if len(example) == 2:
        return batch, batch
    total = {0: torch.export.Dim("total", min=least)}
    return (batch, total, batch, total)[: len(example)]


def _require(*packages: str) -> None:
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            raise ModuleNotFoundError(
                f"{package} is not installed ({error}); pip install 'dlrm[serve]' brings it"
            ) from error
