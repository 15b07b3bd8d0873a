"""Failures of a store are repeated, renewed or named."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import dlrm.remote.objects
from dlrm.manifest import BLOCK_BYTES, write_manifest
from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.objects import NEW, find_entries, open_store
from dlrm.remote.publish import check_publishable, find_published, publish as publish_directory


@pytest.fixture
def published(store_uri, tmp_path):
    """A directory of many small files and a large one, and its URI."""
    path, uri = tmp_path / "made", store_uri.below("d")
    path.mkdir()
    random = np.random.default_rng(0)
    for i in range(60):
        (path / f"{i}").write_bytes(random.bytes(100 + i))
    (path / "large").write_bytes(random.bytes(3 * BLOCK_BYTES + 5))
    write_manifest(path, "dataset")
    publish_directory(path, uri, None)
    return path, uri


@pytest.fixture
def hasty(monkeypatch):
    """Makes repeats follow soon, and be few."""
    retries = {**dlrm.remote.objects._RETRIES, "max_retries": 3}
    retries["backoff"] = {**retries["backoff"], "init_backoff": timedelta(milliseconds=10)}
    monkeypatch.setattr(dlrm.remote.objects, "_RETRIES", retries)


def names_and_bytes(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("faults", [{"failing": 0.05}, {"cut": 0.1}])
def test_failures_change_no_byte(endpoint, published, faults):
    path, uri = published
    endpoint.set(**faults)
    write_manifest(path, "dataset", note="of a second version")
    publish_directory(path, uri, check_publishable(uri, "dataset")[""])
    copy = localize(uri)
    found, expected = names_and_bytes(Path(copy)), names_and_bytes(path)
    assert found.keys() == expected.keys()
    assert all(found[name] == expected[name] for name in found if name != "manifest.json")
    happened = endpoint.facts()["counts"]
    assert happened["failed" if "failing" in faults else "cut"]


@pytest.mark.usefixtures("hasty")
def test_an_object_that_is_cut_each_time_is_named(endpoint, store_uri):
    store = open_store(store_uri)
    store.write("a", b"content")
    entry = store.entry("a")
    endpoint.set(cut=1.0)
    with pytest.raises(OSError, match=f"{store_uri}a: .*body"):
        store.read(entry)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("dropped", [0, 1])
def test_a_conditional_write_whose_answer_is_lost_is_known_as_our_own(endpoint, store_uri, dropped):
    store = open_store(store_uri)
    before = store.write("old", b"1", NEW)
    endpoint.set(lost="d", dropped=dropped)  # of "old" as well
    replaced = store.write("old", b"2", before)
    made = store.write("d", b"1", NEW)
    assert (replaced, made) == (store.entry("old").version, store.entry("d").version)
    endpoint.set(lost="")
    for condition in (NEW, before):
        with pytest.raises(FileExistsError, match="another process has written it meanwhile"):
            store.write("old", b"3", condition)


@pytest.mark.usefixtures("hasty")
def test_a_publication_survives_lost_answers(endpoint, published):
    path, uri = published
    write_manifest(path, "dataset", note="of a second version")
    version = check_publishable(uri, "dataset")[""]
    endpoint.set(lost="manifest.json")
    publish_directory(path, uri, version)
    assert find_published(uri).manifest["note"] == "of a second version"
    assert endpoint.facts()["counts"]["lost"] >= 2  # of the folder, and at the URI


def write_profile(path, token):
    path.write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = secret-of-the-test\n"
        f"aws_session_token = {token}\n"
    )


@pytest.fixture
def profile(store_uri, monkeypatch, tmp_path):
    """A file of credentials with a token, in place of the environment's."""
    path = tmp_path / "credentials"
    write_profile(path, "first")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("act", ["entries", "entry", "read", "write", "remove"])
def test_an_expired_token_is_renewed(endpoint, profile, store_uri, act):
    pytest.importorskip("boto3")
    endpoint.set(token="first")
    store = open_store(store_uri)
    store.write("a", b"content")
    entry = store.entry("a")
    write_profile(profile, "second")
    endpoint.set(token="second")
    calls = {
        "entries": lambda: store.entries(""),
        "entry": lambda: store.entry("a"),
        "read": lambda: store.read(entry),
        "write": lambda: store.write("b", b"", NEW),
        "remove": lambda: store.remove("a"),
    }
    calls[act]()
    assert endpoint.facts()["counts"]["expired"]


@pytest.mark.usefixtures("hasty")
def test_a_token_that_stays_expired_is_named_without_its_value(
    endpoint, store_uri, monkeypatch, capfd
):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-test")
    endpoint.set(token="another")
    with pytest.raises(PermissionError, match=r"s3://.*ExpiredToken.*AWS_ACCESS_KEY_ID") as raised:
        find_entries(store_uri)
    shown = str(raised.value) + capfd.readouterr().err
    assert not any(value in shown for value in ("token-of-the-test", "secret-of-the-test"))


def test_a_command_without_permission_names_credentials_but_no_secret(endpoint, store_uri, root):
    open_store(store_uri).write("rows.csv", b"a,b\n1,2\n")
    endpoint.set(denied="rows")
    done = subprocess.run(
        [sys.executable, "-m", "dlrm", "schema", "--label=a", f"--input={store_uri}rows.csv"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    expected = f"{store_uri}rows.csv: no permission"
    assert expected in done.stderr
    assert "AWS_ACCESS_KEY_ID, AWS_PROFILE or ~/.aws" in done.stderr
    assert "secret-of-the-test" not in done.stdout + done.stderr


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_cache_on_a_full_disk_is_named(full_disk, published):
    uri = published[1]
    with pytest.raises(OSError, match=f"{uri}.*needs .* bytes in {full_disk}.*--cache_dir"):
        localize(uri, Cache.open(full_disk))


def test_an_object_is_read_without_permission_for_others(endpoint, store_uri):
    """Amazon's S3 answers 403 for keys that do not exist, unless the bucket may be listed."""
    open_store(store_uri).write("rows.csv", b"a,b\n1,2\n")
    endpoint.set(denied="rows.csv/")
    copy = localize(store_uri.below("rows.csv"))
    assert Path(copy).read_text() == "a,b\n1,2\n"


def test_a_disk_that_fills_while_objects_come_is_named(full_disk, store_uri, monkeypatch):
    open_store(store_uri).write("large", bytes(2 << 20))
    monkeypatch.setattr(Cache, "_make_room", lambda self, needed, uri: None)
    with pytest.raises(OSError, match=f"{store_uri}large: cannot be stored in .*No space left"):
        localize(store_uri.below("large"), Cache.open(full_disk))
