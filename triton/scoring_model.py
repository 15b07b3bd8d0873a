"""Triton's python backend: scores of ids or of raw rows, by ONNX Runtime and without torch.

`export.py` copies this file into the model repository as `model.py`, with what it imports beside
it. Tensors pass as DLPack both ways: the backend of Triton 2.51 knows numpy arrays of numpy 1 only.
"""

import json
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of a version of the model."""

    def initialize(self, args):
        directory = Path(args["model_repository"], args["model_version"])
        sys.path.insert(0, str(directory))  # the files of dlrm that were exported with the model
        from dlrm.serving.scorer import Scorer

        parameters = json.loads(args["model_config"])["parameters"]
        self._scorer = Scorer(directory, int(parameters["threads"]["string_value"]))

    def execute(self, requests):
        tensors = [
            {tensor.name(): np.from_dlpack(tensor) for tensor in request.inputs()}
            for request in requests
        ]
        return [_response(answer) for answer in self._scorer(tensors)]


def _response(answer):
    if isinstance(answer, ValueError):
        error = pb_utils.TritonError(str(answer), pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("output__0", answer)])
