"""Simulated rows with a list of seen items, a candidate and a planted attention between them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.scripts.simulate_logs.command import CALIBRATION_ROWS, Chunk, bias_for, chunk_sizes
from dlrm.scripts.simulate_logs.flags import Simulation

_ITEMS = 100
_TASTES = 4  # dimensions in which items are alike
_LEAST_ALIKE = 0.7  # cosine from which on a seen item counts
_DEVIATION, _ITEM_DEVIATION = 1.5, 0.4  # of the planted attention in the logit, and of items
_COLUMNS = pa.schema({"click": pa.int8(), "item": pa.int32(), "seen": pa.list_(pa.int32())})
_TEXT = """\
version: 1
label: click
categorical:
  - {{column: item, type: integer, table: items}}
  - column: seen
    type: integer
    table: items
    max_length: {longest}
    pooling: attention
    target: item
"""


class HistorySimulator:
    """Draws rows from the planted model

        logit = bias + effect(item) + scale * sum of max(0, cos(item, seen) - 0.7)

    where the sum is over the seen items and the angles are those of random unit vectors in four
    dimensions. The product of the candidate with a sum of 16 numbers an item is no such sum, but an
    activation unit gives it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        draw = np.random.default_rng(np.random.SeedSequence([simulation.seed, 5]))
        vectors = draw.normal(size=(_ITEMS, _TASTES))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        self._alike = np.maximum(vectors @ vectors.T - _LEAST_ALIKE, 0)
        self._effects = draw.normal(0, _ITEM_DEVIATION, _ITEMS)
        random = np.random.default_rng(np.random.SeedSequence([simulation.seed, 6]))
        item, seen, lengths = self._draw(random, CALIBRATION_ROWS)
        attention = self._attention(item, seen, lengths)
        self._scale = _DEVIATION / attention.std()
        logit = self._scale * attention + self._effects[item]
        self._bias = bias_for(logit, simulation.click_rate)

    def write(self, directory: Path, day: int) -> Iterator[Chunk]:
        """Writes the rows of a day as Parquet, beside the schema of all days, and yields them."""
        schema = _TEXT.format(longest=2 * self.simulation.history)
        (directory / "schema.yaml").write_text(schema, encoding="utf-8")
        with pq.ParquetWriter(directory / f"day_{day}.parquet", _COLUMNS) as writer:
            for chunk in self.chunks(day):
                writer.write_table(chunk.rows)
                yield chunk

    def chunks(self, day: int) -> Iterator[Chunk]:
        """Yields the rows of a day."""
        for number, rows in chunk_sizes(self.simulation, day):
            seeds = np.random.SeedSequence([self.simulation.seed, 7, day, number])
            yield self._chunk(np.random.default_rng(seeds), rows)

    def _chunk(self, random: np.random.Generator, rows: int) -> Chunk:
        item, seen, lengths = self._draw(random, rows)
        logit = self._bias + self._effects[item]
        logit += self._scale * self._attention(item, seen, lengths)
        probability = 1 / (1 + np.exp(-logit))
        label = random.random(rows) < probability
        offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, seen.astype(np.int32))
        columns = [label.astype(np.int8), item.astype(np.int32), lists]
        return Chunk(pa.table(columns, schema=_COLUMNS), probability, label)

    def _draw(
        self, random: np.random.Generator, rows: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns items, seen items and numbers of these; some items are more popular."""
        lengths = random.integers(0, 2 * self.simulation.history + 1, rows)
        ids = [(_ITEMS * random.random(n) ** 1.5).astype(int) for n in (rows, lengths.sum())]
        return ids[0], ids[1], lengths

    def _attention(self, item: np.ndarray, seen: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows = np.repeat(np.arange(len(item)), lengths)
        return np.bincount(rows, self._alike[item[rows], seen], len(item))
