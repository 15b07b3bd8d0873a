"""Spark and the local engine write the same bytes."""

import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings, strategies as st
from tables_testing import contents, prepare
from test_days import chain, rows_of_day
from test_table_oracle import check, tables
from test_table_runs import OPTIONS, SCHEMA, table

SHARED = {  # a table of two columns, one of lists with weights, and a number that is an id
    "label": {"column": "y", "positive": "ja", "any_negative": True},
    "numerical": [{"column": "i", "transform": "quantile", "bins": 7}],
    "categorical": [
        {"column": "j", "type": "integer", "dictionary": "both"},
        {"column": "seen", "type": "integer", "dictionary": "both", "max_length": 3}
        | {"weights": "seen for", "keep": "first"},
    ],
}


@settings(max_examples=5, phases=[Phase.generate])  # as an example takes seconds
@given(drawn=tables([30]), data=st.data())
def test_drawn_tables_are_what_the_oracle_makes_of_them(spark, drawn, data):
    check(drawn, data, spark, ["parquet"])


@pytest.mark.parametrize("schema", [SCHEMA, SHARED], ids=["crosses, lists, weights", "shared"])
def test_every_kind_of_field_has_the_same_bytes(spark, schema, tmp_path):
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=100)
    options = OPTIONS | {"split_bytes": 9000}
    for name, engine in (("spark", spark), ("local", None)):
        prepare(schema, [tmp_path / "a.parquet"], tmp_path / name, engine, **options)
    assert contents(tmp_path / "spark") == contents(tmp_path / "local")


def test_days_that_extend_others_have_the_same_bytes(spark, tmp_path):
    days, made = [rows_of_day(day) for day in (1, 2)], []
    for name, engine in (("spark", spark), ("local", None)):
        (tmp_path / name).mkdir()
        made.append([contents(day, ".bin") for day in chain(tmp_path / name, days, engine=engine)])
        made[-1].append(contents(tmp_path / name / "2" / "transform"))
    assert made[0] == made[1]
