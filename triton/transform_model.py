"""Triton's python backend: raw rows to the numericals and ids that another model scores.

`export.py` copies this file into the model repository as `model.py`, with what it imports of dlrm
beside it, as the first step of an ensemble.
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
        from dlrm.serving import backend
        from dlrm.serving.reader import Reader

        config = json.loads(args["model_config"])
        self._backend, self._reader = backend, Reader(directory, config["max_batch_size"])
        backend.log_parser(pb_utils, self._reader)

    def execute(self, requests):
        names = ("input__0", "input__1")
        answers = self._reader.read(self._backend.read(requests, self._reader))
        return self._backend.responses(
            pb_utils,
            [
                inputs if isinstance(inputs, ValueError) else dict(zip(names, inputs, strict=True))
                for inputs in answers
            ],
        )
