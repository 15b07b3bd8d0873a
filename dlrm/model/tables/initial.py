"""Initial values of tables, drawn on the host in parts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm import ops
from dlrm.distributed.placement import Piece
from dlrm.model.layers.initialize import generator

_VALUES_AT_ONCE = 1 << 20  # drawn on the host, 4 MB at a time for tables of any size
_ROWS_OF_A_STREAM = 1 << 20  # larger tables have several generators, which run in parallel


def initialize_tables(
    tables: Sequence[Tensor],
    lows: Sequence[Tensor | None],
    numbers: Sequence[int],
    seed: int,
    scale: float,
    std: float | None,
    pieces: Sequence[Piece | None],
) -> None:
    """Fills tables on any device from generators on the host, in several threads.

    A piece takes its values from the generators of the whole table. On the device "meta" nothing is
    drawn.
    """
    if any(table.is_meta for table in tables):
        return
    parts = []
    for table, low, number, piece in zip(tables, lows, numbers, pieces, strict=True):
        first, last = piece.rows if piece else (0, len(table))
        rows, dim = piece.shape if piece else table.shape
        columns = slice(*piece.columns) if piece else slice(0, dim)
        draw = _drawing(rows, scale, std)
        for begin in range(0, rows, _ROWS_OF_A_STREAM):
            end = min(begin + _ROWS_OF_A_STREAM, rows)
            own = slice(max(begin, first) - first, min(end, last) - first)
            if own.start >= own.stop:
                continue
            random = _random(seed, number, begin)
            stream = _Stream(random, draw, end - begin, dim, own.start + first - begin, columns)
            parts.append((table[own], None if low is None else low[own], stream))
    # Several threads already split the halves.
    threads = torch.get_num_threads() if not any(low is not None for low in lows) else 1
    if threads == 1:
        for arguments in parts:
            _fill(*arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda arguments: _fill(*arguments), parts))


def initial_rows(
    number: int,
    shape: tuple[int, int],
    seed: int = 0,
    scale: float = 1.0,
    std: float | None = None,
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yields the initial values of a table, some rows at a time.

    Args:
        number: number of the table.
        shape: rows and columns of the table.
        seed, scale, std: see `JointEmbedding`.
        first: first row that is needed; earlier rows may come as well.

    Yields:
        The number of the first row, and rows, `[some, columns]` float32.
    """
    rows, dim = shape
    draw, at_once = _drawing(rows, scale, std), max(1, _VALUES_AT_ONCE // dim)
    for begin in range(first // _ROWS_OF_A_STREAM * _ROWS_OF_A_STREAM, rows, _ROWS_OF_A_STREAM):
        random, end = _random(seed, number, begin), min(begin + _ROWS_OF_A_STREAM, rows)
        for row in range(begin, end, at_once):
            values = torch.empty(min(at_once, end - row), dim, device="cpu")
            draw(values, random)
            yield row, values


def _random(seed: int, number: int, begin: int) -> torch.Generator:
    """Returns the generator of a table's rows from `begin` on, the first row of a stream."""
    return generator(seed, f"table.{number}.{begin}" if begin else f"table.{number}")


_Draw = Callable[[Tensor, torch.Generator], object]


def _drawing(rows: int, scale: float, std: float | None) -> _Draw:
    return _uniform(scale / max(rows, 1) ** 0.5) if std is None else _normal(std)


def _uniform(bound: float) -> _Draw:
    return lambda values, random: values.uniform_(-bound, bound, generator=random)


def _normal(std: float) -> _Draw:
    return lambda values, random: values.normal_(0, std, generator=random)


class _Stream(NamedTuple):
    """A stream of random rows, and the part of it that a table takes.

    Attributes:
        random, draw: generator and function that draw the values.
        rows, dim: shape of everything that is drawn.
        first: the first row taken.
        columns: the columns taken.
    """

    random: torch.Generator
    draw: _Draw
    rows: int
    dim: int
    first: int
    columns: slice


def _fill(rows: Tensor, low: Tensor | None, stream: _Stream) -> None:
    """Draws rows from a generator, some at a time."""
    with torch.inference_mode(rows.is_inference()):  # each thread has a mode of its own
        _draw_rows(rows, low, stream)


def _draw_rows(rows: Tensor, low: Tensor | None, stream: _Stream) -> None:
    at_once = max(1, _VALUES_AT_ONCE // stream.dim)
    is_whole = rows.shape == (stream.rows, stream.dim)
    for begin in range(0, stream.first + len(rows), at_once):
        drawn = (min(at_once, stream.rows - begin), stream.dim)
        target = slice(max(begin - stream.first, 0), max(begin + drawn[0] - stream.first, 0))
        part = rows[target]
        in_place = is_whole and part.device.type == "cpu" and low is None
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
