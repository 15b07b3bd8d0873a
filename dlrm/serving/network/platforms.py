"""Platforms that run an exported network: TorchScript and ONNX Runtime.

The exporter writes a network by one of them, and opens it as a function from numpy arrays to numpy
arrays, to compare it with the trained one.
"""

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.command_line import missing_extra
from dlrm.serving.server.names import IDS, LENGTHS, NUMERICAL, ONNX, WEIGHTS

if TYPE_CHECKING:  # the help of commands names platforms, and is quick without them
    import numpy as np
    from torch import Tensor, nn

Score = Callable[..., "np.ndarray"]  # `Inputs.arrays` -> scores [rows, 1]
INPUTS = (NUMERICAL, IDS, LENGTHS, WEIGHTS)
OUTPUT = "output__0"
_OPSET = 18
_IR_VERSION = 10  # supported by the ONNX Runtime of 2024, and so by Triton images of that year


class Platform(ABC):
    """A form of an exported network, and the runtime that scores by it.

    Attributes:
        name: name among the flags of the exporter.
        help: description.
        file: file or directory that it writes.
        triton: field of `config.pbtxt` that chooses the runtime, and its value.
        takes_raw: whether Triton's Python backend runs it by `dlrm/deployment/model.py`, on the
            CPU, which takes raw rows as well; runtimes of Triton take ids only.
        runtime: name in `--inference_benchmark_runtimes`; None if it is not measured.
        packages: packages of the extra `serve` that it needs.
    """

    name: str
    help: str
    file: str
    triton: tuple[str, str]
    takes_raw: bool = False
    runtime: str | None = None
    packages: tuple[str, ...] = ()

    @abstractmethod
    def write(self, module: "nn.Module", example: "tuple[Tensor, ...]", directory: Path) -> None:
        """Writes a network into a directory.

        Args:
            example: `Inputs.arrays` of some rows.

        Raises:
            ModuleNotFoundError: a package is not installed; the message has the command.
        """

    @abstractmethod
    def open(self, directory: Path) -> Score:
        """Opens the network that `write` wrote into a directory, on the CPU."""


class Onnx(Platform):
    """ONNX, with the weights in a file beside the graph, since they may exceed 2 GB."""

    name, help, file = "onnx", "ONNX Runtime", ONNX
    triton = ("platform", "onnxruntime_onnx")
    runtime: str | None = "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    def write(self, module: "nn.Module", example: "tuple[Tensor, ...]", directory: Path) -> None:
        import torch

        require(*self.packages)
        (directory / ONNX).mkdir(parents=True)
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
        program.save(directory / ONNX / "model.onnx", external_data=True)

    def open(self, directory: Path) -> Score:
        require("onnxruntime")
        from dlrm.serving.server.scorer import open_session

        return open_session(directory / ONNX)


class PythonBackend(Onnx):
    """ONNX, scored by our script in Triton's Python backend."""

    name, triton, takes_raw, runtime = "python", ("backend", "python"), True, None


class TorchScript(Platform):
    """TorchScript.

    Args:
        how: "trace" or "script".
    """

    file, triton = "model.pt", ("platform", "pytorch_libtorch")

    def __init__(self, how: str) -> None:
        self.name = f"ts-{how}"
        self.help = "traced TorchScript" if how == "trace" else "scripted TorchScript"
        self.runtime = "torchscript" if how == "trace" else None
        self._traced = how == "trace"

    def write(self, module: "nn.Module", example: "tuple[Tensor, ...]", directory: Path) -> None:
        import torch

        with torch.no_grad(), warnings.catch_warnings():
            # Triton's PyTorch backend reads TorchScript, which torch warns is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            made = torch.jit.trace(module, example) if self._traced else torch.jit.script(module)
            torch.jit.save(made, os.fspath(directory / self.file))

    def open(self, directory: Path) -> Score:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(os.fspath(directory / self.file))

        @torch.inference_mode()
        def score(*arrays: "np.ndarray") -> "np.ndarray":
            return module(*map(torch.from_numpy, arrays)).numpy()

        return score


def _dynamic(example: "tuple[Tensor, ...]") -> tuple[dict, ...]:
    """Returns the dynamic dimensions of each input: rows and, for bags, the total number of ids."""
    import torch

    batch = {0: torch.export.Dim("batch")}
    if len(example) == 2:
        return batch, batch
    total = {0: torch.export.Dim("total")}
    return (batch, total, batch, total)[: len(example)]


def require(*packages: str) -> None:
    """Checks that packages of the extra `serve` can be imported.

    Raises:
        ModuleNotFoundError: one cannot; the message has the command that installs it.
    """
    for package in packages:
        try:
            __import__(package)
        except ImportError as error:
            raise ModuleNotFoundError(missing_extra(error, "serve")) from error


_ALL = (PythonBackend(), Onnx(), TorchScript("trace"), TorchScript("script"))
PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in _ALL}
# What `--inference_benchmark_runtimes` measures besides the model as trained.
RUNTIMES = {"eager": "plain torch"} | {p.runtime: p.help for p in _ALL if p.runtime}
