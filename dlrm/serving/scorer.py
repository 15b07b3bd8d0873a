"""Requests to scores by ONNX Runtime, in a server without torch.

`triton/export.py` puts a copy of this file, and of what it imports, into the model repository.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from dlrm.serving.reader import Reader, Request

ONNX = "model.onnx"  # a directory


class Scorer:
    """Scores requests by ONNX Runtime.

    Args:
        directory: a version of a served model, with `model.onnx/` too.
        threads: to compute with; 0 is one a core.
    """

    def __init__(self, directory: Path, threads: int = 0) -> None:
        self._reader = Reader(directory)
        self._score = open_session(directory / ONNX, threads)

    def __call__(self, requests: Sequence[Request]) -> list[np.ndarray | ValueError]:
        """Returns the scores of each request, float32 `[rows, 1]`, or what is wrong with it."""
        read = self._reader.read(requests)
        good = [inputs for inputs in read if not isinstance(inputs, ValueError)]
        if not good:
            return [answer for answer in read if isinstance(answer, ValueError)]
        scores = self._score(
            np.concatenate([inputs.numerical for inputs in good]),
            np.concatenate([inputs.ids for inputs in good]),
        )
        parts = iter(np.split(scores, np.cumsum([len(inputs.ids) for inputs in good])[:-1]))
        return [inputs if isinstance(inputs, ValueError) else next(parts) for inputs in read]


def open_session(
    directory: Path, threads: int | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Opens `model.onnx` of a directory; returns numericals, ids -> scores `[rows, 1]`.

    Threads that wait sleep and do not spin: a server's other threads need the cores more.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    path = str(directory / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    first, second = (node.name for node in session.get_inputs())

    def score(numerical: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return session.run(None, {first: numerical, second: ids})[0]

    return score
