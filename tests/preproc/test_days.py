"""Days that extend the dictionaries of earlier days equal an oracle in plain Python."""

import math
import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from preproc_testing import killed_at, renamings, write_days
from tables_testing import contents, prepare, write_table

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.layout import id_dtype
from dlrm.data.transform.transform import Transform
from dlrm.preproc.execution.engines import TaskError
from dlrm.preproc.increments import segments
from dlrm.preproc.increments.options import IncrementConfig

SCHEMA = {
    "label": "y",
    "numerical": [{"column": "n", "transform": "standardise"}],
    "categorical": [
        {"column": "user", "type": "integer", "frequency_limit": 3},
        {"column": "item", "frequency_limit": 2, "dictionary": "items"},
        {
            "column": "seen",
            "frequency_limit": 2,
            "dictionary": "items",
            "max_length": 3,
            "ordered": True,
        },
        {"column": "place", "max_ids": 30},
        {"column": "few", "type": "id"},
        {"column": "hashed", "frequency_limit": 4, "hash_buckets": 5},
    ],
    "crosses": [{"name": "both", "fields": ["user", "item"], "frequency_limit": 2, "buckets": 0}],
}
# Dictionaries: the columns with their values, the key that breaks ties, the limit, the most ids.
DICTIONARIES = [
    (("user",), int, 3, None),
    (("item", "seen"), str.encode, 2, None),
    (("place",), str.encode, 1, 30),
    (("hashed",), str.encode, 4, None),
    (("both",), str.encode, 2, None),
]


def rows_of_day(day, rows=120):
    """Returns a table whose values drift with the day."""
    draw = random.Random(day)

    def value():
        return int(draw.expovariate(0.08)) + 4 * day

    table = {name: [] for name in ("y", "n", "user", "item", "seen", "place", "few", "hashed")}
    for row in range(rows):
        table["y"].append(row % 3 == 0)
        table["n"].append(draw.random() * day)
        table["user"].append(value() if draw.random() > 0.1 else None)
        table["item"].append(f"i{value()}" if draw.random() > 0.1 else None)
        table["seen"].append([f"i{value()}" for _ in range(draw.randrange(5))])
        table["place"].append(f"p{value() // 3}")
        table["few"].append(min(value(), 90))
        table["hashed"].append(f"h{value()}")
    return table


class Days:
    """Dictionaries over days: dicts of values, as documented.

    Attributes:
        ids: value -> id, of each dictionary.
        candidates: value -> [count in 1/256, last day], of each dictionary.
        forgotten: number of values that the last day forgot, of each dictionary.
    """

    def __init__(self, dictionaries, room=1 << 28, half_life=None):
        self.dictionaries, self.room, self.half_life = dictionaries, room, half_life
        self.ids = [{} for _ in dictionaries]
        self.candidates = [{} for _ in dictionaries]
        self.days = 0

    def decayed(self, count, last, day):
        if self.half_life is None:
            return count
        factor = round(2.0 ** (-(day - last) / self.half_life) * 2**32) / 2**32
        return math.floor(count * factor)

    def add(self, day, table):
        self.forgotten = [0] * len(self.dictionaries)
        for place, (names, key, limit, most) in enumerate(self.dictionaries):
            counts = Counter(value for name in names for value in values_of(table, name))
            ids, candidates, new = self.ids[place], self.candidates[place], []
            if names == ("hashed",) and self.days:
                continue  # its buckets follow its dictionary
            for value, count in counts.items():
                if value in ids:
                    continue
                before, last = candidates.pop(value, (0, day))
                total = 256 * count + self.decayed(before, last, day)
                if total >= 256 * limit:
                    new.append((-total, key(value), value))
                elif names != ("hashed",):
                    candidates[value] = total, day
            room = len(new) if most is None else most - len(ids)
            self.forgotten[place] = max(len(new) - room, 0)
            for _, _, value in sorted(new)[:room]:
                ids[value] = len(ids) + 1
        self.days += 1
        self._forget(day)

    def _forget(self, day):
        def size(value):
            return 20 if isinstance(value, int) else 28 + len(value.encode())

        def rank(item):
            value, (count, last) = item
            key = value if isinstance(value, int) else value.encode()
            return -self.decayed(count, last, day), -last, key

        needs = [sum(map(size, own)) for own in self.candidates]
        left = self.room
        for done, place in enumerate(sorted(range(len(needs)), key=lambda i: (needs[i], i))):
            room = min(needs[place], left // (len(needs) - done))
            left -= room
            kept, used = {}, 0
            for value, facts in sorted(self.candidates[place].items(), key=rank):
                used += size(value)
                if used > room:
                    break
                kept[value] = facts
            self.forgotten[place] += len(self.candidates[place]) - len(kept)
            self.candidates[place] = kept


def values_of(table, name):
    """Returns the values of a column, each as often as it occurs."""
    if name == "both":
        pairs = zip(table["user"], table["item"], strict=True)
        return [f"{a} & {b}" for a, b in pairs if a is not None and b is not None]
    flat = [v if isinstance(v, list) else [v] for v in table[name]]
    return [value for values in flat for value in values if value is not None]


def chain(folder, days, first=None, schema=SCHEMA, suffix=".parquet", **options):
    """Prepares days one after the other; returns their datasets."""
    made = []
    for number, table in enumerate(days, 1):
        file = write_table(table, folder / f"day{number}{suffix}", 17)
        before = {"extend": made[-1]} if made else (first or {"day": "1"})
        increment = IncrementConfig(**before, **options)
        prepare(
            schema, [file], folder / f"{number}", increment=increment, output_ordering="input"
        )
        made.append(folder / f"{number}")
    return made


def check(dataset, oracle):
    """Compares dictionaries, candidates and rows of the last day."""
    fitted = Transform.load(dataset / "transform")
    fitted.check_all()
    places = [0, 1, 2, 4, 5]  # without the field of ids
    day = fitted.increment.days[-1]
    for place, own in enumerate(oracle.ids):
        assert fitted.dictionaries[places[place]].values() == list(own)
    assert [day["candidates"][place] for place in places] == list(map(len, oracle.candidates))
    assert [day["forgotten"][place] for place in places] == oracle.forgotten
    return fitted


@pytest.fixture
def short(monkeypatch):
    """Lets segments of few values stay as they are."""
    monkeypatch.setattr(segments, "_LEAST_SEGMENT", 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"half_life": 1.5}, {"candidates": 1500}, {"candidates": 4000, "half_life": 3}],
    ids=str,
)
def test_dictionaries_over_days_are_those_of_the_oracle(options, tmp_path, short):
    tables = [rows_of_day(day) for day in range(1, 6)]
    oracle = Days(DICTIONARIES, options.get("candidates", 1 << 28), options.get("half_life"))
    segmented, forgotten = 0, 0
    for number, dataset in enumerate(chain(tmp_path, tables, **options), 1):
        table = tables[number - 1]
        oracle.add(number, table)
        fitted = check(dataset, oracle)
        ids = [oracle.ids[0].get(value, 0) for value in table["user"]]
        dtype = id_dtype(FeatureSpec.load(dataset).cardinalities[0])
        assert np.fromfile(dataset / "train/cat_0.bin", dtype).tolist() == ids
        lengths = [min(len(values), 3) for values in table["seen"]]
        assert np.fromfile(dataset / "train/cat_2.lengths.bin", "u1").tolist() == lengths
        most = max(table["few"])
        assert fitted.cardinalities[4] >= most + 1
        segmented += any(len(names_of(fitted, place)) > 1 for place in range(3))
        forgotten += sum(oracle.forgotten)
    assert segmented and (forgotten > 9 or "candidates" not in options)


def names_of(fitted, place):
    return [n for n in fitted._arrays_at(place) if n.startswith("dictionary")]
