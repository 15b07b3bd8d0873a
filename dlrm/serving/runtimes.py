"""One trained network in every runtime that could serve it, to be timed side by side."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dlrm.data.clicks.batch import Batch
from dlrm.model.dlrm import DLRM
from dlrm.serving import platforms
from dlrm.serving.exportable import ExportableDLRM
from dlrm.serving.platforms import Score
from dlrm.serving.quantize import quantize_tables

RUNTIMES = ("eager", "torchscript", "onnx", "aot")
Predict = Callable[[Batch], object]


@contextmanager
def open_runtimes(
    model: DLRM, names: Sequence[str], note: Callable[[str], None]
) -> Iterator[dict[str, Predict]]:
    """Yields functions that score a batch of one id a table, by the name of their runtime.

    eager is plain torch, onnx ONNX Runtime, aot AOTInductor. What cannot run here is left out, and
    `note` is told why.

    Args:
        model: a trained network; on the CPU, as the others are.
        names: of `RUNTIMES`.
        note: told what is left out.
    """
    opened: dict[str, Predict] = {}
    with tempfile.TemporaryDirectory(prefix="dlrm-runtimes-") as directory:
        for name in names:
            try:
                opened[name] = _of_tensors(_open(name, model, Path(directory)))
            except Exception as error:  # of a compiler or of a package that is not there
                note(f"{name}: left out, {str(error).splitlines()[0]}")
        yield opened


def _open(name: str, model: DLRM, directory: Path) -> Callable[[Tensor, Tensor], object]:
    config = model.config
    exported = ExportableDLRM(model, quantize_tables(model, "fp32")).eval()
    numerical = torch.zeros(2, config.num_numerical_features)
    example = numerical, torch.zeros(2, len(config.table_sizes), dtype=torch.long)
    if name == "eager":
        return exported
    if name == "torchscript":
        platforms.write_torchscript(exported, example, directory / "model.pt", "trace")
        return _of_arrays(platforms.open_torchscript(directory / "model.pt"))
    if name == "onnx":
        platforms.write_onnx(exported, example, directory / "onnx")
        return _of_arrays(platforms.open_onnx(directory / "onnx"))
    platforms.write_package(exported, example, directory / "model.pt2")
    return _of_arrays(platforms.open_package(directory / "model.pt2"))


def _of_arrays(score: Score) -> Callable[[Tensor, Tensor], object]:
    return lambda numerical, ids: score(numerical.numpy(), ids.numpy())


def _of_tensors(score: Callable[[Tensor, Tensor], object]) -> Predict:
    return lambda batch: score(batch.numerical.float(), batch.categorical.long())
