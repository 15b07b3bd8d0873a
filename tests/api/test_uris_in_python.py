"""Python functions refuse URIs before any work, and name the argument; nothing is written."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

import dlrm

TABLE = pa.table({"label": [0, 1] * 50, "user": list(map(str, range(100)))})
SCHEMA = dlrm.Schema.from_dict({"label": {"column": "label"}, "categorical": ["user"]})
CALLS = [
    ("checkpoint", dlrm.load),
    ("dataset", lambda path: dlrm.load("missing", dataset=path)),
    ("data", dlrm.fit),
    ("schema", lambda path: dlrm.fit(TABLE, path)),
    (
        "save_checkpoint_path",
        lambda path: dlrm.fit(TABLE, label="label", save_checkpoint_path=path),
    ),
    ("table_store", lambda path: dlrm.fit(TABLE, label="label", table_store=os.fspath(path))),
    ("path", dlrm.Dataset),
    ("output", lambda path: dlrm.Dataset.from_arrow(TABLE, SCHEMA, path)),
    ("schema", lambda path: dlrm.Dataset.from_arrow(TABLE, path)),
    ("path", dlrm.Schema.load),
    ("path", SCHEMA.save),
]


@pytest.mark.parametrize("kind", [str, Path])  # a Path of s3://bucket is s3:/bucket
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_uri_is_refused(name, call, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = rf"^{name} s3://bucket/x: expected a path of this machine, got a URI \(s3://\); use"
    with pytest.raises(ValueError, match=expected):
        call(kind("s3://bucket/x"))
    assert not list(tmp_path.iterdir())


def test_names_of_columns_may_look_like_a_uri():
    made = dlrm.Dataset.from_arrow(
        pa.table({"label": [0, 1] * 50, "https://x/user": list(map(str, range(100)))}),
        {"label": {"column": "label"}, "categorical": ["https://x/user"]},
        split_key="https://x/user",
    )
    assert sum(made.rows.values()) == 100
