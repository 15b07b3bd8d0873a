"""Triton's python backend: raw rows to the numericals and ids that another model scores.

`export.py` copies this file into the model repository as `model.py`, with the modules of dlrm that
it imports beside it, as the first step of an ensemble.
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
        from dlrm.serving.server.reader import Reader, max_rows, named

        config = json.loads(args["model_config"])
        self._backend, self._reader = backend, Reader(directory, max_rows(config))
        self._named = named
        backend.log_parser(pb_utils, self._reader)

    def execute(self, requests):
        answers = self._reader.read(self._backend.read(requests, self._reader))
        return self._backend.responses(
            pb_utils,
            [
                inputs if isinstance(inputs, ValueError) else self._named(inputs)
                for inputs in answers
            ],
        )
