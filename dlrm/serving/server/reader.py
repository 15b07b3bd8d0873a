"""Turns requests into a model's inputs, in a server without torch.

The exporter copies this file, and those that it imports, into the model repository.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm.data import layout
from dlrm.data.sources.log_lines import LONGEST_LINE
from dlrm.data.transform.transform import Transform
from dlrm.documents import read_json
from dlrm.files import within
from dlrm.manifest import check_listed, read_manifest
from dlrm.serving.rows.inputs import Inputs, check_lengths, check_shapes, check_values
from dlrm.serving.rows.raw import inputs_of_text, text_of_tensors
from dlrm.serving.server.names import FACTS, IDS, INPUTS, KIND, LENGTHS, NUMERICAL, RAW, WEIGHTS

MOST_IDS = 1 << 27  # of a request without a limit per row
Request = dict[str, np.ndarray]  # input -> tensor, without omitted inputs
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def check_version(directory: Path) -> None:
    """Compares all files of a version of a served model with their checksums.

    A damaged network would give finite scores, which no check of requests notices.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
    """
    read_manifest(directory, KIND, check_crc=True)


def max_rows(config: Mapping[str, Any]) -> int:
    """Returns the maximum rows of a request, from a model's configuration.

    Models of lists have `max_batch_size` 0; see triton/README.md.
    """
    return int(config.get("max_batch_size") or config["parameters"]["max_rows"]["string_value"])


def together_or_alone(
    answer: Callable[[Sequence[Item]], Sequence[Answer]], items: Sequence[Item]
) -> list[Answer | ValueError]:
    """Returns the answers to items, or the error of one.

    They are answered together, which costs little more than one; if that fails for any reason, each
    is answered separately, so that only faulty ones fail.
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
    """Returns the message to a client about an error of its request.

    It drops the traceback, whose frames hold the arrays of the whole batch and the error itself,
    and would keep them until garbage collection.
    """
    if not isinstance(error, ValueError):
        return ValueError(f"expected a request that can be answered, got {error!r}")
    error.__context__ = None
    return error.with_traceback(None)


class Reader:
    """Makes inputs from requests; a bad request does not affect others.

    Args:
        directory: a version of a served model, with `model.json` and, for raw rows, `transform/`.

    Attributes:
        transform: transform of raw rows; None if the model was exported without it.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
    """

    def __init__(self, directory: Path, max_rows: int) -> None:
        check_version(directory)
        folder = directory / layout.TRANSFORM
        for path in (directory / FACTS, *folder.glob("*")):
            within(directory, str(path.relative_to(directory)), directory)
        facts = read_json(directory / FACTS)
        self._max_rows, self._num_numerical = max_rows, facts["num_numerical"]
        self._table_sizes: list[int] = [] if facts["hashed"] else facts["table_sizes"]
        self._names = layout.field_names(self._num_numerical, 0)[0], facts["categorical_names"]
        dtypes = (facts["numerical_dtype"], facts["ids_dtype"], np.int32, np.float32)
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        lists: dict | None = facts.get("lists")  # None: one id per row and table
        self._taken = [NUMERICAL, IDS]
        self._longest: dict[int, int] | None = None
        if lists is not None:
            self._taken += [LENGTHS, *[WEIGHTS] * lists["weighted"]]
            if lists["longest"] is not None:
                self._longest = {int(table): most for table, most in lists["longest"].items()}
        self.transform: Transform | None = None
        if folder.is_dir():
            check_listed(directory, layout.TRANSFORM)
            self.transform = Transform.load(folder)
            self.transform.check_all()
            self._names = self.transform.schema.numerical_names, self._names[1]
            try:
                self.transform.build()
            except ImportError as error:
                raise ImportError(
                    f"{error}; the server's Python needs pyarrow for raw rows of tables"
                ) from error

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError if an input is larger than any request may be; needs no data."""
        if LENGTHS in self._taken and name in (IDS, WEIGHTS):
            most = self._most_ids()
            if len(shape) != 1 or not 0 <= shape[0] <= most:
                raise ValueError(f"{name}: expected [total] of up to {most} ids, got {list(shape)}")
            return
        widths = {NUMERICAL: self._num_numerical, RAW: LONGEST_LINE}
        width = widths.get(name, len(self._names[1]) if name in self._taken else 0)
        if len(shape) != 2 or not 1 <= shape[0] <= self._max_rows or not 0 <= shape[1] <= width:
            raise ValueError(
                f"{name}: expected [rows, width] of 1 to {self._max_rows} rows and a width of up "
                f"to {width}, got {list(shape)}"
            )

    def _most_ids(self) -> int:
        """Returns the maximum ids of a request."""
        if self._longest is None:
            return MOST_IDS
        of_lists = sum(self._longest.values())
        return self._max_rows * (len(self._names[1]) - len(self._longest) + of_lists)

    def read(self, requests: Sequence[Request | ValueError]) -> list[Inputs | ValueError]:
        """Returns the inputs of each request, or its error.

        Args:
            requests: tensors, or the errors found so far.
        """
        answers: list[Any] = [together_or_alone(self._checked, [one])[0] for one in requests]
        good = [index for index, one in enumerate(answers) if not isinstance(one, ValueError)]
        raw = [index for index in good if RAW in answers[index]]
        ids = [index for index in good if RAW not in answers[index]]
        for read, group in ((self._read_raw, raw), (self._read_ids, ids)):
            found = together_or_alone(read, [answers[index] for index in group])
            for index, inputs in zip(group, found, strict=True):
                answers[index] = inputs
        return answers

    def _checked(self, requests: Sequence[Request | ValueError]) -> list[Request]:
        """Checks the names and shapes of a request's tensors."""
        (request,) = requests
        if isinstance(request, ValueError):
            raise request
        given = sorted(request)
        if given != self._taken and (given != [RAW] or self.transform is None):
            either = f", or {RAW} alone" if self.transform else ""
            taken = f"{', '.join(self._taken[:-1])} and {self._taken[-1]}"
            raise ValueError(f"expected the inputs {taken}{either}; got {', '.join(given) or '-'}")
        for name, tensor in request.items():
            self.check_shape(name, tensor.shape)
        if RAW in request and request[RAW].dtype != np.uint8:
            raise ValueError(f"{RAW}: expected uint8, got {request[RAW].dtype}")
        return [request]

    def _read_raw(self, requests: Sequence[Request]) -> list[Inputs]:
        assert self.transform is not None
        tensors = [request[RAW] for request in requests]
        text = text_of_tensors(tensors, len(self.transform.names))
        return self._divided(inputs_of_text(self.transform, text), [*map(len, tensors)])

    def _read_ids(self, requests: Sequence[Request]) -> list[Inputs]:
        return self.check(
            [
                Inputs(one[NUMERICAL], one[IDS], one.get(LENGTHS), one.get(WEIGHTS))
                for one in requests
            ]
        )

    def check(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """Returns inputs in the types of the network.

        Raises:
            ValueError, RowError: one does not match the model; see `check_inputs`.
        """
        for part in parts:
            check_shapes(part, *map(len, self._names))
            # Otherwise one request would take another's ids.
            check_lengths(part, self._names[1], self._longest)
        inputs = Inputs.joined(parts)
        check_values(inputs, self._names, self._table_sizes)
        return self._divided(inputs, [len(part.numerical) for part in parts])

    def _divided(self, inputs: Inputs, rows: Sequence[int]) -> list[Inputs]:
        """Returns the inputs of each request, given their numbers of rows."""
        arrays = zip(inputs.arrays, self._dtypes, strict=False)
        narrow = Inputs(*(array.astype(dtype, copy=False) for array, dtype in arrays))
        ends = np.cumsum(rows).tolist()
        return [narrow.part(end - count, end) for end, count in zip(ends, rows, strict=True)]


def named(inputs: Inputs) -> Request:
    """Returns inputs in the form of a request."""
    return dict(zip(INPUTS, inputs.arrays, strict=False))
