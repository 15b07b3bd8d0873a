"""Turns requests into a model's inputs, in a server without torch.

The exporter copies this file, and those that it imports, into the model repository.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm.data import layout
from dlrm.data.sources.log_lines import LONGEST_LINE
from dlrm.data.transform.transform import Transform
from dlrm.documents import read_json
from dlrm.files import within
from dlrm.manifest import check_listed, read_manifest
from dlrm.serving.rows.inputs import Inputs, check_lengths, check_values
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


def alone(answer: Callable[[Item], Answer], item: Item | ValueError) -> Answer | ValueError:
    """Returns the answer to an item, or the error of either.

    The error has no traceback, whose frames hold the arrays of the whole batch and the error
    itself, and would keep them until garbage collection.
    """
    if isinstance(item, ValueError):
        return item
    try:
        return answer(item)
    except ValueError as error:
        error.__context__ = None
        return error.with_traceback(None)
    except Exception as error:
        return ValueError(f"expected a request that can be answered, got {error!r}")


def together_or_alone(
    answer: Callable[[Sequence[Item]], Sequence[Answer]], items: Sequence[Item | ValueError]
) -> list[Answer | ValueError]:
    """Returns the answers to items, or the errors of items.

    They are answered together, which costs little more than one; if that fails for any reason, each
    is answered separately, so that only faulty ones fail.
    """
    good = [item for item in items if not isinstance(item, ValueError)]
    if len(good) > 1:
        with suppress(Exception):
            answers = iter(answer(good))
            return [item if isinstance(item, ValueError) else next(answers) for item in items]
    return [alone(lambda one: answer([one])[0], item) for item in items]


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
        return together_or_alone(self.read_all, requests)

    def read_all(self, requests: Sequence[Request]) -> list[Inputs]:
        """Returns the inputs of requests, all of which are good.

        Raises:
            ValueError, RowError: a request is bad; the row is one of this or of all requests.
        """
        for request in requests:
            self._check(request)
        raw = self._read_raw([request[RAW] for request in requests if RAW in request])
        given = (request for request in requests if RAW not in request)
        ids = [Inputs(r[NUMERICAL], r[IDS], r.get(LENGTHS), r.get(WEIGHTS)) for r in given]
        parts = iter(raw), iter(self.check(ids))
        return [next(parts[RAW not in request]) for request in requests]

    def _check(self, request: Request) -> None:
        """Checks the names and shapes of a request's tensors."""
        given = sorted(request)
        if given != self._taken and (given != [RAW] or self.transform is None):
            either = f", or {RAW} alone" if self.transform else ""
            taken = f"{', '.join(self._taken[:-1])} and {self._taken[-1]}"
            raise ValueError(f"expected the inputs {taken}{either}; got {', '.join(given) or '-'}")
        for name, tensor in request.items():
            self.check_shape(name, tensor.shape)
        if RAW in request and request[RAW].dtype != np.uint8:
            raise ValueError(f"{RAW}: expected uint8, got {request[RAW].dtype}")

    def _read_raw(self, tensors: Sequence[np.ndarray]) -> list[Inputs]:
        if not tensors:
            return []
        assert self.transform is not None
        text = text_of_tensors(tensors, len(self.transform.names))
        return self._divided(inputs_of_text(self.transform, text), tensors)

    def check(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """Returns inputs in the types of the network.

        Raises:
            ValueError, RowError: one does not match the model; see `check_inputs`.
        """
        if not parts:
            return []
        for part in parts:
            check_lengths(part, self._names, self._longest)  # no request takes another's ids
        inputs = Inputs.joined(parts)
        check_values(inputs, self._names, self._table_sizes)
        return self._divided(inputs, [part.numerical for part in parts])

    def _divided(self, inputs: Inputs, of: Sequence[np.ndarray]) -> list[Inputs]:
        """Returns the inputs of each request, given an array of its rows."""
        arrays = zip(inputs.arrays, self._dtypes, strict=False)
        narrow = Inputs(*(array.astype(dtype, copy=False) for array, dtype in arrays))
        ends = np.cumsum([*map(len, of)]).tolist()
        return [narrow.part(end - len(rows), end) for end, rows in zip(ends, of, strict=True)]


def named(inputs: Inputs) -> Request:
    """Returns inputs in the form of a request."""
    return dict(zip(INPUTS, inputs.arrays, strict=False))
