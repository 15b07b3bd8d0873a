"""Requests to a model's inputs, in a server without torch.

`triton/export.py` puts a copy of this file, and of what it imports, into the model repository.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm.data import layout
from dlrm.serving.rows import Inputs, RowTransform, Text, check_inputs, text_of_tensor

FACTS = "model.json"
NUMERICAL, IDS, RAW = "input__0", "input__1", "raw__0"
Request = dict[str, np.ndarray]  # input -> tensor; those that were left out are not in it


class Reader:
    """Makes inputs of requests; a bad request fails alone.

    Args:
        directory: a version of a served model, with `model.json` and, for raw rows, `transform/`.
    """

    def __init__(self, directory: Path) -> None:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        self._num_numerical: int = facts["num_numerical"]
        self._table_sizes: list[int] = [] if facts["hashed"] else facts["table_sizes"]
        self._names: list[str] = facts["categorical_names"]
        self._dtypes = np.dtype(facts["numerical_dtype"]), np.dtype(facts["ids_dtype"])
        has_transform = (directory / layout.TRANSFORM).is_dir()
        self._transform = RowTransform.load(directory) if has_transform else None

    def read(self, requests: Sequence[Request]) -> list[Inputs | ValueError]:
        """Returns the inputs of each request, or what is wrong with it.

        They are read together, which costs little more than reading one; only where that fails is
        each read alone.
        """
        try:
            return self._together(requests)
        except ValueError as error:
            if len(requests) == 1:
                return [error]
            return [self.read([request])[0] for request in requests]

    def _together(self, requests: Sequence[Request]) -> list[Inputs | ValueError]:
        kinds = {tuple(sorted(request)) for request in requests}
        if len(kinds) > 1:
            return [self.read([request])[0] for request in requests]
        given = kinds.pop()
        if given == (RAW,) and self._transform:
            inputs = self._transform(_text([request[RAW] for request in requests], self._transform))
            rows = [len(request[RAW]) for request in requests]
        elif given == (NUMERICAL, IDS):
            inputs = Inputs(*(np.concatenate([r[name] for r in requests]) for name in given))
            check_inputs(inputs, self._num_numerical, self._table_sizes, self._names)
            rows = [len(request[IDS]) for request in requests]
        else:
            either = f", or {RAW} alone" if self._transform else ""
            raise ValueError(
                f"expected the inputs {NUMERICAL} and {IDS}{either}; got {', '.join(given) or '-'}"
            )
        inputs = Inputs(
            *(a.astype(d, copy=False) for a, d in zip(inputs, self._dtypes, strict=True))
        )
        ends = np.cumsum(rows)
        return [
            Inputs(inputs.numerical[end - count : end], inputs.ids[end - count : end])
            for count, end in zip(rows, ends, strict=True)
        ]


def _text(tensors: Sequence[np.ndarray], transform: RowTransform) -> Text:
    width = max(tensor.shape[1] for tensor in tensors)
    padded = [np.pad(tensor, ((0, 0), (0, width - tensor.shape[1]))) for tensor in tensors]
    return text_of_tensor(np.concatenate(padded), len(transform.names))
