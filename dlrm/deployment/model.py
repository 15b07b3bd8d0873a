"""Triton's python backend: scores of ids or of raw rows, by ONNX Runtime and without torch.

A version without a network, the first step of an ensemble, answers raw rows with their numericals
and ids. `export.py` copies this file into the model repository, with the modules of dlrm that it
imports beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """An instance of a version of the model."""

    _answer: Any
    _outputs: Any

    def initialize(self, args):
        directory = Path(args["model_repository"], args["model_version"])
        sys.path.insert(0, str(directory))  # there are the files of dlrm
        from dlrm.serving.server import backend
        from dlrm.serving.server.names import ONNX
        from dlrm.serving.server.reader import Reader, max_rows, named

        config = json.loads(args["model_config"])
        self._backend, self._outputs = backend, named
        if (directory / ONNX).is_dir():
            from dlrm.serving.server.scorer import OnnxScorer

            threads = int(config["parameters"]["threads"]["string_value"])
            scorer = OnnxScorer(directory, max_rows(config), threads)
            self._answer, self._reader = scorer.answer, scorer.reader
            self._outputs = lambda scores: {"output__0": scores}
        else:
            self._reader = Reader(directory, max_rows(config))
            self._answer = self._reader.read
        backend.log_parser(pb_utils, self._reader)

    def execute(self, requests):
        answers = self._answer(self._backend.read(requests, self._reader))
        found = [a if isinstance(a, ValueError) else self._outputs(a) for a in answers]
        return self._backend.responses(pb_utils, found)
