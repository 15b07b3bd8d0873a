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
            for begin in range(0, rows, _ROWS_OF_A_STREAM):
                end = min(begin + _ROWS_OF_A_STREAM, rows)
                own = slice(max(begin, first) - first, min(end, last) - first)
                if own.start >= own.stop:
                    continue
                stream = self._stream(number, begin, rows), (end - begin, dim)
                place = own.start + first - begin
                parts.append((table[own], None if low is None else low[own], *stream, place))
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
        at_once = max(1, _VALUES_AT_ONCE // dim)
        for begin in range(first // _ROWS_OF_A_STREAM * _ROWS_OF_A_STREAM, rows, _ROWS_OF_A_STREAM):
            draw, end = self._stream(number, begin, rows), min(begin + _ROWS_OF_A_STREAM, rows)
            for row in range(begin, end, at_once):
                values = torch.empty(min(at_once, end - row), dim, device="cpu")
                draw(values)
                yield row, values

    def added_rows(self, number: int, shape: tuple[int, int], first: int) -> Tensor:
        """Returns the initial values of rows that are appended to a table.

        Row i has the values of the last row of a new table of i + 1 rows, so they do not depend on
        how many rows are appended at a time.

        Args:
            number: number of the table.
            shape: rows and columns of the table with the appended rows.
            first: the first of them.

        Returns:
            `[rows - first, columns]` float32.
        """
        rows, dim = shape
        values = torch.empty(rows - first, dim, device="cpu")
        # All rows of a block are drawn, since normal values depend on how many are drawn at once.
        end = -(-rows // _ROWS_OF_A_STREAM) * _ROWS_OF_A_STREAM
        unit = self._replace(scale=end**0.5)  # U(-1, 1)
        for begin, drawn in unit.rows(number, (end, dim), first):
            if begin >= rows:
                break
            if begin + len(drawn) <= first:
                continue
            own = drawn[max(first - begin, 0) : rows - begin]
            place = max(begin, first)
            values[place - first : place - first + len(own)] = own
        if self.std is None:
            sizes = torch.arange(first + 1, rows + 1, dtype=torch.float64)
            values *= (self.scale / sizes.sqrt()).float().unsqueeze(1)
        return values

    def _stream(self, number: int, begin: int, rows: int) -> Callable[[Tensor], object]:
        """Returns a function that draws the next values of a table's rows, from row `begin` on."""
        random = generator(self.seed, f"table.{number}.{begin}" if begin else f"table.{number}")
        if (std := self.std) is not None:
            return lambda values: values.normal_(0, std, generator=random)
        bound = self.scale / max(rows, 1) ** 0.5
        return lambda values: values.uniform_(-bound, bound, generator=random)


def _fill(
    table: Tensor,
    low: Tensor | None,
    draw: Callable[[Tensor], object],
    shape: tuple[int, int],
    first: int,
) -> None:
    """Fills rows with those of a stream from its row `first` on, some at a time.

    Args:
        table, low: the rows, and their lower halves if they are bfloat16.
        draw, shape: draws rows of the stream; all of them have this shape.
        first: row of the stream that the first row takes.
    """
    at_once = max(1, _VALUES_AT_ONCE // shape[1])
    in_place = table.shape == shape and table.device.type == "cpu" and low is None
    with torch.inference_mode(table.is_inference()):  # each thread has a mode of its own
        for begin in range(0, first + len(table), at_once):
            drawn = min(at_once, shape[0] - begin)
            target = slice(max(begin - first, 0), max(begin + drawn - first, 0))
            part = table[target]
            values = part if in_place else torch.empty(drawn, shape[1], device="cpu")
            draw(values)
            if in_place or not len(part):
                continue
            taken = max(first - begin, 0)
            values = values[taken : taken + len(part)]
            if low is not None:
                values, rest = ops.split_float32(values)
                low[target].copy_(rest)
            part.copy_(values)
