"""Datasets of random tables equal, byte for byte, those of a second implementation."""

import csv
import itertools
import json
import tempfile
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from table_oracle import SPLITS, Oracle, text_of
from tables_testing import contents, prepare

from dlrm.data.transform.transform import Transform
from dlrm.preproc.errors import TaskError

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
WORDS = [
    *"abBäé",
    "日本",
    "x y",
    " pad ",
    "\u00a0nb\u2003",
    "NA",
    "a,b",
    'q"',
    "2\nlines",
    "tab\tin",
]
WORDS += ["\r", "😀" * 9, "longer than a word of eight bytes", "12345678", "e\u0301"]
INTEGERS = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}
UNSIGNED = {pa.uint8(): 8, pa.uint16(): 16, pa.uint32(): 32, pa.uint64(): 63}


BOOLEANS = st.just((pa.bool_(), st.booleans()))


@st.composite
def texts(draw):
    coded = pa.dictionary(pa.int32(), pa.string())
    kind = draw(st.sampled_from([pa.string(), pa.large_string(), coded]))
    some = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)
    return kind, st.sampled_from([*WORDS, "", "  ", *draw(st.lists(some, max_size=3))])


@st.composite
def integers(draw):
    kind, bits = draw(st.sampled_from([*INTEGERS.items(), *UNSIGNED.items()]))
    low = -(1 << bits) if kind in INTEGERS else 0
    ends = [low, low + 1, (1 << bits) - 1, 0, 1, 2, 10, *([-1] if low else [])]
    return kind, st.sampled_from([*ends, *draw(st.lists(st.integers(low, (1 << bits) - 1)))])


@st.composite
def decimals(draw):
    places = draw(st.sampled_from([0, 2, 9]))
    number = st.integers(-(10**15) + 1, 10**15 - 1)
    few = [Decimal(n).scaleb(-places) for n in [0, 1, 100, -1050, *draw(st.lists(number))]]
    return pa.decimal128(15 + draw(st.sampled_from([0, 20])), places), st.sampled_from(few)


@st.composite
def floats(draw, limit=None):
    kind, width = draw(st.sampled_from([(pa.float32(), 32), (pa.float64(), 64)]))
    limits = {} if limit is None else {"min_value": -limit, "max_value": limit}
    number = st.floats(allow_nan=False, allow_infinity=False, width=width, **limits)
    number = number.filter(lambda value: abs(value) > 1e-30)  # squares do not underflow
    number = number.filter(lambda value: not 2**53 <= abs(value) < 2**64)  # refused as ids
    if width == 32:  # numbers with one text, which is the shortest of their width
        number = number.filter(lambda value: float(str(np.float32(value))) == value)
    some = draw(st.lists(number, max_size=6))
    return kind, st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1024.0, *some])


@st.composite
def times(draw):
    """Draws times, and the entries of their field."""
    moments = st.integers(-(10**9), 2 * 10**9) | st.sampled_from([1774746000, 1792890000])
    unit = draw(st.sampled_from(["s", "ms", "us", "ns"]))
    fraction = {"s": 10**6, "ms": 10**3}.get(unit, 1)
    zone = draw(st.sampled_from([None, "UTC", "Europe/Zurich", "America/New_York"]))
    counts = draw(st.lists(moments, min_size=1, max_size=9))
    found = [
        EPOCH + timedelta(seconds=n, microseconds=n % 10**6 // fraction * fraction) for n in counts
    ]
    if zone is not None:
        found = [time.astimezone(ZoneInfo(zone)) for time in found]
    how = draw(st.sampled_from(["zoned", "local", "number", "text"]))
    if how == "number":
        few = [int((t - EPOCH) / timedelta(seconds=1)) for t in found]
        return pa.int64(), st.sampled_from(few), {"unit": draw(st.sampled_from(["s", "ms", "us"]))}
    if how == "text":
        return pa.string(), st.sampled_from([f" {t.isoformat()} " for t in found]), {}
    if how == "local":
        few = [t.replace(tzinfo=None, fold=0) for t in found]
        few.append(datetime(2026, 3, 29, 2, 30))  # skipped by clocks in Europe
        return pa.timestamp(unit), st.sampled_from(few), {"zone": zone or "UTC"}
    return pa.timestamp(unit, zone or "UTC"), st.sampled_from(found), {}


WHOLE = [  # texts and numbers that are integers
    (None, []),
    (pa.string(), ["1", " 2", "-3 ", "+4", "", "007"]),
    (pa.float64(), [1.0, 2.0, -3.0, 2.0**52]),
    (pa.decimal128(9, 2), [Decimal(1), Decimal(-20)]),
]


@st.composite
def categorical_fields(draw, name):
    entry = {"column": name}
    if draw(st.booleans()):
        entry["type"] = "integer"
        kind, pool = draw(st.sampled_from(WHOLE))
        kind, values = draw(integers()) if kind is None else (kind, st.sampled_from(pool))
    else:
        kind, values = draw(st.one_of(texts(), integers(), floats(), decimals(), BOOLEANS))
    for option, choices in (
        ("frequency_limit", st.integers(2, 3)),
        ("max_ids", st.integers(1, 4)),
        ("hash_buckets", st.integers(1, 200)),
    ):
        if draw(st.booleans()):
            entry[option] = draw(choices)
    return entry, kind, st.none() | values


def as_list(separator, longest):
    """Returns a strategy of lists of values that CSV and Parquet represent alike."""

    def is_one_missing(values):
        return len(values) == 1 and text_of(values[0]) in ("", "NA", "-1", "1024", "007")

    def listed(values):
        values = values.map(lambda v: None if separator in text_of(v) else v)
        lists = st.lists(values, max_size=longest)
        return st.one_of(st.none(), lists.map(lambda v: [] if is_one_missing(v) else v))

    return listed


WEIGHTS = [0.5, 2.0, 0.0, -3.25, 0.1, 3e38]


@st.composite
def list_fields(draw, name):
    """Draws a field of lists with values of `categorical_fields`."""
    entry, kind, values = draw(categorical_fields(name))
    longest = draw(st.sampled_from([1, 3, 6]))
    entry["max_length"] = draw(st.integers(1, 8))
    keep = draw(st.sampled_from(["first", "last", "all", None]))
    if keep == "all":
        entry["max_length"] = max(entry["max_length"], longest)
    entry |= {"keep": keep} if keep else {}
    entry |= {"ordered": False} if keep != "last" and draw(st.booleans()) else {}
    entry |= {"separator": ";"} if draw(st.booleans()) else {}
    kind = draw(st.sampled_from([pa.list_, pa.large_list]))(kind)
    if draw(st.booleans()):
        entry["weights"] = f"{name} weights"
    return entry, kind, as_list(entry.get("separator", "|"), longest)(values)


@st.composite
def numerical_fields(draw, name):
    rule = draw(st.sampled_from(["log", "standardize", "quantile", "none"]))
    entry = {"column": name, "transform": rule}
    if draw(st.booleans()):
        entry["bins"] = draw(st.sampled_from([2, 3, 5, 256]))
    limit = 60000.0 if rule == "none" else 1e9
    numbers = [floats(limit)]
    if rule != "none":
        numbers += [integers(), decimals()]
    as_text = st.sampled_from(["1", " -2.5 ", "1e3", "NA", "", "+.5", "007"])
    kind, values = draw(st.one_of(*numbers, BOOLEANS, st.just((pa.string(), as_text))))
    values = values.map(lambda value: value + 0.0 if isinstance(value, float) else value)
    return entry, kind, st.none() | values  # without -0.0, which text lacks


@st.composite
def divisions(draw, columns):
    seed = {"seed": draw(st.sampled_from([0, 1, 2**63, -5]))}
    if draw(st.booleans()):
        seed["keep_negatives"] = draw(st.sampled_from([0.5, 0.9]))
    # Booleans in number columns are 0 and 1 as text, but true and false in Parquet.
    away = ["time"] + [name for name, (kind, _) in columns.items() if pa.types.is_nested(kind)]
    keys = sorted(n for n, (kind, _) in columns.items() if n not in away and kind != pa.bool_())
    ways = ["chance", "files", "column", "chance", "none"]
    ways += (["key"] if keys else []) + (["time"] if "time" in columns else [])
    way = draw(st.sampled_from(ways))
    if way in ("chance", "key"):
        test, validation = draw(st.sampled_from([(0.3, 0.0), (0.3, 0.3), (0.0, 0.5), (0.6, 0.1)]))
        key = {"split_key": draw(st.sampled_from(keys))} if way == "key" else {}
        return seed | {"test_fraction": test, "validation_fraction": validation} | key
    if way == "column":
        return seed | {"split_column": "part"}
    if way == "time":
        later = {"validation_from": "2040-01-01"} if draw(st.booleans()) else {}
        return seed | {"test_from": "2005-06-01T00:00:00+02:00"} | later
    return seed | ({"files": True} if way == "files" else {})


@st.composite
def crosses(draw, names):
    cross = {"fields": draw(st.permutations(names))[: draw(st.integers(2, len(names)))]}
    if draw(st.booleans()):
        return cross | {"buckets": draw(st.sampled_from([1, 7, 1000]))}
    cross |= {"frequency_limit": draw(st.sampled_from([1, 2]))}
    cross |= {"max_ids": 3} if draw(st.booleans()) else {}
    return cross | ({"buckets": 5} if draw(st.booleans()) else {})


OF_LISTS = ("max_length", "keep", "ordered", "separator", "weights")
LABELS = [
    ({"column": "y"}, pa.int8(), [0, 1]),
    ({"column": "y"}, pa.bool_(), [False, True]),
    ({"column": "y"}, pa.float32(), [0.0, 1.0]),
    ({"column": "y"}, pa.string(), ["0", " 1", "true", "false "]),
    ({"column": "y", "positive": "ja"}, pa.string(), ["ja", " ja", "nein"]),
    ({"column": "y", "positive": "4", "any_negative": True}, pa.int16(), [4, 1, 2, 3]),
    ({"column": "y", "positive": "2", "negative": ["1", "5"]}, pa.int16(), [2, 1]),
]


@st.composite
def tables(draw, numbers_of_rows=(40, 40, 30, 30, 12, 2)):
    """Draws a schema, columns (name -> type and values) and a division."""
    rows = draw(st.sampled_from(numbers_of_rows))
    columns, schema = {}, {}

    def add(name, kind, values):
        columns[name] = (kind, [draw(values) for _ in range(rows)])

    label, kind, values = draw(st.sampled_from(LABELS))
    schema["label"] = label
    add("y", kind, st.sampled_from(values))
    columns["y"][1][0] = values[0] if "positive" in label else columns["y"][1][0]
    schema["missing_values"] = draw(st.sampled_from([[], ["NA"], ["NA", "-1", "1024", "007"]]))
    fields = []
    for i in range(draw(st.integers(0, 2))):
        entry, kind, values = draw(numerical_fields(f"n{i}"))
        if not schema["missing_values"]:
            values = values.map(lambda value: "2" if value == "NA" else value)
        schema.setdefault("numerical", []).append(entry)
        add(f"n{i}", kind, values)
    for i in range(draw(st.integers(0 if "numerical" in schema else 1, 3))):
        drawn = draw(st.sampled_from([categorical_fields, list_fields]))
        entry, kind, values = draw(drawn(f"c {i}"))
        of_list = {k: v for k, v in entry.items() if k in OF_LISTS}
        if fields and draw(st.booleans()):
            first = fields[0]
            if first.get("type") == entry.get("type"):
                shared = {k: v for k, v in first.items() if k not in OF_LISTS}
                entry = {**shared, **of_list, "column": f"c {i}", "dictionary": "shared"}
                first["dictionary"] = "shared"
        fields.append(entry)
        add(f"c {i}", kind, values)
        if "weights" in entry:
            given = columns[f"c {i}"][1]
            weights = [
                v if v is None else [draw(st.sampled_from(WEIGHTS)) for _ in v] for v in given
            ]
            columns[entry["weights"]] = (pa.list_(pa.float64()), weights)
    if fields:
        schema["categorical"] = fields
    single = [field["column"] for field in fields if "max_length" not in field]
    if len(single) > 1 and draw(st.booleans()):
        schema["crosses"] = [draw(crosses(single)) for _ in range(draw(st.integers(1, 2)))]
        schema["crosses"][-1]["name"] = "crossed"
    if draw(st.booleans()):
        schema["weight"] = "w"
        add("w", pa.float64(), st.sampled_from([0.0, 1.0, 0.1, 3e38]))
    if draw(st.booleans()):
        users = [(pa.string(), ["u1", " u2 ", "ü"]), (pa.int64(), [7, -9])]
        kind, values = draw(st.sampled_from(users))
        schema["groups"] = ["user"]
        add("user", kind, st.sampled_from(values))
    if draw(st.booleans()):
        kind, values, entries = draw(times())
        schema["time"] = {"column": "time", **entries}
        add("time", kind, values)
    division = draw(divisions(columns))
    if "split_column" in division:
        add("part", pa.string(), st.sampled_from(["train", "Test", " VALIDATION "]))
    return schema, columns, division


def write_parquet(path, columns, begin, end, rows, **options):
    table = pa.table({n: pa.array(v[begin:end], k) for n, (k, v) in columns.items()})
    pq.write_table(table, path, row_group_size=rows, **options)


def plain(name, value):
    """Converts a value for text formats: times to ISO 8601, number booleans to integers."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool) and name[0] == "n":
        return int(value)
    return value


def write_csv(path, columns, begin, end, separators, **options):
    def cell(name, value):
        if isinstance(value, list):
            return separators[name].join(map(text_of, value))
        return value if isinstance(value, str) else text_of(value)

    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, **options)
        writer.writerow(columns)
        for i in range(begin, end):
            row = [plain(n, values[i]) for n, (_, values) in columns.items()]
            writer.writerow([cell(n, v) for n, v in zip(columns, row, strict=True)])


def write_json(path, columns, begin, end):
    def token(value):
        if isinstance(value, list):
            return f"[{', '.join(map(token, value))}]"
        number = isinstance(value, float | Decimal)
        return text_of(value) if number else json.dumps(value, ensure_ascii=False)

    with open(path, "w", encoding="utf-8") as file:
        for i in range(begin, end):
            row = {n: plain(n, v[i]) for n, (_, v) in columns.items()}
            there = {n: v for n, v in row.items() if v is not None or i == begin}
            items = (f"{json.dumps(n)}: {token(v)}" for n, v in there.items())
            file.write("{" + ", ".join(items) + "}\n")


def separators(schema):
    """Returns the separators of lists and of their weights as text, by column."""
    lists = [entry for entry in schema.get("categorical", ()) if "max_length" in entry]
    pairs = [(e["column"], e.get("separator", "|")) for e in lists]
    return dict(pairs + [(e["weights"], e.get("separator", "|")) for e in lists if "weights" in e])


WRITERS = {"parquet": write_parquet, "csv": write_csv, "jsonl": write_json}


def check_fitted(oracle, directory):
    """Compares the fitted transform with the oracle's."""
    fitted = Transform.load(directory)
    assert fitted.cardinalities == oracle.sizes
    for field, one in zip(fitted.schema.numerical, fitted.numerical, strict=True):
        mean, deviation, edges, shares = oracle.facts[field.column]
        assert (one.mean, one.deviation) == (mean, pytest.approx(deviation, rel=1e-15))
        assert one.edges.tolist() == edges
        assert one.shares.tolist() == shares
    names = [name for name in oracle.facts if isinstance(name, tuple)]
    for name, dictionary in zip(names, fitted.dictionaries, strict=True):
        assert dictionary.values() == oracle.facts[name]


def check(drawn, data, engine=None, kinds=("parquet",)):
    """Prepares a drawn table from files of some kinds, and compares the datasets with the oracle's.

    Args:
        drawn: what `tables` draws.
        data: draws how the rows are in files.
    """
    schema, columns, division = drawn
    rows = len(columns["y"][1])
    least = 1 if "files" in division else 0
    ends = data.draw(st.lists(st.integers(0, rows), min_size=least, max_size=2), "cuts")
    numbers = [range(a, b) for a, b in itertools.pairwise([0, *sorted(ends), rows])]
    split_of = [SPLITS[i % 3] for i in range(len(numbers))] if division.pop("files", False) else []
    order = sorted(range(len(numbers)), key=lambda i: i % 3 if split_of else i)
    table = [{n: values[i] for n, (_, values) in columns.items()} for i in range(rows)]
    stand = [table[i] for file in order for i in numbers[file]]
    file_of = [file for file in order for _ in numbers[file]]
    problem = ""
    try:
        oracle = Oracle(schema, stand, division, file_of, split_of)
        if oracle.empty:
            problem = "no row is|no row has the label"
    except OverflowError:
        problem = "is beyond float16|is beyond float64"
    options = {"split_bytes": data.draw(st.sampled_from([None, 1, 300]), "split_bytes")}
    size = data.draw(st.sampled_from([1, 3, 100]), "row group")
    more = {"parquet": {"rows": size}, "csv": {"separators": separators(schema)}}
    lists = (v for _, values in columns.values() for v in values if isinstance(v, list))
    has_blank = any(not text_of(item).strip() for items in lists for item in items)
    for kind in kinds:
        if kind == "csv" and has_blank:  # which has no empty items
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = [folder / f"{i}.{kind}" for i in range(len(numbers))]
            for path, part in zip(paths, numbers, strict=True):
                WRITERS[kind](path, columns, part.start, part.stop, **more.get(kind, {}))
            others = {}
            for path, split in zip(paths, split_of, strict=False):
                others.setdefault(split, []).append(path)
            made = (schema, others.pop("train", paths), folder / "dataset", engine, others)
            if problem:
                with pytest.raises((ValueError, TaskError), match=problem):
                    prepare(*made, **division, **options)
                assert not (folder / "dataset").exists()
                continue
            prepare(*made, **division, **options)
            found = contents(folder / "dataset", ".bin")
            assert set(found) == set(oracle.files)
            for file, content in oracle.files.items():
                assert found[file] == content, (kind, file)
            check_fitted(oracle, folder / "dataset" / "transform")


@settings(max_examples=30)
@given(tables(), st.data(), st.sampled_from([["parquet"], ["parquet", "csv", "jsonl"]]))
def test_a_dataset_is_what_the_oracle_makes_of_the_table(drawn, data, kinds):
    check(drawn, data, kinds=kinds)
