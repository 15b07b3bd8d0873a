"""Days that extend the dictionaries of earlier days equal an oracle in plain Python."""

import hashlib
import math
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from preproc_testing import killed_at, renamings
from tables_testing import Inline, contents as all_contents, prepare, write_table

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.layout import KIND, id_dtype
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.dictionaries import arrays_of
from dlrm.data.transform.difference import check_extends
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.preproc.execution.work_folder import open_work_folder
from dlrm.preproc.increments import segments
from dlrm.preproc.increments.growth import open_growth
from dlrm.preproc.increments.inspection import inspect_chain, lines_of_chain
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.pipeline import prepare as prepare_logs
from dlrm.preproc.logs.raw_log import find_days
from dlrm.preproc.stages.options import IncrementConfig
from dlrm.preproc.stages.stage import PreparationRun
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.tasks.table_rows import changed_rows
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.checkpoints.saved_model import read_saved

SCHEMA = {
    "label": "y",
    "numerical": [{"column": "n", "transform": "standardize"}],
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
        prepare(schema, [file], folder / f"{number}", increment=increment, output_ordering="input")
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
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"half_life": 1.5}, marks=pytest.mark.slow),
        pytest.param({"candidates": 1500}, marks=pytest.mark.slow),
        {"candidates": 4000, "half_life": 3},
    ],
    ids=str,
)
def test_dictionaries_over_days_are_those_of_the_oracle(options, tmp_path, short):
    tables = [rows_of_day(day) for day in range(1, 5)]
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
    assert segmented
    assert forgotten > 9 or "candidates" not in options


def names_of(fitted, place):
    names = arrays_of(fitted.dictionaries[place], place)
    return [name for name in names if name.startswith("dictionary")]


TEXTS = {
    "label": "y",
    "numerical": [{"column": "n", "transform": "standardize"}],
    "categorical": [
        {"column": "item", "frequency_limit": 2},
        {"column": "user", "type": "integer", "frequency_limit": 2},
    ],
}


def small(day):
    """Returns a table of few columns, in which the mean of the number is the day."""
    table = rows_of_day(day, 60)
    return {name: table[name] for name in ("y", "item", "user")} | {"n": [day - 1.0, day + 1] * 30}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two days, and the table of the third."""
    folder = tmp_path_factory.mktemp("two")
    chain(folder, [small(1), small(2)], schema=TEXTS)
    return folder


def extend(parent, output, number=3, schema=TEXTS, table=None, **options):
    file = output.parent / f"rows{output.name}.parquet"
    if not file.exists():
        write_table(table or small(number), file, 17)
    return prepare(schema, [file], output, increment=IncrementConfig(extend=parent, **options))


def test_values_are_the_same_as_in_one_preparation_of_all_days(two, tmp_path):
    extend(two / "2", tmp_path / "3", candidates=1 << 20)
    together = {name: sum((small(day)[name] for day in (1, 2, 3)), []) for name in small(1)}
    prepare(TEXTS, [write_table(together, tmp_path / "all.parquet", 40)], tmp_path / "all")
    extended, once = (
        Transform.load(tmp_path / name / "transform").dictionaries for name in ("3", "all")
    )
    assert [set(d.values()) for d in extended] == [set(d.values()) for d in once]
    assert extended[0].values() != once[0].values(), "ids stay in the order of days"


def drawn(seed, day, field, value, probability):
    """Returns whether a number is admitted, by the generator splitmix64 in plain Python."""
    start = int.from_bytes(hashlib.sha256(f"{seed} {day} {field}".encode()).digest()[:8], "big")
    state = (start + (value + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> shift) * factor % 2**64
    return (state ^ state >> 31) < probability * 2**64


def test_rare_values_are_admitted_by_chance(tmp_path):
    days, options = [small(1), small(2)], {"admission_probability": 0.25}
    made = chain(tmp_path, days, schema=TEXTS, **options)
    ids, counts, by_chance = [], Counter(), 0
    for number, table in enumerate(days, 1):
        today = Counter(value for value in table["user"] if value is not None and value not in ids)
        counts += today
        chosen = {v for v in today if drawn(0, number, "of user", v, 0.25)}
        by_chance += sum(counts[v] < 2 for v in chosen)
        new = {value for value in today if counts[value] >= 2} | chosen
        ids += sorted(new, key=lambda value: (-counts[value], value))
    fitted = Transform.load(made[1] / "transform")
    assert by_chance > 2
    assert fitted.dictionaries[1].values() == ids
    day = fitted.increment.days[-1]
    assert day["admission_probability"] == 0.25
    assert day["candidates"][1] == sum(counts[value] < 2 for value in set(counts) - set(ids))
    parts = {"output_ordering": "input", "split_bytes": 500}
    first = IncrementConfig(day="1", **options)
    prepare(TEXTS, [tmp_path / "day1.parquet"], tmp_path / "parts", increment=first, **parts)
    assert contents(tmp_path / "parts") == contents(made[0])


def test_every_value_is_admitted_with_probability_1(two, tmp_path):
    extend(two / "2", tmp_path / "3", admission_probability=1.0)
    fitted = Transform.load(tmp_path / "3/transform")
    assert set(small(3)["item"]) - {None} <= set(fitted.dictionaries[0].values())
    for chance in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="--admission_probability"):
            IncrementConfig(day="1", admission_probability=chance)
    with pytest.raises(ValueError, match="--admission_probability: expected --extend or --day"):
        IncrementConfig(admission_probability=0.5)


def test_hours_follow_one_another(two, tmp_path):
    made = chain(tmp_path, [small(1), small(2)], {"day": "2026-11-26T23"}, schema=TEXTS)
    assert Transform.load(made[1] / "transform").increment.day == "2026-11-27T00"
    with pytest.raises(ValueError, match="--day 2026-11-27: expected an hour, as 2026-11-27T00"):
        extend(made[1], tmp_path / "3", day="2026-11-27")
    with pytest.raises(ValueError, match="expected a day after 2026-11-27T00, .* an earlier one"):
        extend(made[1], tmp_path / "3", day="2026-11-26T22")
    for wrong in ("2026-11-26T24", "2026-11-26T5:30", "2026-02-30", "noon"):
        with pytest.raises(ValueError, match=f"--day {wrong}: expected a number such as 7"):
            IncrementConfig(day=wrong)


def test_a_folder_with_the_dataset_in_it_is_told_where_it_is(two, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{two}: .* got none; {two / '2'} has one"):
        extend(two, tmp_path / "3")


@pytest.mark.parametrize("numerics", ["keep", "refit"])
def test_numerics_are_kept_or_refitted(numerics, two, tmp_path):
    extend(two / "2", tmp_path / "3", numerics=numerics)
    after = Transform.load(tmp_path / "3/transform")
    assert after.numerical[0].mean == (1.0 if numerics == "keep" else 3.0)


def test_segments_are_links_of_the_day_before(two, tmp_path, short):
    extend(two / "2", tmp_path / "3")
    fitted = Transform.load(tmp_path / "3" / "transform")
    assert len(names_of(fitted, 0)) > 1
    for name in ("transform/dictionary_0.npy", "transform/texts_0.npy", "chain/hashes_0"):
        assert (tmp_path / "3" / name).samefile(two / "2" / name)


def contents(folder):
    """Returns the bytes of all files, without the record of verified ones."""
    files = all_contents(folder)
    return {name: data for name, data in files.items() if not name.endswith(".verified.json")}


def changed(schema, **entries):
    return schema | entries


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"day": "2"}, r"--day 2: expected a day after 2, .* has this day already"),
        ({"day": "0"}, r"--day 0: expected a day after 2, .* an earlier one"),
        ({"day": "2026-11-20"}, r"--day 2026-11-20: expected a number, as 2 of"),
        ({"day": "3", "table": small(1)}, r"expected rows of another day, got those of day 1"),
        ({"table": small(3) | {"y": [False] * 60}}, r"--day 3: expected rows with label 1"),
        (
            {"schema": changed(TEXTS, numerical=[{"column": "n", "transform": "log"}])},
            r"another one: numerical n: transform: the default in the transform and 'log' in the",
        ),
        (
            {"schema": changed(TEXTS, categorical=["item"])},
            r"another one: categorical user: .* in the transform and nothing in the schema",
        ),
        (
            {"schema": changed(TEXTS, categorical=TEXTS["categorical"][::-1])},
            r"another one: categorical: another order",
        ),
    ],
    ids=["twice", "backwards", "kind of day", "same rows", "no click", "rule", "field", "order"],
)
def test_a_day_that_does_not_follow_is_refused(options, message, two, tmp_path):
    before = contents(two / "2")
    with pytest.raises(ValueError, match=message):
        extend(two / "2", tmp_path / "3", **options)
    assert not (tmp_path / "3").exists()
    assert contents(two / "2") == before


def test_limits_may_change(two, tmp_path):
    fields = [field | {"frequency_limit": 1} for field in TEXTS["categorical"]]
    extend(two / "2", tmp_path / "3", schema=changed(TEXTS, categorical=fields))
    fitted = Transform.load(tmp_path / "3" / "transform")
    assert set(small(3)["user"]) - {None} <= set(fitted.dictionaries[1].values())


@pytest.mark.parametrize(
    "name", ["chain/hashes_0", "chain/candidate_counts_0.npy", "transform/table.json"]
)
def test_a_damaged_parent_is_named(name, two, tmp_path):
    shutil.copytree(two / "2", tmp_path / "2")
    content = bytearray((tmp_path / "2" / name).read_bytes())
    content[-9] ^= 1
    (tmp_path / "2" / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: expected CRC-32"):
        extend(tmp_path / "2", tmp_path / "3")


def test_counts_of_another_run_are_refused(two, tmp_path):
    for name in ("1", "2"):
        shutil.copytree(two / name, tmp_path / name)
    shutil.rmtree(tmp_path / "2/chain")
    shutil.copytree(tmp_path / "1/chain", tmp_path / "2/chain")
    write_manifest(tmp_path / "2", "dataset", rows={}, cardinalities=[], transform={})
    with pytest.raises(ValueError, match="they are left over from another run"):
        extend(tmp_path / "2", tmp_path / "3")


@pytest.mark.slow
def test_a_parent_without_counts_begins_at_zero(two, tmp_path):
    prepare(TEXTS, [write_table(small(1), tmp_path / "rows.parquet", 17)], tmp_path / "1")
    said = extend(tmp_path / "1", tmp_path / "2", 2)
    assert any("has no counts of values below their frequency limit" in line for line in said)
    whole = Transform.load(two / "2/transform").dictionaries[0].values()
    begun = Transform.load(tmp_path / "2/transform")
    first = Transform.load(tmp_path / "1/transform").dictionaries[0].values()
    assert first == begun.dictionaries[0].values()[: len(first)]
    assert set(begun.dictionaries[0].values()) < set(whole)
    assert begun.increment.day == "1"
    assert not (tmp_path / "1/chain").exists()


@pytest.mark.slow
def test_a_day_has_the_same_bytes_in_parts_of_any_size(two, tmp_path):
    made = []
    for number, size in enumerate((1 << 20, 500)):
        extend(two / "2", tmp_path / f"{number}")
        prepare(
            TEXTS,
            [tmp_path / "rows0.parquet"],
            tmp_path / f"of{size}",
            increment=IncrementConfig(extend=two / "2"),
            split_bytes=size,
        )
        made.append(contents(tmp_path / f"of{size}"))
    assert made[0] == made[1]


@pytest.mark.slow
def test_a_killed_day_goes_on_to_the_same_bytes(two, tmp_path):
    before = contents(two)
    extend(two / "2", tmp_path / "3")
    whole = contents(tmp_path / "3")

    def again():
        shutil.rmtree(tmp_path / "3")
        shutil.rmtree(tmp_path / "3.unfinished", ignore_errors=True)
        extend(two / "2", tmp_path / "3")

    for number in range(2, renamings(again), 9):  # the first is the record of verified files
        shutil.rmtree(tmp_path / "3", ignore_errors=True)
        with killed_at(number):
            extend(two / "2", tmp_path / "3")
        extend(two / "2", tmp_path / "3")
        assert contents(tmp_path / "3") == whole, number
    assert contents(two) == before


def test_the_chain_is_verified_and_shown(two, tmp_path):
    folder = tmp_path / "of" / "one"
    shutil.copytree(two, folder, copy_function=os.link)
    extend(folder / "2", folder / "3")
    found = inspect_chain(folder / "3")
    assert not found["faults"]
    assert [day["day"] for day in found["days"]] == ["1", "2", "3"]
    assert [Path(day["dataset"]).name for day in found["days"]] == ["1", "2", "3"]
    fitted = Transform.load(folder / "3/transform")
    assert found["days"][-1]["values"] == sum(map(len, fitted.dictionaries))
    assert found["dictionaries"][0]["columns"] == ["item"]
    text = "\n".join(lines_of_chain(found))
    assert "a chain of 3 days, up to 3" in text
    assert "of candidates" in text


def test_damage_is_named_with_every_day_that_has_it(two, tmp_path, short):
    tmp_path = tmp_path / "of" / "one"
    for name in ("1", "2"):
        shutil.copytree(two / name, tmp_path / name)
    extend(tmp_path / "2", tmp_path / "3")
    path = tmp_path / "3/transform/dictionary_0.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (fault,) = inspect_chain(tmp_path / "3")["faults"]
    assert f"it is used by {tmp_path / '3'}, {tmp_path / '2'}" in fault


def test_a_day_that_was_prepared_again_is_named(two, tmp_path):
    tmp_path = tmp_path / "of" / "one"
    for name in ("1", "2"):
        shutil.copytree(two / name, tmp_path / name)
    extend(tmp_path / "2", tmp_path / "3")
    shutil.rmtree(tmp_path / "2")
    extend(tmp_path / "1", tmp_path / "2", 7, day="2")
    found = inspect_chain(tmp_path / "3")
    assert found["days"][1]["dataset"] is None
    assert found["faults"] == [
        f"{tmp_path / '2'}: day 2 has another transform than the one that {tmp_path / '3'} extends:"
        " it was prepared again since"
    ]


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.spark)])
@pytest.mark.slow
def test_engines_write_the_same_days(engine, request, two, tmp_path):
    extend(two / "2", tmp_path / "3")
    prepare(
        TEXTS,
        [tmp_path / "rows3.parquet"],
        tmp_path / "other",
        engine=request.getfixturevalue(engine),
        increment=IncrementConfig(extend=two / "2"),
    )
    assert contents(tmp_path / "other") == contents(tmp_path / "3")


def hashes_of(logs, column):
    """Returns the values of a categorical column of days of logs."""
    lines = [line.split("\t") for path in logs.iterdir() for line in path.read_text().split("\n")]
    return [int(line[column], 16) for line in lines if len(line) > column and line[column]]


def test_logs_are_extended(tmp_path):
    parent, oracle = None, Days([((column,), int, 3, None) for column in (3, 4)])
    for day in (1, 2, 3):
        logs = tmp_path / f"logs{day}"
        simulate(Simulation(rows=150, days=2, num_numerical=2, num_categorical=2, seed=day), logs)
        (logs / "planted.json").unlink()
        before = {"day": "1"} if parent is None else {"extend": parent}
        options = LogOptions(
            log_format=LogFormat(2, 2), frequency_limit="3", increment=IncrementConfig(**before)
        )
        growth = open_growth(options.increment, options.schema, print)
        output = tmp_path / str(day)
        with open_work_folder(output, options.facts() | growth.facts(), False, False) as work:
            run = PreparationRun(Inline(), work, options, lambda line: None, growth)
            prepare_logs(run, find_days(logs))
            work.publish()
        parent = output
        oracle.add(day, {column: hashes_of(logs, column) for column in (3, 4)})
        fitted = Transform.load(parent / "transform")
        assert fitted.is_log
        for dictionary, ids in zip(fitted.dictionaries, oracle.ids, strict=True):
            assert dictionary.keys.tolist() == list(ids)


@pytest.mark.slow
def test_a_model_of_an_earlier_day_grows_by_the_dictionaries_of_a_later_one(two, tmp_path):
    settings = {"epochs": 1, "embedding_dim": 4, "bottom_mlp_sizes": (4,), "top_mlp_sizes": (1,)}
    dlrm.fit(str(two / "1"), save_checkpoint_path=tmp_path / "run", **settings)
    checkpoint = last_checkpoint(tmp_path / "run")
    extend(checkpoint, tmp_path / "2", 2)
    extend(tmp_path / "2", tmp_path / "3")
    later = Transform.load(tmp_path / "3/transform")
    assert [day["day"] for day in later.increment.days] == ["1", "2", "3"]
    assert check_extends(checkpoint, tmp_path / "3") is None
    grown = changed_rows(read_saved(checkpoint), later.cardinalities)
    assert [table.rows for table in grown.tables] == later.cardinalities
    with pytest.raises(ValueError, match="expected the transform of .* with further values"):
        check_extends(tmp_path / "3", two / "2", KIND)
