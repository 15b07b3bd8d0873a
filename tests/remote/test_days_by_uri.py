"""Days at a URI: their rows are learned, and datasets there are extended without their rows."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_documented_commands import MODEL, run

from dlrm.data.transform.transform import Transform
from dlrm.remote.cache import Cache
from dlrm.remote.store import open_store
from dlrm.scripts.daily.days import find_days

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


def put(uri, folder):
    """Writes the files of a folder below a URI."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{uri.folder}{path.relative_to(folder).as_posix()}"
            open_store(uri).write(key, path.read_bytes())


def test_days_at_a_uri_are_those_of_a_directory(store_uri, tmp_path, capsys):
    raw = tmp_path / "raw"
    (raw / "day_2/part").mkdir(parents=True)
    names = ("day_10.csv.gz", "day_2/a.csv", "day_2/part/b.csv", "day_2/_SUCCESS", "notes.txt")
    for name in names:
        (raw / name).write_text(name)
    put(store_uri.below("raw"), raw)
    local = find_days(raw, print)
    said, uri = capsys.readouterr().out, store_uri.below("raw")
    found = find_days(Path(str(uri)), print, Cache.open(tmp_path / "cache"))
    assert capsys.readouterr().out == said.replace(str(raw), str(uri))
    assert [day.name for day in found] == [day.name for day in local] == ["day_2", "day_10"]
    assert [str(day.place) for day in found] == [f"{uri}/day_2", f"{uri}/day_10.csv.gz"]
    assert [[*day.files] for day in found] == [[*day.files] for day in local]
    assert [day.digest() for day in found] == [day.digest() for day in local]
    open_store(uri).write("raw/day_2/a.csv", b"other")
    (changed, _) = find_days(Path(str(uri)), print, Cache.open(tmp_path / "cache"))
    assert changed.files != found[0].files
    assert changed.digest() != local[0].digest()
    for wrong in (f"{uri}/*.csv", "https://example.com/raw"):
        with pytest.raises(ValueError, match="--days .*expected a folder of a store"):
            find_days(Path(wrong), print)
    with pytest.raises(FileNotFoundError, match="none"):
        find_days(Path(f"{uri}/none"), print)


@pytest.mark.slow
def test_days_at_a_uri_are_learned(bucket, tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    (tmp_path / "few.flags").write_text("\n".join(["--batch_size=16", *MODEL]))
    (tmp_path / "raw").mkdir()
    for day in (1, 2):
        write_day(tmp_path / "raw", day)
    put(bucket.below("raw"), tmp_path / "raw")
    flags = "--schema schema.yaml --train_flags few.flags --cores 1 --most_unknown 1 --most_psi 9"
    run(f"dlrm daily --days raw {flags} --output local", tmp_path)
    run(f"dlrm daily --days s3://{bucket.authority}/raw {flags} --output stored", tmp_path)
    local, stored = (
        json.loads((tmp_path / name / "daily.json").read_text())["days"]
        for name in ("local", "stored")
    )
    for before, after in zip(local, stored, strict=True):
        assert [after[name] for name in ("content", "rows", "judged", "fields")] == [
            before[name] for name in ("content", "rows", "judged", "fields")
        ]
    weights = [
        next((tmp_path / name / "days/2/run").glob("step-*")) / "tables/0.bin"
        for name in ("local", "stored")
    ]
    assert np.array_equal(*(np.fromfile(path, np.float32) for path in weights))
    open_store(bucket).write("raw/3.parquet", b"no table")
    with pytest.raises(AssertionError, match=f"s3://{bucket.authority}/raw/3.parquet"):
        run(f"dlrm daily --days s3://{bucket.authority}/raw {flags} --output stored", tmp_path)
