"""Whatever is drafted can be prepared, and the logs of the trade get the schemas they need."""

import datetime
import decimal

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import strategies as st

import dlrm
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.draft import Seen, batches_of, draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.sniff import sniff
from dlrm.data.transform.schema import TimeField

ROWS = 2000
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
MOMENTS = st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2049, 1, 1))
VALUES = {
    "float": (st.floats(), pa.float64()),
    "float32": (st.floats(width=32), pa.float32()),
    "small": (st.integers(-3, 20), pa.int16()),
    "integer": (st.integers(-(2**63), 2**63 - 1), pa.int64()),
    "unsigned": (st.integers(0, 2**64 - 1), pa.uint64()),
    "boolean": (st.booleans(), pa.bool_()),
    "text": (TEXT, pa.string()),
    "word": (st.sampled_from(["Yes", "yes", "no", "NA", "?", "", " a "]), pa.string()),
    "number": (st.sampled_from(["1", "2.50", "-3", "NA", "", "1e3", "007", "x"]), pa.string()),
    "infinity": (st.sampled_from(["inf", "1", "2.5", "nan"]), pa.string()),
    "bytes": (st.binary(max_size=4), pa.binary()),
    "decimal": (st.decimals(-(10**9), 10**9, places=3), pa.decimal128(20, 3)),
    "moment": (MOMENTS, pa.timestamp("us")),
    "zoned": (MOMENTS, pa.timestamp("ns", "Europe/Zurich")),
    "day": (st.dates(), pa.date32()),
    "dayText": (st.dates().map(lambda day: day.strftime("%d/%m/%Y")), pa.string()),
    "clock": (st.times(), pa.time64("us")),
    "delay": (st.timedeltas(), pa.duration("us")),
    "list": (st.lists(st.integers(0, 9), max_size=3), pa.list_(pa.int32())),
    "listText": (st.lists(TEXT, max_size=3), pa.list_(pa.string())),
    "vector": (st.lists(st.floats(), max_size=3), pa.list_(pa.float64())),
    "map": (st.fixed_dictionaries({"a": st.integers(0, 3)}), pa.struct([("a", pa.int64())])),
    "stamp": (st.integers(1_600_000_000, 1_700_000_000).map(lambda s: s + 0.25), pa.float64()),
}
NAMES = st.sampled_from(["", "id", "price", "ts", "hour", "created_at", "xyz", "user", "odd\nname"])


@st.composite
def tables(draw):
    rows = draw(st.integers(20, 60))
    columns = {"y": pa.array([i % 2 for i in range(rows)])}
    for place in range(draw(st.integers(1, 5))):
        values, kind = VALUES[draw(st.sampled_from(sorted(VALUES)))]
        pool = draw(st.lists(st.none() | values, min_size=1, max_size=12))
        if draw(st.booleans()):
            pool = [one for one in pool if one is not None] or pool
        picks = np.random.default_rng(draw(st.integers(0, 99))).integers(0, len(pool), rows)
        name = draw(NAMES) + str(place) * draw(st.booleans())
        if name not in columns:
            columns[name] = pa.array([pool[i] for i in picks], kind)
    return pa.table(columns)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True, database=None)
@hypothesis.given(tables())
def test_what_is_drafted_prepares(table):
    try:
        result = draft(table.to_batches(), "y")
    except ValueError as error:
        hypothesis.assume("no column is left" not in str(error))
        raise
    dataset = dlrm.Dataset.from_arrow(table, result.schema)
    assert sum(dataset.rows.values()) == table.num_rows
    assert result.text()
