"""Initial values of tables, drawn on the host in parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm import ops
from dlrm.distributed.placement import Piece
from dlrm.model.layers.initialize import generator

_VALUES_AT_ONCE = 1 << 20  # drawn on the host, 4 MB at a time for tables of any size
_ROWS_OF_A_STREAM = 1 << 20  # larger tables have several generators, which run in parallel


class Initial(NamedTuple):
    """The initial values of tables: U(-s, s) with s = scale / sqrt(rows of the table).

    Attributes:
        seed: seed of the values, which also depend on the table's number.
        scale: see above.
        std: if given, the values are N(0, std) instead.
    """

    seed: int = 0
    scale: float = 1.0
    std: float | None = None

    def _drawing(self, rows: int) -> Callable[[Tensor, torch.Generator], object]:
        """Returns a function that draws values of a table of some rows."""
        if (std := self.std) is not None:
            return lambda values, random: values.normal_(0, std, generator=random)
        bound = self.scale / max(rows, 1) ** 0.5
        return lambda values, random: values.uniform_(-bound, bound, generator=random)

    def _random(self, number: int, begin: int) -> torch.Generator:
        """Returns the generator of a table's rows from `begin` on, the first row of a stream."""
        return generator(self.seed, f"table.{number}.{begin}" if begin else f"table.{number}")

    def fill(
        self, tables: Sequence[Tensor], lows: Sequence[Tensor | None], pieces: Mapping[int, Piece]
    ) -> None:
        """Fills tables on any device from generators on the host, in several threads.

        On the device "meta" nothing is drawn.

        Args:
            tables: the tables, or the pieces of them that are held here.
            lows: lower halves of each, if it is bfloat16.
            pieces: each piece by the table's number; it takes its values from the generators of the
                whole table.
        """
        if any(table.is_meta for table in tables):
            return
        parts = []
        for table, low, (number, piece) in zip(tables, lows, pieces.items(), strict=True):
            (first, last), (rows, dim) = piece.rows, piece.shape
            draw = self._drawing(rows)
            for begin in range(0, rows, _ROWS_OF_A_STREAM):
                end = min(begin + _ROWS_OF_A_STREAM, rows)
                own = slice(max(begin, first) - first, min(end, last) - first)
                if own.start >= own.stop:
                    continue
                random, skipped = self._random(number, begin), own.start + first - begin
                columns = slice(*piece.columns)
                stream = _Stream(random, draw, end - begin, dim, skipped, columns)
                parts.append((table[own], None if low is None else low[own], stream))
        # Several threads already split the halves.
        threads = torch.get_num_threads() if not any(low is not None for low in lows) else 1
        if threads == 1:
            for arguments in parts:
                _fill(*arguments)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda arguments: _fill(*arguments), parts))

    def rows(
        self, number: int, shape: tuple[int, int], first: int = 0
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields the initial values of a table, some rows at a time.

        Args:
            number: number of the table.
            shape: rows and columns of the table.
            first: first row that is needed; earlier rows may come as well.

        Yields:
            The number of the first row, and rows, `[some, columns]` float32.
        """
        rows, dim = shape
        draw, at_once = self._drawing(rows), max(1, _VALUES_AT_ONCE // dim)
        for begin in range(first // _ROWS_OF_A_STREAM * _ROWS_OF_A_STREAM, rows, _ROWS_OF_A_STREAM):
            random, end = self._random(number, begin), min(begin + _ROWS_OF_A_STREAM, rows)
            for row in range(begin, end, at_once):
                values = torch.empty(min(at_once, end - row), dim, device="cpu")
                draw(values, random)
                yield row, values


class _Stream(NamedTuple):
    """A stream of random rows, and the part of it that a table takes.

    Attributes:
        random, draw: generator and function that draw the values.
        rows, dim: shape of everything that is drawn.
        first: the first row taken.
        columns: the columns taken.
    """

    random: torch.Generator
    draw: Callable[[Tensor, torch.Generator], object]
    rows: int
    dim: int
    first: int
    columns: slice


def _fill(rows: Tensor, low: Tensor | None, stream: _Stream) -> None:
    """Draws rows from a generator, some at a time."""
    at_once = max(1, _VALUES_AT_ONCE // stream.dim)
    in_place = rows.shape == (stream.rows, stream.dim) and rows.is_cpu and low is None
    with torch.inference_mode(rows.is_inference()):  # each thread has a mode of its own
        for begin in range(0, stream.first + len(rows), at_once):
            drawn = (min(at_once, stream.rows - begin), stream.dim)
            target = slice(max(begin - stream.first, 0), max(begin + drawn[0] - stream.first, 0))
            part = rows[target]
            values = part if in_place else torch.empty(drawn, device="cpu")
            stream.draw(values, stream.random)
            if in_place or not len(part):
                continue
            taken = max(stream.first - begin, 0)
            values = values[taken : taken + len(part), stream.columns].contiguous()
            if low is not None:
                values, rest = ops.split_float32(values)
                low[target].copy_(rest)
            part.copy_(values)
