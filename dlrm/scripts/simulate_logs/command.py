"""The planted model of simulated logs, and the rows drawn from it."""

import json
import math
import time
from binascii import hexlify
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.files import atomic_directory
from dlrm.limits import check_disk
from dlrm.manifest import write_manifest
from dlrm.metrics.auc import auc
from dlrm.preproc.splits import splitmix64
from dlrm.scripts.common.table_flags import say_progress
from dlrm.scripts.simulate_logs import Simulation

_PLANTED = "planted.json"
_CHUNK_ROWS = 1 << 16
_LARGEST_INTEGER = 99_999_999
_INTEGERS = np.arange(-2, 10_000).astype("S8")
# Ids of the 26 tables of the Criteo Terabyte logs at frequency limit 15: those of NVIDIA's DLRM up
# to 100, of larger tables the hundredth part, and 100 or more.
_CARDINALITIES = (
    [79129, 338, 171, 100, 200, 4, 100, 100, 63, 55541, 5825, 2458, 11]
    + [100, 107, 100, 4, 100, 15, 81659, 26759, 71565, 3025, 120, 97, 35]
)  # fmt: skip
_SMALL = 100  # ids of a table up to which all of its ids are those of every day
_FRESH_SHARE = 0.05  # of a large table's draws are of ids that appear on that day alone
_EFFECT_KNEE = 40  # the effect of the value of rank r is divided by 1 + (r / knee) ** 2
_PAIRS = 2
_MAIN_DEVIATION, _PAIR_DEVIATION = 1.25, 0.35  # of all main effects, and of a pair's product


class Chunk(NamedTuple):
    """Some rows of a day: their text, the true probability of a click and the label drawn."""

    rows: bytes
    probability: np.ndarray
    label: np.ndarray


class Simulator:
    """The planted model, and the rows drawn from it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = s = simulation
        self._numericals = [_Numerical(s, i) for i in range(s.num_numerical)]
        self._categoricals = [_Categorical(s, i) for i in range(s.num_categorical)]
        self._pairs = self._choose_pairs()
        self._calibrate()

    def _choose_pairs(self) -> list[tuple[int, int]]:
        """Returns pairs of smaller categorical features, or of numerical ones if these are too few.

        Their values are frequent and have their own vectors, so that a model can learn the
        products; products of numerical features take a DLRM many more steps.
        """
        s = self.simulation
        by_size = sorted(range(s.num_categorical), key=lambda i: self._categoricals[i].cardinality)
        small = [s.num_numerical + i for i in by_size[: max(2 * _PAIRS, s.num_categorical // 5)]]
        draw = np.random.default_rng(np.random.SeedSequence([s.seed, 1]))
        order = [*draw.permutation(small), *draw.permutation(s.num_numerical)]
        order = [int(i) for i in order]
        return list(zip(order[::2], order[1::2], strict=False))[:_PAIRS]

    def chunks(self, day: int) -> Iterator[Chunk]:
        """Yields the rows of a day."""
        rows = self.simulation.day_rows(day)
        for number, first in enumerate(range(0, rows, _CHUNK_ROWS)):
            count = min(_CHUNK_ROWS, rows - first)
            seed = np.random.SeedSequence([self.simulation.seed, 0, day, number])
            random = np.random.Generator(np.random.SFC64(seed))
            numericals, categoricals = self._draw(random, day, count)
            logit = self._effects(numericals + categoricals).sum(0) + self._bias
            probability = 1 / (1 + np.exp(-(logit + 0.1 * np.sin(day))))
            label = random.random(count) < probability
            yield Chunk(_format(label, numericals, categoricals), probability, label)

    def _draw(
        self, random: np.random.Generator, day: int, rows: int
    ) -> tuple[list["_Column"], list["_Column"]]:
        numericals = [feature.draw(random, day, rows) for feature in self._numericals]
        return numericals, [feature.draw(random, day, rows) for feature in self._categoricals]

    def _effects(self, columns: list["_Column"]) -> np.ndarray:
        """Returns the parts of the logit, `[1 + pairs, rows]`: main effects, then each product."""
        main = np.sum([column.effect for column in columns], axis=0)
        pairs = [columns[left].factor * columns[right].factor for left, right in self._pairs]
        return np.stack([main, *pairs]) * self._scales[:, None]

    def _calibrate(self) -> None:
        """Scales the effects to the deviations above and moves the mean to the click rate."""
        random = np.random.default_rng(np.random.SeedSequence([self.simulation.seed, 2]))
        numericals, categoricals = self._draw(random, 0, _CHUNK_ROWS)
        self._scales = np.ones(1 + len(self._pairs))
        effects = self._effects(numericals + categoricals)
        wanted = np.full(len(effects), _PAIR_DEVIATION)
        wanted[0] = _MAIN_DEVIATION
        self._scales = wanted / np.maximum(effects.std(1), 1e-6)
        logit = (effects * self._scales[:, None]).sum(0)
        self._bias, high = -30.0, 30.0
        for _ in range(50):
            middle = (self._bias + high) / 2
            if (1 / (1 + np.exp(-(logit + middle)))).mean() < self.simulation.click_rate:
                self._bias = middle
            else:
                high = middle


class _Column(NamedTuple):
    """A column of a chunk: values, a mask of missing ones, and their parts of the logit."""

    values: np.ndarray
    missing: np.ndarray
    effect: np.ndarray
    factor: np.ndarray


class _Numerical:
    """A count with a log-normal distribution; some features have a few negative values."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        draw = np.random.default_rng(np.random.SeedSequence([simulation.seed, 3, index]))
        self._mean = draw.uniform(0.5, 5.0)
        self._deviation = draw.uniform(0.8, 1.6)
        # Two features in thirteen go down to -1 and to -2, in few rows.
        self._shift = {1: 2, 4: 1}.get(index % 13, 0)
        if self._shift:
            self._mean = draw.uniform(2.5, 5.0)
        self._missing = simulation.missing * draw.choice([0.0, 0.05, 0.2, 0.45])
        self._slope, self._bend, self._phase = draw.normal(size=3) * [0.5, 0.35, 2.0]
        self._later_slope, self._later_bend = draw.normal(size=2) * [0.5, 0.35]
        self._drift = simulation.drift

    def draw(self, random: np.random.Generator, day: int, rows: int) -> _Column:
        mean = self._mean + 0.05 * np.sin(0.7 * day + self._phase)
        normal = random.standard_normal(rows, dtype=np.float32)
        values = np.exp(mean + self._deviation * normal).astype(np.int64) - self._shift
        np.minimum(values, _LARGEST_INTEGER, out=values)
        missing = random.random(rows, dtype=np.float32) < self._missing
        # Like the model, the planted effect uses ln(x + 2) with missing values as 0.
        seen = np.log(np.maximum(np.where(missing, 0, values), -1) + 2.0)
        standard = (seen - self._mean) / self._deviation
        factor = np.tanh(standard)
        slope = _turned(self._slope, self._later_slope, self._drift * day)
        bend = _turned(self._bend, self._later_bend, self._drift * day)
        effect = slope * factor + bend * np.cos(1.5 * standard + self._phase)
        return _Column(values, missing, effect, factor)


class _Categorical:
    """An id with a power law; the hash that is written is a bijection of its rank."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        s = simulation
        draw = np.random.default_rng(np.random.SeedSequence([s.seed, 4, index]))
        self.cardinality = _CARDINALITIES[index % len(_CARDINALITIES)]
        self._exponent = draw.uniform(1.2, 1.6)
        self._fresh = _FRESH_SHARE if self.cardinality > _SMALL else 0.0
        self._missing = simulation.missing * draw.choice([0.0, 0.02, 0.1, 0.3])
        self._weight = draw.choice([0.15, 0.3, 0.6])
        self._phase = draw.uniform(0, 6)
        self._seed, self._later_seed = (int(seed) for seed in draw.integers(1 << 62, size=2))
        self._drift, self._new_ids, self._days = s.drift, s.new_ids, s.days

    def draw(self, random: np.random.Generator, day: int, rows: int) -> _Column:
        exponent = self._exponent + 0.03 * np.sin(0.9 * day + self._phase)
        uniform = random.random(rows, dtype=np.float32)
        rank = _power_law(uniform, self.cardinality, exponent)
        if self._fresh:
            fresh = np.flatnonzero(random.random(rows, dtype=np.float32) < self._fresh)
            rank[fresh] += self.cardinality * (day + 1)
        missing = random.random(rows, dtype=np.float32) < self._missing
        size = 1.0 / (1.0 + np.square(rank / _EFFECT_KNEE))
        size[missing] = 0.0
        if self._new_ids:
            rank += self.cardinality * (self._days + 1) * self._replaced(rank, day)
        bits = splitmix64(self._seed, rank)
        effect, factor = _normal(bits & np.uint64(0xFFFFFFFF)), _normal(bits >> np.uint64(32))
        if angle := self._drift * day:
            later = splitmix64(self._later_seed, rank)
            effect = _turned(effect, _normal(later & np.uint64(0xFFFFFFFF)), angle)
            factor = _turned(factor, _normal(later >> np.uint64(32)), angle)
        effect, factor = self._weight * size * effect, size * factor
        return _Column(_mix32(rank.astype(np.uint32), self._seed), missing, effect, factor)

    def _replaced(self, rank: np.ndarray, day: int) -> np.ndarray:
        """Returns how often the id of each rank has been replaced up to a day."""
        begin = splitmix64(self._later_seed, rank).astype(np.float64) / 2.0**64
        return (begin + self._new_ids * day).astype(np.int64)


def _turned(now: Any, later: Any, angle: float) -> Any:
    """Returns numbers that turn from `now` to the independent `later`, of the same variance."""
    return math.cos(angle) * now + math.sin(angle) * later if angle else now


def _power_law(uniform: np.ndarray, size: int, exponent: float) -> np.ndarray:
    """Returns ranks in [0, size) whose density falls as (rank + 1) ** -exponent."""
    power = 1.0 - exponent
    mass = 1.0 - uniform * np.float32(1.0 - (size + 1.0) ** power)
    rank = np.exp(np.log(mass) * np.float32(1.0 / power)).astype(np.int64) - 1
    return np.clip(rank, 0, size - 1, out=rank)


def _normal(bits: np.ndarray) -> np.ndarray:
    """Returns approximately normal numbers from 32 bits: the standardized sum of their bytes."""
    total = np.zeros(len(bits), np.float32)
    for shift in (0, 8, 16, 24):
        total += ((bits >> np.uint64(shift)) & np.uint64(0xFF)).astype(np.float32)
    return (total - np.float32(510.0)) / np.float32(147.8)  # 4 * 127.5; sqrt(4 * (256**2 - 1) / 12)


def _mix32(values: np.ndarray, seed: int) -> np.ndarray:
    """Maps 32-bit numbers one-to-one (MurmurHash3's finalizer), so that ids do not collide."""
    x = values ^ np.uint32(seed & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _format(label: np.ndarray, numericals: list[_Column], categoricals: list[_Column]) -> bytes:
    """Returns lines of text, made of fields of fixed width without their zero bytes."""
    columns = [*numericals, *categoricals]
    fields = [(f"{i}", [("tab", "u1"), ("text", "S8")]) for i in range(len(columns))]
    lines = np.zeros(len(label), [("label", "u1"), *fields, ("end", "u1")])
    lines["label"], lines["end"] = label + np.uint8(ord("0")), ord("\n")
    cut = np.ones(len(label), bool)
    for i, column in reversed([*enumerate(columns)]):
        if i < len(numericals):
            texts = _INTEGERS[np.minimum(column.values, len(_INTEGERS) - 3) + 2]
            large = column.values > len(_INTEGERS) - 3
            texts[large] = column.values[large].astype("S8")
        else:
            texts = np.frombuffer(bytearray(hexlify(column.values.astype(">u4").tobytes())), "S8")
        texts[column.missing] = b""
        cut &= column.missing
        lines[f"{i}"]["text"] = texts
        lines[f"{i}"]["tab"] = np.where(cut, 0, ord("\t"))
    return lines.tobytes().translate(None, b"\0")


class _Judgment:
    """AUC and log loss of the true probabilities, in constant memory."""

    _BINS = 1 << 20

    def __init__(self) -> None:
        self._counts = np.zeros((2, self._BINS), np.int64)
        self._loss = 0.0

    def add(self, probability: np.ndarray, label: np.ndarray) -> None:
        """Adds rows: their true probabilities and the labels drawn, `[rows]` each."""
        bins = (probability * self._BINS).astype(np.int64)
        for value in (0, 1):
            self._counts[value] += np.bincount(bins[label == value], minlength=self._BINS)
        self._loss -= np.log(np.where(label, probability, 1 - probability)).sum()

    def to_json(self) -> dict[str, float | int | None]:
        """Returns rows, click rate, AUC (ties count half; None with one class) and log loss."""
        rows, area = int(self._counts.sum()), auc(*self._counts)
        return {
            "rows": rows,
            "click_rate": float(self._counts[1].sum() / rows) if rows else None,
            "auc": None if math.isnan(area) else area,
            "log_loss": float(self._loss / rows) if rows else None,
        }


def simulate(simulation: Simulation, output: Path) -> dict:
    """Writes the day files and `planted.json` into a new directory; returns the latter's content.

    Raises:
        FileExistsError: `output` exists and is not an earlier simulation.
        ValueError: the disk has no room for the rows.
    """
    columns = simulation.num_numerical + simulation.num_categorical
    least = 2 + columns  # bytes of a row: its label, its end and one tab per field
    check_disk(output, simulation.rows * least, f"--rows {simulation.rows}")
    simulator, last = Simulator(simulation), simulation.days - 1
    halves = {name: _Judgment() for name in ("test", "validation")}
    days = []
    with atomic_directory(output, replace=True) as staging:
        for day in range(simulation.days):
            start, done, of_day = time.perf_counter(), 0, _Judgment()
            with open(staging / f"day_{day}", "wb") as file:
                for rows, probability, label in simulator.chunks(day):
                    file.write(rows)
                    of_day.add(probability, label)
                    if day == last:
                        half = max(simulation.day_rows(last) // 2 - done, 0)
                        halves["test"].add(probability[:half], label[:half])
                        halves["validation"].add(probability[half:], label[half:])
                    done += len(label)
            days.append(of_day.to_json())
            speed = f"{done / (time.perf_counter() - start):,.0f} rows/s"
            say_progress(f"day_{day}: {done:,} rows, {speed}")
        judged = {name: half.to_json() for name, half in halves.items()}
        planted = {**judged, "days": days, "simulation": vars(simulation)}
        (staging / _PLANTED).write_text(json.dumps(planted, indent=2) + "\n", encoding="utf-8")
        write_manifest(staging, "raw_logs", rows=simulation.rows)
    return planted
