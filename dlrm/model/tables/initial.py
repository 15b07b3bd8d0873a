"""Initial values of tables, drawn on the host in parts."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm import ops
from dlrm.distributed.placement import Shard
from dlrm.model.layers.initialize import generator

_VALUES_AT_ONCE = 1 << 20  # drawn on the host, 4 MB at a time for tables of any size


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
        self, tables: Sequence[Tensor], lows: Sequence[Tensor | None], shards: Mapping[int, Shard]
    ) -> None:
        """Fills tables on any device from a generator for each on the host, in several threads.

        On the device "meta" nothing is drawn.

        Args:
            tables: the tables, or the shards of them that are held here.
            lows: lower halves of each, if it is bfloat16.
            shards: each shard by the table's number; it takes its rows of the whole table.
        """
        if any(table.is_meta for table in tables):
            return
        given = [*zip(tables, lows, shards.values(), strict=True)]
        if (threads := torch.get_num_threads()) == 1:
            for one in given:
                self._fill(*one)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda one: self._fill(*one), given))

    def _fill(self, table: Tensor, low: Tensor | None, shard: Shard) -> None:
        (first, last), (rows, _) = shard.rows, shard.shape
        bound = self.scale / max(rows, 1) ** 0.5
        with torch.inference_mode(table.is_inference()):  # each thread has a mode of its own
            for begin, values in self._drawn(shard.table, shard.shape, last, bound):
                values = values[max(first - begin, 0) : last - begin]
                own = slice(max(begin, first) - first, max(begin, first) - first + len(values))
                if low is not None:
                    values, rest = ops.split_float32(values)
                    low[own].copy_(rest)
                table[own].copy_(values)

    def _drawn(
        self, number: int, shape: tuple[int, int], end: int, bound: float
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields the values of a table up to a row, some rows at a time, each with its first row.

        They are U(-bound, bound) if they are not normal.
        """
        random, (rows, dim) = generator(self.seed, f"table.{number}"), shape
        at_once = max(1, _VALUES_AT_ONCE // max(dim, 1))
        for begin in range(0, end, at_once):
            values = torch.empty(min(at_once, rows - begin), dim, device="cpu")
            if self.std is None:
                yield begin, values.uniform_(-bound, bound, generator=random)
            else:
                yield begin, values.normal_(0, self.std, generator=random)

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
        # Whole parts are drawn, since normal values depend on how many are drawn at once.
        for begin, drawn in self._drawn(number, (rows + _VALUES_AT_ONCE, dim), rows, 1.0):
            own = drawn[max(first - begin, 0) : rows - begin]
            place = max(begin - first, 0)
            values[place : place + len(own)] = own
        if self.std is None:
            sizes = torch.arange(first + 1, rows + 1, dtype=torch.float64)
            values *= (self.scale / sizes.sqrt()).float().unsqueeze(1)
        return values
