"""Triton's python backend: scores of ids or of raw rows, by ONNX Runtime and without torch.

`export.py` copies this file into the model repository as `model.py`, with the modules of dlrm that
it imports beside it.
"""

import json
import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """An instance of a version of the model."""

    def initialize(self, args):
        directory = Path(args["model_repository"], args["model_version"])
        sys.path.insert(0, str(directory))  # there are the files of dlrm
        from dlrm.serving.server import backend
        from dlrm.serving.server.reader import max_rows
        from dlrm.serving.server.scorer import Scorer

        config = json.loads(args["model_config"])
        threads = int(config["parameters"]["threads"]["string_value"])
        self._backend = backend
        self._scorer = Scorer(directory, max_rows(config), threads)
        backend.log_parser(pb_utils, self._scorer.reader)

    def execute(self, requests):
        answers = self._scorer(self._backend.read(requests, self._scorer.reader))
        return self._backend.responses(
            pb_utils,
            [
                answer if isinstance(answer, ValueError) else {"output__0": answer}
                for answer in answers
            ],
        )
