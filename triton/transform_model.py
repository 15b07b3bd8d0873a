"""Triton's python backend: raw rows to the numericals and ids that another model scores.

`export.py` copies this file into the model repository as `model.py`, with what it imports beside
it, as the first step of an ensemble. See `scoring_model.py`, too.
"""

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of a version of the model."""

    def initialize(self, args):
        directory = Path(args["model_repository"], args["model_version"])
        sys.path.insert(0, str(directory))  # the files of dlrm that were exported with the model
        from dlrm.serving.reader import Reader

        self._reader = Reader(directory)

    def execute(self, requests):
        tensors = [
            {tensor.name(): np.from_dlpack(tensor) for tensor in request.inputs()}
            for request in requests
        ]
        return [_response(inputs) for inputs in self._reader.read(tensors)]


def _response(inputs):
    if isinstance(inputs, ValueError):
        error = pb_utils.TritonError(str(inputs), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    tensors = zip(("input__0", "input__1"), inputs, strict=True)
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor.from_dlpack(name, np.ascontiguousarray(array)) for name, array in tensors]
    )
