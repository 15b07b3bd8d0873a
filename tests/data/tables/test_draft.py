"""Drafted schemas are what an engineer would write for a table, with reasons."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tables_testing import COLUMNAR

from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema, TimeField
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.draft import draft
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.samples import Seen, batches_of

ROWS = 3000
LABELS = np.random.default_rng(1).permutation(np.arange(ROWS) % 3 == 0).astype(int)


def table(**columns):
    columns = {"y": LABELS, "x": np.arange(ROWS) % 97 / 2, **columns}
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


def drafted(**columns):
    """Drafts a table with a label y, a number x and more columns."""
    return draft([table(**columns)], "y")


def field(result, name):
    schema = result.schema
    fields = {one.column: one for one in (*schema.numerical, *schema.categorical)}
    return fields.get(name)


RANDOM = np.random.default_rng(0)
FIELDS = {
    "floats": (RANDOM.random(ROWS), NumericalField("c_")),
    "heavy floats": (np.r_[RANDOM.random(ROWS - 1), 1e6], NumericalField("c_", "log")),
    "heavy, some below 0": (np.r_[-RANDOM.random(ROWS - 1), 1e6], NumericalField("c_", "quantile")),
    "decimals": (
        pa.array((RANDOM.random(ROWS) * 100).round(2)).cast(pa.decimal128(9, 2), safe=False),
        NumericalField("c_"),
    ),
    "integers below 0": (RANDOM.integers(-80, 80, ROWS), NumericalField("c_")),
    "integers that occur once": (RANDOM.integers(0, 10**9, ROWS), NumericalField("c_")),
    "integers that the label follows": (
        LABELS * 20 + RANDOM.integers(0, 60, ROWS),
        NumericalField("c_"),
    ),
    "integers whose values differ": (
        np.where(
            RANDOM.random(ROWS) < 0.8,
            RANDOM.permutation(60)[RANDOM.integers(0, 30, ROWS) + 30 * LABELS],
            RANDOM.integers(0, 60, ROWS),
        ),
        CategoricalField("c_", "integer"),
    ),
    "whole floats of few values": (
        pa.array([1.0, 2.0, 3.0, None, 2.0] * 600),
        CategoricalField("c_", "integer"),
    ),
    "few integers": (RANDOM.integers(1, 13, ROWS), CategoricalField("c_", "integer")),
    "booleans": ([True, False] * 1500, CategoricalField("c_")),
    "texts": (["red", "green", "blue"] * 1000, CategoricalField("c_")),
    "text of numbers": (
        [["4", "5.5", "?", ""][i % 4] for i in range(ROWS)],
        NumericalField("c_", missing_values=("?",)),
    ),
    "text of ids with points": (
        [f"{i % 7}.0" for i in range(ROWS)],
        CategoricalField("c_", "integer"),
    ),
    "leading zeros": ([f"{i % 60:04}" for i in range(ROWS)], CategoricalField("c_")),
    "pandas categories": (pa.array(["a", "b"] * 1500).dictionary_encode(), CategoricalField("c_")),
    "rare texts": (
        [f"v{i}" if i > 1000 else "often" for i in range(ROWS)],
        CategoricalField("c_", frequency_limit=5),
    ),
    "beyond 64 bits": (
        pa.array([(1 << 63) + i % 50 for i in range(ROWS)], pa.uint64()),
        CategoricalField("c_"),
    ),
    "large integers": (
        [(1 << 60) + i % 50 for i in range(ROWS)],
        CategoricalField("c_", "integer"),
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_columns_become_the_fields_that_their_values_suggest(name):
    values, expected = FIELDS[name]
    result = drafted(c_=values)
    assert field(result, "c_") == expected
    assert result.comments["c_"]
    assert Schema.from_dict(yaml.safe_load(result.text())) == result.schema


def test_names_say_what_numbers_cannot():
    days = np.arange(ROWS) % 31 + 1
    result = drafted(I10=days % 3, day=days)
    assert field(result, "I10") == NumericalField("I10")
    assert field(result, "day") == CategoricalField("day", "integer")
    assert result.comments["day"].endswith("part of a date by its name")
    gapless = drafted(xyz=RANDOM.permutation(np.arange(ROWS) // 2)).comments["xyz"]
    assert gapless.endswith("an id by its values: numbers without gaps")


def test_what_tells_a_model_nothing_is_left_out_with_the_reason():
    result = drafted(
        row=np.arange(ROWS),
        order_id=RANDOM.permutation(10 * ROWS)[:ROWS],
        text=[f"free text {i}" for i in range(ROWS)],
        nothing=pa.nulls(ROWS),
        same=["a"] * ROWS,
        some=pa.array(["a", None, "a"] * 1000),
        tags=[[[1, 2]]] * ROWS,
        score=RANDOM.random(ROWS),
        **{"odd\nname": [7.5] * ROWS},
    )
    assert set(result.left_out) == {
        *("row", "order_id", "text", "nothing", "same", "tags", "odd\nname")
    }
    text = result.text("t.parquet")
    assert "#   same: one value, 'a', in every row\n" in text
    assert "#   'odd\\nname': one value, '7.5', in every row\n" in text
    assert (
        "#   tags: the type list<item: list<item: int64>>, which is not a number, text (UTF-8),"
        in text
    )
    assert "#   row: a value of its own in every row; 3,000 distinct, 0 .. 2999\n" in text
    assert field(result, "some")
    assert field(result, "score")
    assert Schema.from_dict(yaml.safe_load(text)) == result.schema


def test_the_first_times_are_the_time_of_a_row():
    moments = pa.array([datetime.datetime(2026, 1, 1 + i % 28) for i in range(ROWS)])
    seconds = [1_700_000_000 + i % 2000 for i in range(ROWS)]
    result = drafted(
        born=pa.array([None, *moments.to_pylist()[1:]]),
        logged_at=[f"2026-11-{1 + i % 28:02}T08:00:00" for i in range(ROWS)],
        created=moments,
    )
    assert result.schema.time == TimeField("logged_at", "UTC")
    assert set(result.left_out) == {"born", "created"}
    assert "UTC is assumed" in result.comments["logged_at"]
    assert "2026-01-01T00:00:00 .. 2026-01-28T00:00:00" in result.left_out["created"]
    assert drafted(ts=seconds).schema.time == TimeField("ts", unit="s")
    assert drafted(ts=[s * 1000 for s in seconds]).schema.time == TimeField("ts", unit="ms")
    zoned = moments.cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    assert drafted(when=zoned).schema.time == TimeField("when")
    chosen = draft([table(ts=seconds, when=zoned)], "y", time="ts").schema
    assert chosen.time == TimeField("ts", unit="s")


def test_markers_are_missing_values_of_the_fields_that_have_them():
    numbers = [["1.5", "2.5", "NA", "3.5"][i % 4] for i in range(ROWS)]
    floats = RANDOM.random(ROWS)
    floats[5] = np.nan
    countries = ["NA", "US", "DE", ""] * 750
    texts = ["?", "red", "NA"] * 1000
    result = drafted(
        price=numbers, country=countries, b=texts, c=floats, d=["None", "-", "u"] * 1000
    )
    markers = {name: field(result, name).missing_values for name in ("price", "country", *"bcd")}
    assert markers == {"price": ("NA",), "country": None, "b": ("?",), "c": ("nan",), "d": None}
    assert result.schema.missing_values == ()
    assert "'NA' in 750 rows" in result.comments["price"]
    stray = drafted(a=["N.K.", *(f"{i % 50}.5" for i in range(1, ROWS))])
    assert field(stray, "a") == CategoricalField("a")
    assert "numbers but for 'N.K.'" in stray.comments["a"]


IDS = """
id userid user_id userId USERID user users_id uid uuid item item_id itemid ad_id adid adgroup
adgroup_id campaign campaignid advertiser creative publisher site siteId app app_id zone region city
country state zip zip_code postalcode postcode store shop_id branch brand brandid model device
deviceID device_type browser os platform carrier customer customer_no_id account member session
cookie pid cate cate_id category genre artist song_id movieId hotel_code sku c7 cat_3 language
occupation store_nbr_id document_id display_id msno product merchant seller
"""
NUMBERS = """
price unit_price age amount total_sales num_users user_count n_items i7 num_3 hours_per_week bid
quantity duration_ms_total seconds score clicks impressions avg_bid balance distance views
"""


@pytest.mark.parametrize("name", [*IDS.split(), *NUMBERS.split()])
def test_names_of_the_trade(name):
    values = np.random.default_rng(2).choice(10**6, 500)[np.arange(ROWS) % 500]
    result = drafted(**{name: values})
    fields = (result.schema.numerical, result.schema.categorical)
    numerical, categorical = ([one.column for one in of] for of in fields)
    assert (name in categorical, name in numerical) == (
        name in IDS.split(),
        name in NUMBERS.split(),
    )
    kind = "an id" if name in IDS.split() else "a number"
    assert result.comments[name].endswith(f"; {kind} by its name")


def test_what_is_in_doubt_is_a_number_and_an_id():
    values = np.random.default_rng(2).choice(10**6, 500)[np.arange(ROWS) % 500]
    result = drafted(xyz=values)
    assert NumericalField("xyz", "standardize") in result.schema.numerical
    assert CategoricalField("xyz", "integer") in result.schema.categorical
    assert result.in_doubt == ["xyz"]
    assert "took xyz as a number and an id, in doubt" in result.note()
    assert result.text().count("in doubt, so both a number and an id") == 2
    taken = drafted(xyz=values, xyz_number=RANDOM.random(ROWS))
    assert field(taken, "xyz") == CategoricalField("xyz", "integer")
    assert taken.note() is None


def test_a_value_has_one_key_in_every_form():
    base = 1_700_000_000_000_000_000
    ids = pa.array([str(base + i % 100) for i in range(ROWS)]).cast(pa.decimal128(25, 0))
    result = drafted(user_id=ids, price=pa.array([1.5] * ROWS).cast(pa.decimal128(5, 2)))
    assert result.comments["user_id"].startswith("100 distinct")
    assert field(result, "user_id") == CategoricalField("user_id", "integer")
    parts = [table(user_id=(np.arange(ROWS) % 9 + 3).astype(kind)) for kind in (int, float)]
    assert draft(parts, "y").comments["user_id"].startswith("9 distinct")
    texts = [str(i % 20) + ".0" * (i % 3 == 0) for i in range(ROWS)]
    result = drafted(user_id=texts)
    assert result.comments["user_id"].startswith("20 distinct")
    assert field(result, "user_id") == CategoricalField("user_id", "integer")


def test_another_form_of_the_label_is_left_out_and_what_nearly_tells_it_is_said():
    noisy = np.where(RANDOM.random(ROWS) < 0.01, 1 - LABELS, LABELS)
    revenue = np.where(LABELS, RANDOM.random(ROWS) * 50 + 1, 0)
    late = pa.array(np.arange(ROWS) % 50, mask=LABELS == 0)
    result = drafted(nonclk=1 - LABELS, clicked=LABELS == 1, cart=noisy, revenue=revenue, late=late)
    assert set(result.left_out) == {"nonclk", "clicked"}
    assert set(result.leaks) == {"cart", "revenue", "late"}
    assert "nearly tells the label" in result.comments["revenue"]
    assert "used cart, revenue, late, which nearly tells the label" in result.note()


def test_numbers_that_count_and_digits_of_times():
    seconds = [1_700_000_000 + i % 2000 for i in range(ROWS)]
    for unit, numbers in (
        ("s", [one + 0.25 for one in seconds]),
        ("s", [f"{one}.5" for one in seconds]),
        ("ns", [one * 10**9 for one in seconds]),
        ("us", [str(one * 10**6) for one in seconds]),
    ):
        result = drafted(ts=numbers)
        assert result.schema.time == TimeField("ts", unit=unit)
        assert f"; unit {unit} by its size" in result.comments["ts"]
    dates = drafted(date=[20261101 + i % 28 for i in range(ROWS)])
    assert dates.schema.time == TimeField("date", "UTC", format="%Y%m%d")


def test_roles_with_missing_values_are_refused_with_the_remedy():
    some = pa.array(np.arange(ROWS) % 7, mask=np.arange(ROWS) % 10 == 0)
    match = "^--groups: column 'user': expected a value in every row, got none in 300 of 3,000 rows"
    with pytest.raises(ValueError, match=match):
        draft([table(user=some)], "y", groups=["user"])
    with pytest.raises(ValueError, match="^--weight: .* a value in every row, got none in 300"):
        draft([table(w=some)], "y", weight="w")
    match = "^--weight: .* 0 or more, some above 0, got int64 with 3 distinct, -1 .. 1"
    with pytest.raises(ValueError, match=match):
        draft([table(w=np.arange(ROWS) % 3 - 1)], "y", weight="w")
    with pytest.raises(ValueError, match="^--time: .* a value in every row, got none in 300"):
        draft([table(t=some)], "y", time="t")
    result = drafted(ratio=np.where(np.arange(ROWS) == 5, np.inf, RANDOM.random(ROWS)))
    assert result.left_out["ratio"].startswith("infinite values in 1 rows, which prepare refuses")


HINTS = {
    "1,234": "may be numbers, such as '1,234': --decimal and --thousands say what marks mean",
    "Action|Comedy": "may be lists, such as 'Action|Comedy': max_length: 2, separator: '|'",
    "Action\x1dComedy": 'max_length: 2, separator: "\\x1d"',
    "20/11/2026 08:00": "may be times, such as '20/11/2026 08:00': time: {format: ...} in a ",
}


@pytest.mark.parametrize("text", HINTS)
def test_numbers_and_lists_in_disguise_are_said(text):
    result = drafted(c_=[text, text.replace("1", "3").replace("A", "B")] * (ROWS // 2))
    assert HINTS[text] in result.comments["c_"]
    assert HINTS[text] in result.warnings["c_"]
    assert field(result, "c_") == CategoricalField("c_")


PRINTED = ["[8, 23]", "['i9', 'i16']", "[23  9]"]


@pytest.mark.parametrize("text", PRINTED)
def test_printed_lists_are_left_out_with_the_remedy(text):
    reason = drafted(c_=[text, text.replace("9", "7").replace("8", "7")] * (ROWS // 2)).left_out
    assert reason["c_"].startswith(f"lists printed as text, such as {text!r}: write lists of Parq")


def test_columns_of_several_types_are_left_out():
    other = table(c_=["a", "b"] * (ROWS // 2))
    result = draft([table(c_=[1, 2] * (ROWS // 2)), other], "y")
    assert result.left_out == {"c_": "the types int64 and string; expected one"}


def test_several_labels_can_be_positive():
    ratings = (np.arange(ROWS) % 5 + 1).astype(float)
    result = draft([table(y=ratings)], "y", positive="4,5")
    assert result.schema.label == Label("y", ("4", "5"), any_negative=True)
    assert result.label == "'4' and '5' count as 1, as --positive says: 40.00% of the rows"
    with pytest.raises(ValueError, match="--positive 6: expected a label that occurs"):
        draft([table(y=ratings)], "y", positive="4,6")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1, 1], Label("y")),
        (["0", "1", "1"], Label("y")),
        ([True, False, True], Label("y")),
        ([0.0, 1.0, 1.0], Label("y")),
        ([0, 0, 0], Label("y")),
        (["yes", "no", "yes"], Label("y", "yes")),
        ([-1, 1, 1], Label("y", "1")),
        ([1, 2, 2], Label("y", "1")),
        (["<=50K", ">50K", "<=50K"], Label("y", ">50K")),
    ],
)
def test_labels_say_which_of_them_is_positive(labels, expected):
    batch = table(y=labels * (ROWS // 3))
    assert draft([batch], "y").schema.label == expected


def test_labels_that_cannot_be_used_are_refused():
    three = table(y=["a", "b", "c"] * 1000)
    with pytest.raises(
        ValueError, match="two labels in all 3,000 rows, got 3: 'a', 'b', 'c'; --posit"
    ):
        draft([three], "y")
    assert draft([three], "y", positive="b").schema.label == Label("y", "b", any_negative=True)
    with pytest.raises(ValueError, match=r"--positive d: .* which has 'a', 'b', 'c'"):
        draft([three], "y", positive="d")
    with pytest.raises(ValueError, match=r"expected two labels in all 3,000 rows, got 1: 'a'"):
        draft([table(y=["a"] * ROWS)], "y")
    with pytest.raises(ValueError, match=r"column y, row 2: .* in 1000 of 3000 rows"):
        draft([table(y=pa.array([1, 0, None] * 1000))], "y")
    with pytest.raises(ValueError, match=r"expected labels that are not missing, got '\?' in 1,50"):
        draft([table(y=["yes", "?"] * 1500, a=["?", "1.5", "2"] * 1000)], "y")
    with pytest.raises(ValueError, match="no column 'z'; the columns are y, x"):
        draft([table()], "z")
    with pytest.raises(ValueError, match="--weight: no column 'w'; the columns are y, x"):
        draft([table()], "y", weight="w")
    match = (
        "^--weight: column 'w': expected numbers .* got string with 2 distinct, 'heavy', 'light'$"
    )
    with pytest.raises(ValueError, match=match):
        draft([table(w=["heavy", "light"] * 1500)], "y", weight="w")
    assert draft([table(w=["1.5", "2"] * 1500)], "y", weight="w").schema.weight == "w"
    with pytest.raises(ValueError, match=r"no column is left as an input \(x: one value, '5'"):
        draft([table(x=[5] * ROWS)], "y")
    with pytest.raises(ValueError, match="no rows"):
        draft([], "y")


def test_roles_and_the_bound_on_rows():
    batches = [table(w=RANDOM.random(ROWS), user_id=np.arange(ROWS) % 7)] * 3
    result = draft(batches, "y", weight="w", groups=["user_id"], max_rows=5000)
    assert result.schema.weight == "w"
    assert result.schema.groups == ("user_id",)
    assert field(result, "user_id")
    assert not field(result, "w")
    assert result.text().startswith("# Drafted from the first 5,000 rows of a table.")
    assert draft(batches, "y", max_rows=3 * ROWS).sample == "all 9,000 rows"


def test_huge_columns_get_a_limit_and_buckets():
    rows = 400_000
    values = np.where(np.arange(rows) % 2 == 0, np.arange(rows), 1)
    batch = pa.record_batch({"y": pa.array(np.arange(rows) % 2), "user_id": pa.array(values)})
    result = draft([batch.slice(i, 100_000) for i in range(0, rows, 100_000)], "y")
    (one,) = result.schema.categorical
    assert (one.frequency_limit, one.max_ids, one.hash_buckets) == (15, 1_000_000, 1 << 15)
    assert result.comments["user_id"].startswith("200,001 distinct")


def test_every_columnar_kind_gives_one_draft(tmp_path):
    moments = [datetime.datetime(2026, 1, 1 + i % 28, i % 24) for i in range(100)]
    whole = pa.table(
        {
            "y": [i % 3 == 0 for i in range(100)],
            "price": [i / 8 for i in range(100)],
            "user_id": [f"u{i % 9}" for i in range(100)],
            "tags": [[f"t{i % 3}"] * (i % 4) for i in range(100)],
            "moment": pa.array(moments, pa.timestamp("us", "UTC")),
            "nested": [{"a": i} for i in range(100)],
        }
    )
    drafts = set()
    for suffix, (_, write) in COLUMNAR.items():
        write(whole, path := tmp_path / f"a{suffix}", 30)
        seen = Seen()
        drafts.add(draft(batches_of(find_tables([path]), TextFormat(), ["y"], seen), "y").text())
    assert len(drafts) == 1
    assert "{column: tags, max_length: 3}" in drafts.pop()


def test_files_are_read_with_all_their_columns(tmp_path):
    for day in (1, 2):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        columns = [*table().columns, pa.array([7] * ROWS)]  # the folder's `day` takes precedence
        pq.write_table(pa.table(columns, names=["y", "x", "day"]), folder / "a.parquet")
    result = draft(batches_of(find_tables([tmp_path]), TextFormat()), "y")
    assert field(result, "day") == CategoricalField("day", "integer")
    assert result.sample == "all 6,000 rows"
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"y": 0, "x": 1.5}\n{"y": 1, "x": 2.5, "late": "a"}\n')
    result = draft(batches_of(find_tables([lines]), TextFormat()), "y")
    assert field(result, "late") == CategoricalField("late")
    assert "50.00% missing" in result.comments["late"]
    headerless = tmp_path / "a.csv"
    headerless.write_text("0,1.5,a\n1,2.5,b\n1,3.5,b\n")
    with pytest.raises(ValueError, match="no column 'y'; the columns are 0, 1.5, a .its header"):
        list(batches_of(find_tables([headerless]), TextFormat(), ["y"]))
    result = draft(batches_of(find_tables([headerless]), TextFormat(header=False)), "0")
    assert result.schema.label == Label("0")
    assert Schema.from_dict(yaml.safe_load(result.text())) == result.schema
    headerless.write_text("y,a,a,b\n0,1,2,x\n1,3,4,z\n")
    seen = Seen()
    files = find_tables([headerless])
    result = draft(batches_of(files, TextFormat(), ["y"], seen), "y", seen=seen)
    assert result.left_out == {"a": "several columns have this name"}
    assert field(result, "b")
    with pytest.raises(ValueError, match="two columns are called 'a'"):
        list(batches_of(files, TextFormat(), ["a"]))
