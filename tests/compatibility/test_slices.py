"""A dataset in slices of objects, written by `make_slice_fixtures`, is read as it was."""

import functools

import pyarrow.fs
import pytest
from archives import SLICED, unpack

from dlrm.manifest import checksum
from dlrm.remote import hdfs
from dlrm.remote.cache import Cache
from dlrm.remote.hdfs import ArrowStore
from dlrm.remote.publish import fetched_directory, find_published
from dlrm.remote.uri import Uri


@pytest.fixture(params=SLICED, ids=lambda path: path.name.split(".tar")[0])
def sliced(request, tmp_path, monkeypatch):
    """Returns the files of an earlier version, whose objects are at `place_of` them."""
    written = unpack(request.param, tmp_path)
    files, base = pyarrow.fs.LocalFileSystem(), str(written.folder / "objects")
    monkeypatch.setattr(
        hdfs, "open_hdfs", functools.cache(lambda root: ArrowStore(root, files, base))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return written


def place_of(sliced):
    """Returns a URI of a host of Hadoop that no other test has, as stores stay open."""
    return Uri("hdfs", sliced.folder.parent.name, "dataset")


def test_there_is_a_sliced_dataset():
    assert SLICED


def test_a_sliced_dataset_has_its_files(sliced):
    place = place_of(sliced)
    with fetched_directory(Cache.open(), place) as path:
        found = {name: checksum(path / name) for name in sliced.expected["sums"]}
    assert found == sliced.expected["sums"]
    assert sum(len(entry.slices) > 1 for entry in find_published(place).entries.values()) > 3
