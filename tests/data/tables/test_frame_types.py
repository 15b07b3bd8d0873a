"""A column of any type is used, left out with the reason, or refused with its name."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

import dlrm
from dlrm.data.tables.draft import draft
from dlrm.data.tables.frames import open_frame

ROWS = 60
NUMBERS = np.arange(ROWS) % 17
MOMENTS = np.datetime64("2026-11-20T08:00:00.123456789", "ns") + NUMBERS * 86_400_000_000_001
WORDS = [f"w{i}" for i in NUMBERS]


def cast(kind, values=NUMBERS):
    return pa.array(values).cast(kind)


# test_drafts_prepare draws values of other types of Arrow.
ARROW = {
    **{str(kind): cast(kind) for kind in (pa.uint16(), pa.float16(), pa.decimal256(50, 3))},
    "large": cast(pa.large_string(), WORDS),
    "views": pa.array(WORDS, pa.string_view()),
    "fixed": pa.array([f"w{i:02}".encode() for i in NUMBERS], pa.binary(3)),
    "dictionary": pa.array(WORDS).dictionary_encode(),
    "dictionary of numbers": cast(pa.float64()).dictionary_encode(),
    "date64": pa.array(NUMBERS.astype("datetime64[D]")).cast(pa.date64()),
    "time32": cast(pa.time32("s"), NUMBERS.astype(np.int32)),
    "time us": cast(pa.timestamp("us")),
    "nanoseconds": pa.array(MOMENTS),
    "zoned": pa.array(MOMENTS, pa.timestamp("ns", "Europe/Zurich")),
    "interval": pa.array([(1, 2, 3)] * ROWS, pa.month_day_nano_interval()),
    "large list": pa.array([[1, 2], None] * (ROWS // 2), pa.large_list(pa.int8())),
    "fixed list": pa.array([[1, 2], [3, 4]] * (ROWS // 2), pa.list_(pa.int8(), 2)),
    "list of views": pa.array([["a"], ["b", "c"]] * (ROWS // 2), pa.list_(pa.string_view())),
    "list of times": pa.array([[datetime.date(2026, 1, 1)]] * ROWS),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int8())),
    "null": pa.nulls(ROWS),
    "all null": pa.nulls(ROWS, pa.float64()),
    "structures of a dictionary": pa.DictionaryArray.from_arrays(
        pa.array([0, 1] * (ROWS // 2)), pa.array([{"a": 1}, {"a": 2}])
    ),
    "run ends": pa.RunEndEncodedArray.from_arrays([ROWS], ["a"]),
    "union": pa.UnionArray.from_sparse(pa.array([0] * ROWS, pa.int8()), [pa.array(WORDS)]),
}


def drafted(frame, name):
    """Returns a draft of a frame, which uses a column or leaves it out; None if it is refused."""
    try:
        table = open_frame(frame, None).read_all()
        result = draft(table.to_batches(), "y")
    except ValueError as error:
        if name not in str(error):
            raise
        return None
    used = {one.column for one in (*result.schema.numerical, *result.schema.categorical)}
    used |= {result.schema.time.column} if result.schema.time else set()
    assert (name in used) != (name in result.left_out), name
    return result


def prepare(frame):
    """Prepares the dataset of a frame by the schema that is drafted from it."""
    result = draft(open_frame(frame, None).read_all().to_batches(), "y")
    assert sum(dlrm.Dataset.from_arrow(frame, result.schema).rows.values()) == ROWS


BASE = {"y": NUMBERS % 2, "x": np.random.default_rng(0).random(ROWS)}


@pytest.mark.parametrize("name", ARROW)
def test_every_type_of_arrow(name):
    result = drafted(pa.table({**BASE, "col": ARROW[name]}), "col")
    assert result is not None
    if name in ("nanoseconds", "zoned", "time us"):
        assert result.schema.time.column == "col"


def test_a_table_of_every_type_prepares():
    prepare(pa.table({**BASE, **ARROW}))


def pandas_columns(pandas):
    series = pandas.Series
    object_ = series(["a", 1, None] * (ROWS // 3), dtype=object)
    return {
        **{f"int {kind}": series(NUMBERS, dtype=kind) for kind in ("int8", "uint64", "Int64")},
        "Float32": series(NUMBERS / 2, dtype="Float32"),
        "boolean": series(NUMBERS % 2 == 0, dtype="boolean"),
        "string[pyarrow]": series(WORDS, dtype="string[pyarrow]"),
        "mixed": object_,
        "category": series(WORDS, dtype="category"),
        "categories of intervals": pandas.cut(series(NUMBERS), 4),
        "two zones": series(
            [pandas.Timestamp("2026-01-01", tz=("UTC", "Asia/Tokyo")[i % 2]) for i in range(ROWS)]
        ),
        "timedelta": series(pandas.to_timedelta(NUMBERS, "s")),
        "period": series(pandas.period_range("2026-01", periods=ROWS, freq="M")),
        "complex": series(NUMBERS * 1j),
        "sparse": series(pandas.arrays.SparseArray(NUMBERS)),
        "bytes": series([b"\xff"] * ROWS),
        "dicts": series([{"a": 1}] * ROWS),
        "sets": series([{1}] * ROWS),
        "all missing": series([None] * ROWS),
        "infinite": series(np.where(NUMBERS == 3, np.inf, NUMBERS)),
    }


def polars_columns(polars):
    series = polars.Series
    moments = [datetime.datetime(2026, 1, 1 + i) for i in NUMBERS.tolist()]
    return {
        **{str(kind): series(NUMBERS).cast(kind) for kind in (polars.Int8, polars.UInt64)},
        **({"Int128": series(NUMBERS).cast(polars.Int128)} if hasattr(polars, "Int128") else {}),
        "Float32": series(NUMBERS).cast(polars.Float32),
        "Categorical": series(WORDS).cast(polars.Categorical),
        "Enum": series(WORDS).cast(polars.Enum(sorted(set(WORDS)))),
        "Datetime": series(moments).cast(polars.Datetime("ns", "Europe/Zurich")),
        "Duration": series([datetime.timedelta(i) for i in NUMBERS.tolist()]),
        "Decimal": series(NUMBERS).cast(polars.Decimal(20, 2)),
        "Binary": series([b"\xff"] * ROWS),
        "Array": series([[1, 2], [3, 4]] * (ROWS // 2), dtype=polars.Array(polars.Int8, 2)),
        "Struct": series([{"a": 1}] * ROWS),
        "Null": series([None] * ROWS),
        "Object": series([object()] * ROWS, dtype=polars.Object),
    }


@pytest.mark.parametrize(
    ("package", "columns"), [("pandas", pandas_columns), ("polars", polars_columns)]
)
def test_every_type_of_data_frames(package, columns):
    module = pytest.importorskip(package)
    made = columns(module)
    found = {name: drafted(module.DataFrame({**BASE, name: made[name]}), name) for name in made}
    taken = [name for name, result in found.items() if result is not None]
    assert len(taken) > len(made) / 2
    prepare(module.DataFrame({**BASE, **{name: made[name] for name in taken}}))
