"""Python functions refuse wrong URIs before any work, and name the argument; nothing is written."""

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
    ("distill", lambda path: dlrm.fit(TABLE, label="label", distill=path)),
    ("path", dlrm.Dataset),
    ("output", lambda path: dlrm.Dataset.from_arrow(TABLE, SCHEMA, path)),
    ("schema", lambda path: dlrm.Dataset.from_arrow(TABLE, path)),
    ("path", dlrm.Schema.load),
    ("path", SCHEMA.save),
]


@pytest.mark.parametrize("kind", [str, Path])  # a Path of ftp://host is ftp:/host
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_a_uri_of_an_unknown_scheme_is_refused(name, call, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = rf"^{name} ftp:/+host/x: expected a URI of s3://, .*, or a path, got ftp://$"
    with pytest.raises(ValueError, match=expected):
        call(kind("ftp://host/x"))
    with pytest.raises(ValueError, match=rf"^{name} file:///?x: .*leave out file://$"):
        call(kind("file:///x"))
    assert not list(tmp_path.iterdir())


def test_a_setting_takes_no_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^table_files s3://bucket/x: expected a path of this"):
        dlrm.fit(TABLE, label="label", table_files="s3://bucket/x")
    assert not list(tmp_path.iterdir())


def test_names_of_columns_may_look_like_a_uri():
    made = dlrm.Dataset.from_arrow(
        pa.table({"label": [0, 1] * 50, "https://x/user": list(map(str, range(100)))}),
        {"label": {"column": "label"}, "categorical": ["https://x/user"]},
        split_key="https://x/user",
    )
    assert sum(made.rows.values()) == 100
