"""Objects, patterns and errors of stores."""

import os
from pathlib import Path

import pytest

from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.objects import NEW, find_entries, open_store
from dlrm.remote.publish import Output
from dlrm.remote.uri import Uri, is_uri


def names(uri):
    return [entry.key for entry in find_entries(uri)]


@pytest.mark.parametrize("text", ["s3://b/a/b", "gs://b/a", "abfss://c@account.dfs.core/a"])
def test_a_uri_keeps_its_text(text):
    assert is_uri(text)
    assert str(Uri.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/a", r"ftp://host/a: expected a URI of s3://, .*, got ftp://"),
        ("s3:///a", "expected a bucket, as in s3://bucket/a, got none"),
        ("s3://me:secret@bucket/a", r"s3://...@bucket/a: expected no user or password"),
        ("s3://b/../a", r"without empty parts, as in a//b, parts \. and \.\."),
        ("s3://b/a//b", r"'s3://b/a//b': expected a key without empty parts"),
        ("s3://b/a/./b", "without empty parts"),
        ("s3://b/a\nb", "without .* control characters"),
        ("a/b", "expected a URI, such as"),
    ],
)
def test_a_wrong_uri_is_named(text, message):
    with pytest.raises(ValueError, match=message) as raised:
        Uri.parse(text)
    assert "secret" not in str(raised.value)


def test_objects_of_a_prefix_and_of_a_pattern(bucket):
    store = open_store(bucket)
    keys = ["d/day=1/a.csv", "d/day=1/b.csv", "d/day=2/a.csv", "d/x.csv", "dd/a.csv"]
    for key in keys:
        store.write(key, key.encode())
    assert names(bucket.below("d")) == keys[:4]
    assert names(bucket.below("d/x.csv")) == ["d/x.csv"]
    assert names(bucket.below("d/*.csv")) == ["d/x.csv"]
    assert names(bucket.below("d/day=*/a.csv")) == [keys[0], keys[2]]
    assert names(bucket.below("d/day=[12]")) == keys[:3]
    assert names(bucket.below("**/a.csv")) == [keys[0], keys[2], keys[4]]
    assert names(bucket) == keys
    assert [entry.key for entry in store.entries("d/day=1/a")] == keys[:1]
    folder = localize(bucket.below("d/day=*"))
    assert sorted(p.read_text() for p in Path(folder).rglob("*.csv")) == keys[:3]
    (first, *_) = store.entries(keys[0])
    assert Path(folder, "day=1/a.csv").stat().st_mtime == pytest.approx(first.modified)


def test_writes_hold_their_conditions(bucket):
    store = open_store(bucket)
    version = store.write("a", b"1", NEW)
    with pytest.raises(FileExistsError, match=f"{bucket}a: another process"):
        store.write("a", b"2", NEW)
    second = store.write("a", b"2", version)
    with pytest.raises(FileExistsError, match="another process"):
        store.write("a", b"3", version)
    assert second != version
    assert bytes(store.read(store.entry("a"))) == b"2"


def test_an_object_replaced_while_it_is_read_is_named(bucket):
    store = open_store(bucket)
    store.write("a", b"1")
    entry = store.entry("a")
    store.write("a", b"2")
    with pytest.raises(OSError, match=f"{bucket}a: was replaced by another object"):
        store.read(entry)


def test_what_is_not_there_is_named(bucket):
    with pytest.raises(FileNotFoundError, match=f"{bucket}a: no such object, and none below it"):
        find_entries(bucket.below("a"))
    with pytest.raises(FileNotFoundError, match=r"a/\*: no object of this pattern among 0"):
        find_entries(bucket.below("a/*"))
    missing = Uri("s3", "no-such-bucket")
    for act in (find_entries, lambda uri: open_store(uri).write("a", b"")):
        with pytest.raises(FileNotFoundError, match=f"{missing}: no such bucket"):
            act(missing)


def test_an_object_that_is_a_folder_too_is_named(bucket, tmp_path):
    store = open_store(bucket)
    for key in ("a/b", "a/b/c/d"):
        store.write(key, b"")
    with pytest.raises(OSError, match=f"^{bucket}a/b: cannot be stored in .*: Is a directory"):
        localize(bucket.below("a"), Cache.open(tmp_path))


def test_overwriting_is_not_advised_where_it_is_refused(bucket, tmp_path):
    open_store(bucket).write("a/b", b"")
    with pytest.raises(FileExistsError, match="is not replaced; name another$"):
        Output(bucket.below("a"), tmp_path / "a", False)


def test_nothing_is_written_to_a_web_server(tmp_path):
    with pytest.raises(ValueError, match="https://host/a: expected a store to write to, got a web"):
        Output(Uri.parse("https://host/a"), tmp_path / "a")


@pytest.mark.parametrize("uri", ["http://host/a*", "http://host/", "http://host/a/"])
def test_a_web_server_has_no_listings(uri):
    with pytest.raises(ValueError, match="^http://host/.*: expected the URI of a single file"):
        find_entries(Uri.parse(uri))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"AWS_ENDPOINT_URL": "host"}, "expected the address .* to begin with http:// or https://"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_PROFILE": "none"}, "profile .none. could not be found"),
    ],
)
def test_wrong_settings_are_named(monkeypatch, settings, message):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^s3://wrong/: .*{message}"):
        open_store(Uri("s3", "wrong"))


def test_a_forked_child_reads(bucket):
    open_store(bucket).write("a", b"content")
    child = os.fork()
    if child == 0:
        store = open_store(bucket)
        os._exit(0 if bytes(store.read(store.entry("a"))) == b"content" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_google_storage_holds_conditions_by_generation(endpoint, store_uri, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.url)
    store = open_store(Uri("gs", store_uri.authority))
    version = store.write("a", b"1", NEW)
    second = store.write("a", b"2", version)
    for condition in (NEW, version):
        with pytest.raises(FileExistsError, match="gs://.*/a: another process"):
            store.write("a", b"3", condition)
    assert store.entry("a").version == store.entries("")[0].version == second
    assert bytes(store.read(store.entry("a"))) == b"2"
    missing = Uri("gs", "none")
    with pytest.raises(FileNotFoundError, match=f"{missing}: no such bucket"):
        open_store(missing).entries("")
