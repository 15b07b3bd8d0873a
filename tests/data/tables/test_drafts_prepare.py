"""Whatever is drafted can be prepared, and the logs of the trade get the schemas they need."""

import datetime

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from hypothesis import strategies as st

import dlrm
from dlrm.data.schema.schema import TimeField
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import Seen, batches_of
from dlrm.data.tables.sniff import sniff

ROWS = 2000
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
MOMENTS = st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2049, 1, 1))


def is_exact(number, bits=53):
    """Returns whether a float cannot stand for other ids, which are warned of and refused."""
    return not 2**bits <= abs(number) < 2**64


VALUES = {
    "float": (st.floats().filter(is_exact), pa.float64()),
    "float32": (st.floats(width=32).filter(lambda number: is_exact(number, 24)), pa.float32()),
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
    "delay": (st.integers(0, 10**9), pa.duration("us")),
    "list": (st.lists(st.integers(0, 9), max_size=3), pa.list_(pa.int32())),
    "listText": (st.lists(TEXT, max_size=3), pa.list_(pa.string())),
    "vector": (st.lists(st.floats().filter(is_exact), max_size=3), pa.list_(pa.float64())),
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


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
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


def ids(random, size, low=1000, high=10**6):
    return random.choice(np.arange(low, high), size)[random.integers(0, size, ROWS)]


def avazu(random):
    table = {
        "id": [str(10**19 + int(one)) for one in random.integers(0, 10**15, ROWS)],
        "click": random.integers(0, 2, ROWS),
        "hour": 14102100 + random.integers(0, 24, ROWS) + 100 * random.integers(0, 9, ROWS),
        "C1": random.choice([1001, 1002, 1005, 1007, 1010], ROWS),
        "banner_pos": random.integers(0, 8, ROWS),
    }
    for name in ["site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"]:
        table[name] = [f"{one:08x}" for one in ids(random, 40, 10**8, 10**8 + 10**6)]
    for name in ["device_id", "device_ip", "device_model"]:
        table[name] = [f"{one:08x}" for one in ids(random, 200, 10**8, 10**8 + 10**6)]
    table |= {
        "device_type": random.integers(0, 5, ROWS),
        "device_conn_type": random.integers(0, 6, ROWS),
    }
    for place in range(14, 22):
        table[f"C{place}"] = ids(random, 100, 10, 30000)
    return pa.table(table)


def outbrain(random):
    return pa.table(
        {
            "display_id": ids(random, 700),
            "ad_id": ids(random, 300),
            "clicked": random.integers(0, 2, ROWS),
            "document_id": ids(random, 400),
            "timestamp": random.integers(61, 1_295_999_908, ROWS),
            "platform": [["1", "2", "3", "\\N"][i % 4] for i in range(ROWS)],
            "geo_location": [["US>CA>803", "US>TX", "GB"][i % 3] for i in range(ROWS)],
            "campaign_id": ids(random, 90, 1, 30000),
            "advertiser_id": ids(random, 60, 1, 4000),
            "uuid": [f"{one:014x}" for one in ids(random, 600)],
            "topic_id": ids(random, 80, 1, 300),
            "confidence_level": random.random(ROWS).round(6),
        }
    )


# The log, its label and what counts as 1; the numbers, the time, and what is left out. All other
# columns are categorical.
LOGS = {
    "avazu": (avazu, "click", None, [], TimeField("hour", "UTC", format="%y%m%d%H"), ["id"]),
    "outbrain": (
        outbrain,
        "clicked",
        None,
        ["confidence_level"],
        TimeField("timestamp", unit="ms"),
        [],
    ),
}


@pytest.mark.parametrize("form", ["csv", "frame"])
@pytest.mark.parametrize("log", LOGS)
def test_logs_of_the_trade(tmp_path, log, form):
    made, label, positive, numbers, time, left_out = LOGS[log]
    table = made(np.random.default_rng(3))
    if form == "csv":
        pa_csv.write_csv(table, tmp_path / "log.csv")
        files = find_tables([tmp_path / "log.csv"])
        text, seen = sniff(files, TextFormat())[0], Seen()
        batches = batches_of(files, text, [label], seen)
        result = draft(batches, label, positive=positive, text=text, seen=seen)
        assert result.schema.format is None
    else:
        result = draft(table.to_batches(), label, positive=positive)
    schema = result.schema
    used = {label, time.column, *numbers, *left_out}
    assert [field.column for field in schema.numerical] == numbers
    assert {f.column for f in schema.categorical} == set(table.column_names) - used
    assert schema.time == time
    assert list(result.left_out) == left_out
    assert (result.in_doubt, result.leaks) == ([], [])
    if log == "outbrain":
        (platform,) = (f for f in schema.categorical if f.column == "platform")
        assert (platform.missing_values, platform.type) == (("\\N",), "integer")
    assert dlrm.Dataset.from_arrow(table, schema).rows["train"] > 1000
