"""Days at a URI: their rows are learned, and datasets there are extended without their rows."""

import daily_steps
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_documented_commands import run

from dlrm.data.transform.transform import Transform
from dlrm.remote.store import open_store
from dlrm.scripts.daily import command

SCHEMA = "label: y\nnumerical: [n]\ncategorical: [{column: item, frequency_limit: 2}]\n"


def write_day(folder, day):
    """Writes the rows of a day, in which one value in three is that of the day before."""
    rows = range(90)
    items = [f"i{row // 2 % 30 + 20 * day}" for row in rows]
    table = {"y": [row % 2 for row in rows], "n": [float(row) for row in rows], "item": items}
    parquet.write_table(pa.table(table), folder / f"{day}.parquet")


@pytest.mark.slow
def test_a_day_extends_a_dataset_at_a_uri(bucket, tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    for day in (1, 2):
        write_day(tmp_path, day)
    place = f"s3://{bucket.authority}/chain"
    common = "dlrm prepare --schema schema.yaml --test_fraction 0 --cores 1"
    run(f"{common} --input 1.parquet --output {place}/1", tmp_path)
    run(f"{common} --input 1.parquet --output local1", tmp_path)
    run(f"{common} --input 2.parquet --extend {place}/1 --output by_uri", tmp_path)
    run(f"{common} --input 2.parquet --extend local1 --output by_path", tmp_path)
    found, expected = (
        Transform.load(tmp_path / name / "transform") for name in ("by_uri", "by_path")
    )
    assert found.dictionaries[0].values() == expected.dictionaries[0].values()
    found.check_all()


def test_days_at_a_uri_are_fetched_and_learned(store_uri, tmp_path, monkeypatch, capsys):
    for name in ("run_step", "FeatureSpec"):  # which the steps below replace
        monkeypatch.setattr(command, name, getattr(command, name))
    store, uri = open_store(store_uri), store_uri.below("raw")
    for name in ("day_10.csv", "day_2.csv", "_SUCCESS_1", "notes.txt", "part/notes.txt"):
        store.write(f"{uri.folder}{name}", b"rows")
    assert daily_steps.daily(tmp_path, f"--days={uri}") == 0
    assert daily_steps.learned(tmp_path) == {"day_2": None, "day_10": 1}
    assert daily_steps.known(tmp_path / "chain/days/day_10/run") == ["day_2", "day_10"]
    store.write(f"{uri.folder}day_11.csv", b"bad")
    assert daily_steps.daily(tmp_path, f"--days={uri}") == 1
    assert f"{uri}/day_11.csv: dlrm prepare: exit code 1" in capsys.readouterr().err
