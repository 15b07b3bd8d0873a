"""The store of Hadoop's file system, over a folder of this machine."""

import pyarrow.fs
import pytest

from dlrm.remote.hdfs import ArrowStore
from dlrm.remote.store import open_store
from dlrm.remote.uri import Uri


@pytest.fixture
def store(tmp_path):
    return ArrowStore(Uri("hdfs", "host"), pyarrow.fs.LocalFileSystem(), str(tmp_path))


def test_files_are_listed_read_and_removed(store, tmp_path):
    (tmp_path / "local").write_bytes(b"12345")
    store.write("d/a", b"1")
    store.write("d/e/b", tmp_path / "local")
    assert [(entry.key, entry.size) for entry in store.entries("d/")] == [("d/a", 1), ("d/e/b", 5)]
    assert bytes(store.read(store.entry("d/e/b"), 1, 3)) == b"23"
    store.write("d/a", b"22")
    assert bytes(store.read(store.entry("d/a"))) == b"22"
    store.remove(["d/a", "d/none"])
    assert [entry.key for entry in store.entries("")] == ["d/e/b", "local"]


def test_a_file_replaced_while_it_is_read_is_named(store):
    store.write("a", b"1")
    entry = store.entry("a")
    store.write("a", b"22")
    with pytest.raises(OSError, match="hdfs://host/a: was replaced"):
        store.read(entry)


def test_a_missing_file_is_named(store):
    with pytest.raises(FileNotFoundError, match="hdfs://host/a: no such object"):
        store.entry("a")


def test_a_machine_without_hadoop_is_told_what_is_needed(monkeypatch):
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ValueError, match=r"hdfs://host/: [\s\S]*it needs HADOOP_HOME"):
        open_store(Uri("hdfs", "host", "a"))
