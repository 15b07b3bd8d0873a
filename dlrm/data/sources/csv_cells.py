"""Parsers from the cells of a CSV column to their values."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.row_error import RowError, shown_text

# Stripped cells of a column -> their values. A RowError has the index of the first bad cell.
Parser = Callable[[Sequence[str]], np.ndarray]


def number_parser(missing: Collection[str], hint: bool = True) -> Parser:
    """Parses numbers as float64, and missing ones (empty cells, and those in `missing`) as NaN.

    A number is what `float` reads, in ASCII and without underscores. "nan", "inf" and numbers
    beyond float64 are refused unless they are in `missing`, which is for users to decide; `hint`
    names the flag for it.
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
            raise RowError(index, f"expected a number, got {shown_text(cell)}")
        if not math.isfinite(value):
            flag = f" (--missing_values {','.join([*listed, cell])} counts it as missing)"
            also = flag if listed and hint else ""
            raise RowError(index, f"expected a finite number{also}, got {shown_text(cell)}")
        return value

    return parse


def _is_plain(text: str) -> bool:
    """Returns whether a text is not a number in Python only, such as 1_000 or other digits."""
    return text.isascii() and "_" not in text


def label_parser() -> Parser:
    """Parses labels written as 0, 1, 0.0 or 1.0."""
    known = {"0": False, "1": True, "0.0": False, "1.0": True}
    hint = "label: {positive: VALUE} in the schema names one that counts as 1"

    def parse(cells: Sequence[str]) -> np.ndarray:
        for index, cell in enumerate(cells):
            if cell not in known:
                got = shown_text(cell)
                raise RowError(index, f"expected a label of 0 or 1 ({hint}), got {got}")
        return np.array([known[cell] for cell in cells], layout.LABEL_DTYPE)

    return parse
