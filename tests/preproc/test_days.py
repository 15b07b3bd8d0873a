"""Rows that extend the dictionaries of earlier ones equal an oracle in plain Python."""

import random
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tables_testing import Inline, contents, prepare, write_table

import dlrm
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.layout import id_dtype
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.transform import Transform
from dlrm.model.dlrm import DLRM
from dlrm.preproc.errors import TaskError
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.pipeline import prepare as prepare_logs
from dlrm.preproc.logs.raw_log import find_days
from dlrm.preproc.options import IncrementConfig
from dlrm.preproc.parent import open_parent
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.work_folder import open_work_folder
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.serving.loading import model_config
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.checkpoints.state import Parameters

SCHEMA = {
    "label": "y",
    "numerical": [{"column": "n", "transform": "standardize"}],
    "categorical": [
        {"column": "user", "type": "integer", "frequency_limit": 3},
        {"column": "item", "frequency_limit": 2, "dictionary": "items"},
        {"column": "seen", "frequency_limit": 2, "dictionary": "items", "max_length": 3},
        {"column": "place", "max_ids": 20},
        {"column": "few", "type": "id"},
        {"column": "hashed", "frequency_limit": 4, "hash_buckets": 5},
    ],
    "crosses": [{"name": "both", "fields": ["user", "item"], "frequency_limit": 2, "buckets": 0}],
}
# Dictionaries: the columns with their values, the key that breaks ties, the limit, the most ids.
DICTIONARIES = [
    (("user",), int, 3, None),
    (("item", "seen"), str.encode, 2, None),
    (("place",), str.encode, 1, 20),
    (("hashed",), str.encode, 4, None),
    (("both",), str.encode, 2, None),
]


def rows_of_day(day, rows=120):
    """Returns a table whose values drift with the day."""
    draw = random.Random(day)

    def value():
        return int(draw.expovariate(0.08)) + 4 * day

    def some(item):
        return item if draw.random() > 0.1 else None

    return {
        "y": [row % 3 == 0 for row in range(rows)],
        "n": [draw.random() * day for _ in range(rows)],
        "user": [some(value()) for _ in range(rows)],
        "item": [some(f"i{value()}") for _ in range(rows)],
        "seen": [[f"i{value()}" for _ in range(draw.randrange(5))] for _ in range(rows)],
        "place": [f"p{value() // 3}" for _ in range(rows)],
        "few": [min(value(), 90) for _ in range(rows)],
        "hashed": [f"h{value()}" for _ in range(rows)],
    }


class Days:
    """Dictionaries over days: value -> id, of each dictionary, as documented."""

    def __init__(self, dictionaries):
        self.dictionaries, self.days = dictionaries, 0
        self.ids = [{} for _ in dictionaries]

    def add(self, table):
        for place, (names, key, limit, most) in enumerate(self.dictionaries):
            if names == ("hashed",) and self.days:
                continue  # its buckets follow its dictionary
            counts = Counter(value for name in names for value in values_of(table, name))
            ids = self.ids[place]
            new = [v for v, count in counts.items() if count >= limit and v not in ids]
            new.sort(key=lambda value: (-counts[value], key(value)))
            for value in new[: None if most is None else most - len(ids)]:
                ids[value] = len(ids) + 1
        self.days += 1


def values_of(table, name):
    """Returns the values of a column, each as often as it occurs."""
    if name == "both":
        pairs = zip(table["user"], table["item"], strict=True)
        return [f"{a} & {b}" for a, b in pairs if a is not None and b is not None]
    flat = [v if isinstance(v, list) else [v] for v in table[name]]
    return [value for values in flat for value in values if value is not None]


def chain(folder, days, schema=SCHEMA, engine=None):
    """Prepares days one after the other; returns their datasets."""
    made = []
    for number, table in enumerate(days, 1):
        file = write_table(table, folder / f"day{number}.parquet", 17)
        increment = IncrementConfig(made[-1] if made else None)
        how = {"output_ordering": "input", "split_bytes": 500}  # parts of a few rows
        prepare(schema, [file], folder / f"{number}", engine, increment=increment, **how)
        made.append(folder / f"{number}")
    return made


def test_dictionaries_over_days_are_those_of_the_oracle(tmp_path):
    tables, oracle = [rows_of_day(day) for day in range(1, 5)], Days(DICTIONARIES)
    for table, dataset in zip(tables, chain(tmp_path, tables), strict=True):
        oracle.add(table)
        fitted = Transform.load(dataset / "transform")
        fitted.check_all()
        for place, own in zip((0, 1, 2, 4, 5), oracle.ids, strict=True):
            assert fitted.dictionaries[place].values() == list(own)
        ids = [oracle.ids[0].get(value, 0) for value in table["user"]]
        dtype = id_dtype(FeatureSpec.load(dataset).cardinalities[0])
        assert np.fromfile(dataset / "train/cat_0.bin", dtype).tolist() == ids
        lengths = [min(len(values), 3) for values in table["seen"]]
        assert np.fromfile(dataset / "train/cat_2.lengths.bin", "u1").tolist() == lengths
        assert fitted.cardinalities[4] >= max(table["few"]) + 1
    assert len(oracle.ids[2]) == 20  # the most


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


def test_a_folder_with_the_dataset_in_it_is_told_where_it_is(two, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{two}: .* got none; {two / '2'} has one"):
        extend(two, tmp_path / "3")
    with pytest.raises(ValueError, match="--numerics: expected --extend too, got none"):
        IncrementConfig(numerics="refit")


@pytest.mark.parametrize("numerics", ["keep", "refit"])
def test_numerics_are_kept_or_refitted(numerics, two, tmp_path):
    extend(two / "2", tmp_path / "3", numerics=numerics)
    after = Transform.load(tmp_path / "3/transform")
    assert after.numerical[0].mean == (1.0 if numerics == "keep" else 3.0)


OTHERS = {
    "no click": ({"table": small(3) | {"y": [False] * 60}}, "--extend .*/2: expected rows with la"),
    "rule": (
        {"schema": TEXTS | {"numerical": [{"column": "n", "transform": "log"}]}},
        r'another one: numerical: {"column": "n"} in the transform and .*"log"} in the schema',
    ),
    "field": (
        {"schema": TEXTS | {"categorical": ["item"]}},
        r'another one: categorical: .*"user".* in the transform and nothing in',
    ),
    "order": (
        {"schema": TEXTS | {"categorical": TEXTS["categorical"][::-1]}},
        r'another one: categorical: {"column": "item"} in the transform and {"column": "user"',
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_rows_that_extend_nothing_are_refused(case, two, tmp_path):
    before, (options, message) = contents(two / "2", "bin"), OTHERS[case]
    with pytest.raises(ValueError, match=message):
        extend(two / "2", tmp_path / "3", **options)
    assert not (tmp_path / "3").exists()
    assert contents(two / "2", "bin") == before


def test_limits_may_change(two, tmp_path):
    fields = [field | {"frequency_limit": 1} for field in TEXTS["categorical"]]
    extend(two / "2", tmp_path / "3", schema=TEXTS | {"categorical": fields})
    fitted = Transform.load(tmp_path / "3" / "transform")
    assert set(small(3)["user"]) - {None} <= set(fitted.dictionaries[1].values())


@pytest.mark.parametrize("name", ["transform/dictionary_0.npy", "transform/transform.json"])
def test_a_damaged_parent_is_named(name, two, tmp_path):
    shutil.copytree(two / "2", tmp_path / "2")
    content = bytearray((tmp_path / "2" / name).read_bytes())
    content[-9] ^= 1
    (tmp_path / "2" / name).write_bytes(content)
    with pytest.raises((ValueError, TaskError), match=f"{name}: expected CRC-32"):
        extend(tmp_path / "2", tmp_path / "3")


def test_a_label_that_the_parent_does_not_have_is_named(tmp_path):
    schema, table = TEXTS | {"label": {"column": "y", "positive": "yes"}}, small(1)
    days = [table | {"y": ["yes" if y else no for y in table["y"]]} for no in ("no", "never")]
    with pytest.raises(ValueError, match="column y: expected the labels of .*, got 'never'"):
        chain(tmp_path, days, schema)


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
        options = LogOptions(
            log_format=LogFormat(2, 2), frequency_limit="3", increment=IncrementConfig(parent)
        )
        opened = open_parent(options.increment, options.schema)
        with open_work_folder(tmp_path / str(day), options.facts(), False, False) as work:
            run = PreparationRun(Inline(), work, options, lambda line: None, opened)
            prepare_logs(run, find_days(logs))
            work.publish()
        parent = tmp_path / str(day)
        oracle.add({column: hashes_of(logs, column) for column in (3, 4)})
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
    assert compare_transforms(checkpoint, tmp_path / "3", extended=True) is None
    sizes = tuple(later.cardinalities)
    larger = DLRM(replace(model_config(checkpoint), table_sizes=sizes))
    Checkpoint(checkpoint).load(Parameters(larger, larger.table_parameters()), table_sizes=sizes)
    prepare(TEXTS, [tmp_path / "rows3.parquet"], tmp_path / "alone")
    with pytest.raises(ValueError, match="expected the transform of .* with further values"):
        compare_transforms(checkpoint, tmp_path / "alone", extended=True)
