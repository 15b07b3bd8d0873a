"""Requests to a model's inputs, in a server without torch.

`triton/export.py` puts a copy of this file, and of what it imports, into the model repository.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.log_lines import LONGEST_LINE
from dlrm.documents import read_json
from dlrm.files import within
from dlrm.serving.rows import Inputs, RowTransform, check_shapes, check_values, text_of_tensors

FACTS = "model.json"
NUMERICAL, IDS, RAW = "input__0", "input__1", "raw__0"
Request = dict[str, np.ndarray]  # input -> tensor; those that were left out are not in it
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def together_or_alone(
    answer: Callable[[Sequence[Item]], Sequence[Answer]], items: Sequence[Item]
) -> list[Answer | ValueError]:
    """Returns the answers to items, or what is wrong with one.

    They are answered together, which costs little more than answering one; if that fails, whatever
    the reason, each is answered alone, so that only the faulty ones fail.
    """
    if not items:
        return []
    try:
        return list(answer(items))
    except Exception as error:
        problem = as_value_error(error)
    if len(items) == 1:
        return [problem]
    return [together_or_alone(answer, [item])[0] for item in items]


def as_value_error(error: Exception) -> ValueError:
    """Returns what a client is told of an error of its request.

    It forgets where it was raised: the frames there hold the arrays of the whole batch, and, as
    they hold the error too, would keep them until garbage is collected.
    """
    if not isinstance(error, ValueError):
        return ValueError(f"expected a request that can be answered, got {error!r}")
    error.__context__ = None
    return error.with_traceback(None)


class Reader:
    """Makes inputs of requests; a bad request fails alone.

    Args:
        directory: a version of a served model, with `model.json` and, for raw rows, `transform/`.
        max_rows: of a request, as the model's configuration says.

    Attributes:
        transform: of raw rows; None where the model was exported without.
    """

    def __init__(self, directory: Path, max_rows: int) -> None:
        folder = directory / layout.TRANSFORM
        fitted = [f"{layout.TRANSFORM}/{path.name}" for path in folder.glob("*")]
        for name in (FACTS, *fitted):
            within(directory, name, directory)
        facts = read_json(directory / FACTS)
        self._max_rows = max_rows
        self._num_numerical: int = facts["num_numerical"]
        self._table_sizes: list[int] = [] if facts["hashed"] else facts["table_sizes"]
        self._names: list[str] = facts["categorical_names"]
        self._dtypes = np.dtype(facts["numerical_dtype"]), np.dtype(facts["ids_dtype"])
        self.transform: RowTransform | None = None
        if (directory / layout.TRANSFORM).is_dir():
            self.transform = RowTransform.load(directory)
            self._read_raw([{RAW: np.zeros((1, 0), np.uint8)}])  # builds the lookups of ids

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError where an input is larger than any request may be; no data is needed."""
        widths = {NUMERICAL: self._num_numerical, IDS: len(self._names), RAW: LONGEST_LINE}
        width = widths.get(name, 0)
        if len(shape) != 2 or not 0 <= shape[0] <= self._max_rows or not 0 <= shape[1] <= width:
            raise ValueError(
                f"{name}: expected [rows, width] of up to {self._max_rows} rows and a width of up "
                f"to {width}, got {list(shape)}"
            )

    def read(self, requests: Sequence[Request | ValueError]) -> list[Inputs | ValueError]:
        """Returns the inputs of each request, or what is wrong with it.

        Args:
            requests: tensors, or what was wrong with them already.
        """
        answers: dict[int, Inputs | ValueError] = {}
        raw: dict[int, Request] = {}
        ids: dict[int, Request] = {}
        for place, request in enumerate(requests):
            try:
                checked = self._check(request)
                (raw if RAW in checked else ids)[place] = checked
            except Exception as error:
                answers[place] = as_value_error(error)
        for read, group in ((self._read_raw, raw), (self._read_ids, ids)):
            found = together_or_alone(read, list(group.values()))
            answers.update(zip(group, found, strict=True))
        return [answers[place] for place in range(len(requests))]

    def _check(self, request: Request | ValueError) -> Request:
        """Checks names, shapes and types of a request."""
        if isinstance(request, ValueError):
            raise request
        given = tuple(sorted(request))
        if given not in ((NUMERICAL, IDS), *([(RAW,)] if self.transform else [])):
            either = f", or {RAW} alone" if self.transform else ""
            raise ValueError(
                f"expected the inputs {NUMERICAL} and {IDS}{either}; got {', '.join(given) or '-'}"
            )
        for name, tensor in request.items():
            self.check_shape(name, tensor.shape)
        if given != (RAW,):
            check_shapes(_inputs(request), self._num_numerical, len(self._names))
        elif request[RAW].dtype != np.uint8:
            raise ValueError(f"{RAW}: expected uint8, got {request[RAW].dtype}")
        return request

    def _read_raw(self, requests: Sequence[Request]) -> list[Inputs]:
        assert self.transform is not None
        tensors = [request[RAW] for request in requests]
        inputs = self.transform(text_of_tensors(tensors, len(self.transform.names)))
        return self._divided(inputs, tensors)

    def _read_ids(self, requests: Sequence[Request]) -> list[Inputs]:
        pairs = [_inputs(request) for request in requests]
        inputs = Inputs(*(np.concatenate(arrays) for arrays in zip(*pairs, strict=True)))
        check_values(inputs, self._table_sizes, self._names)
        return self._divided(inputs, [ids for _, ids in pairs])

    def _divided(self, inputs: Inputs, tensors: Sequence[np.ndarray]) -> list[Inputs]:
        """Returns the inputs of each request, which has as many rows as its tensor."""
        numerical, ids = (
            array.astype(dtype, copy=False)
            for array, dtype in zip(inputs, self._dtypes, strict=True)
        )
        ends = np.cumsum([len(tensor) for tensor in tensors])
        return [
            Inputs(numerical[end - len(tensor) : end], ids[end - len(tensor) : end])
            for end, tensor in zip(ends, tensors, strict=True)
        ]


def _inputs(request: Request) -> Inputs:
    return Inputs(request[NUMERICAL], request[IDS])
