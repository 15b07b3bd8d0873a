"""One trained network in every runtime that can serve it, for timing."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from dlrm.data.clicks.batch import Batch
from dlrm.model.dlrm import DLRM
from dlrm.serving.network.exportable import Exportable, example_like
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.rows.inputs import Inputs

_EXPORTED = {"onnx": PLATFORMS["onnx"], "torchscript": PLATFORMS["ts-trace"]}
Predict = Callable[[Batch], object]


@contextmanager
def open_runtimes(
    model: DLRM, names: Sequence[str], example: Batch, note: Callable[[str], None]
) -> Iterator[dict[str, Predict]]:
    """Yields functions that score a batch, by the name of their runtime.

    Runtimes that cannot run here are left out, and `note` receives the reason.

    Args:
        model: a trained network, on the CPU, like the runtimes.
        example: a batch like all others: with one id per table or lengths, and any weights of ids.
        note: called with the reason for each that is left out.
    """
    opened: dict[str, Predict] = {}
    with tempfile.TemporaryDirectory(prefix="dlrm-runtimes-") as directory:
        for name in names:
            try:
                opened[name] = _open(name, model, example, Path(directory, name))
            except Exception as error:  # of a missing compiler or package
                note(f"{name}: left out, {str(error).splitlines()[0]}")
        yield opened


def _open(name: str, model: DLRM, example: Batch, directory: Path) -> Predict:
    exported = Exportable(model, quantize_tables(model, "fp32"))
    if name == "eager":
        return lambda batch: exported(*_tensors(batch))
    inputs = Inputs(*(tensor.numpy() for tensor in _tensors(example)))
    directory.mkdir()
    _EXPORTED[name].write(exported, example_like(inputs), directory)
    score = _EXPORTED[name].open(directory)
    return lambda batch: score(*(tensor.numpy() for tensor in _tensors(batch)))


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    """Returns a batch in the form that exported models take; see `Inputs.arrays`."""
    lengths = None if batch.lengths is None else batch.lengths.long()
    tensors = batch.numerical.float(), batch.categorical.long(), lengths, batch.id_weights
    return tuple(tensor for tensor in tensors if tensor is not None)
