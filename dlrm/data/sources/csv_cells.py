"""Parsers from the cells of a CSV column to their values."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import numpy as np

from dlrm.data.clicks import layout

Parser = Callable[[Sequence[str]], np.ndarray]  # stripped cells of a column -> their values


class BadCellError(Exception):
    """A cell that a parser refuses; the caller adds file, line and column."""

    def __init__(self, index: int, expected: str) -> None:
        super().__init__(index, expected)
        self.index, self.expected = index, expected

    @property
    def expected_here(self) -> str:
        """Returns the expectation without the flags of `transcode` that would accept the cell."""
        return self.expected.partition(" (")[0]


def number_parser(missing: Collection[str]) -> Parser:
    """Parses numbers as float64, and missing ones (empty cells, and those in `missing`) as NaN.

    A number is what `float` reads, in ASCII and without underscores. "nan", "inf" and numbers
    beyond float64 are refused unless they are in `missing`, which is for users to decide.
    """
    listed, missing = list(missing), {"", *missing}

    def parse(cells: Sequence[str]) -> np.ndarray:
        if missing.isdisjoint(cells) and _is_plain("".join(cells)):
            with suppress(ValueError):
                values = np.array(list(map(float, cells)), np.float64)
                if np.isfinite(values).all():
                    return values
        return np.array([to_number(index, cell) for index, cell in enumerate(cells)], np.float64)

    def to_number(index: int, cell: str) -> float:
        if cell in missing:
            return np.nan
        try:
            value = float(cell) if _is_plain(cell) else None
        except ValueError:
            value = None
        if value is None:
            raise BadCellError(index, "a number")
        if not math.isfinite(value):
            also = f" (--missing_values {','.join([*listed, cell])} counts it as missing)"
            raise BadCellError(index, "a finite number" + (also if listed else ""))
        return value

    return parse


def _is_plain(text: str) -> bool:
    """Returns whether a text is not a number in Python only, such as 1_000 or other digits."""
    return text.isascii() and "_" not in text


def label_parser() -> Parser:
    """Parses labels written as 0, 1, 0.0 or 1.0."""
    known = {"0": False, "1": True, "0.0": False, "1.0": True}

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell not in known:
                raise BadCellError(
                    index, "a label of 0 or 1 (--positive names any other value that counts as 1)"
                )
        return np.array([known[cell] for cell in cells], layout.LABEL_DTYPE)

    return parse
