"""Days at a URI: their rows are learned, and datasets there are extended without their rows."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_documented_commands import MODEL, run

from dlrm.data.transform.transform import Transform
from dlrm.remote.store import open_store
from dlrm.scripts.daily.command import find_days

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
    run(f"{common} --input 1.parquet --day 1 --output {place}/1", tmp_path)
    run(f"{common} --input 1.parquet --day 1 --output local1", tmp_path)
    run(f"{common} --input 2.parquet --extend {place}/1 --output by_uri", tmp_path)
    run(f"{common} --input 2.parquet --extend local1 --output by_path", tmp_path)
    found, expected = (
        Transform.load(tmp_path / name / "transform") for name in ("by_uri", "by_path")
    )
    assert found.increment == expected.increment
    assert found.dictionaries[0].values() == expected.dictionaries[0].values()
    found.check_all()


def put(uri, folder):
    """Writes the files of a folder below a URI."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{uri.folder}{path.relative_to(folder).as_posix()}"
            open_store(uri).write(key, path.read_bytes())


def test_days_at_a_uri_are_those_of_a_directory(store_uri, tmp_path):
    raw, uri = tmp_path / "raw", store_uri.below("raw")
    (raw / "day_2/part").mkdir(parents=True)
    for name in ("day_10.csv.gz", "day_2/a.csv", "day_2/part/b.csv", "_SUCCESS_1", "notes.txt"):
        (raw / name).write_text(name)
    put(uri, raw)
    local, found = find_days(raw), find_days(Path(str(uri)))
    assert [*found] == [*local] == ["day_2", "day_10"]
    assert [str(place) for place in found.values()] == [f"{uri}/day_2", f"{uri}/day_10.csv.gz"]
    with pytest.raises(FileNotFoundError, match="none"):
        find_days(Path(f"{uri}/none"))


@pytest.mark.slow
def test_days_at_a_uri_are_learned(bucket, tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    (tmp_path / "few.flags").write_text("\n".join(["--batch_size=16", *MODEL]))
    (tmp_path / "raw").mkdir()
    for day in (1, 2):
        write_day(tmp_path / "raw", day)
    put(bucket.below("raw"), tmp_path / "raw")
    flags = "--schema schema.yaml --train_flags few.flags --cores 1"
    run(f"dlrm daily --days raw {flags} --output local", tmp_path)
    run(f"dlrm daily --days s3://{bucket.authority}/raw {flags} --output stored", tmp_path)
    for day in ("1", "2"):
        local, stored = (tmp_path / name / "days" / day for name in ("local", "stored"))
        assert (stored / "day.json").read_bytes() == (local / "day.json").read_bytes()
        weights = [next(own.glob("run/step-*")) / "tables/0.bin" for own in (local, stored)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    open_store(bucket).write("raw/3.parquet", b"no table")
    with pytest.raises(AssertionError, match=f"s3://{bucket.authority}/raw/3.parquet"):
        run(f"dlrm daily --days s3://{bucket.authority}/raw {flags} --output stored", tmp_path)
