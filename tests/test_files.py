"""Directories and files appear complete or not at all, and manifests detect changes."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import forked
import numpy as np
import pytest

from dlrm.files import (
    atomic_directory,
    check_local,
    check_replaceable,
    make_directories,
    tidy_leftovers,
    write_array,
    write_atomically,
)
from dlrm.manifest import (
    BLOCK_BYTES,
    Checksum,
    checksum,
    read_manifest,
    sealed_json,
    write_manifest,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_staged_directory_appears_only_at_the_end(tmp_path):
    final = tmp_path / "deep" / "dataset"
    with atomic_directory(final) as staging:
        (staging / "file").write_text("text")
        assert not final.exists()
    assert (final / "file").read_text() == "text"
    assert names(tmp_path / "deep") == ["dataset"]


def test_after_an_error_nothing_is_left(tmp_path):
    def write_half():
        with atomic_directory(tmp_path / "dataset") as staging:
            (staging / "file").write_text("text")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_half()
    assert names(tmp_path) == []


def test_an_empty_directory_may_be_filled(tmp_path):
    (tmp_path / "dataset").mkdir()
    with atomic_directory(tmp_path / "dataset") as staging:
        (staging / "file").touch()
    assert names(tmp_path / "dataset") == ["file"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_that_we_did_not_write_is_kept(tmp_path, replace):
    final = tmp_path / "home"
    final.mkdir()
    (final / "thesis").write_text("text")
    with (
        pytest.raises(FileExistsError, match="home: exists and"),
        atomic_directory(final, replace),
    ):
        pytest.fail("the block must not run")
    assert (final / "thesis").read_text() == "text"


def test_a_file_is_kept(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="got a file"), atomic_directory(tmp_path / "file"):
        pytest.fail("the block must not run")


def test_a_directory_of_ours_is_replaced_only_when_asked(tmp_path):
    final = tmp_path / "dataset"
    for text in ("old", "new"):
        with atomic_directory(final, replace=True) as staging:
            (staging / "file").write_text(text)
            write_manifest(staging, "dataset")
    assert (final / "file").read_text() == "new"
    assert names(tmp_path) == ["dataset"]
    with pytest.raises(FileExistsError, match="not empty"), atomic_directory(final):
        pytest.fail("the block must not run")


def test_an_error_while_replacing_keeps_the_old_directory(tmp_path):
    final = tmp_path / "dataset"
    with atomic_directory(final) as staging:
        write_manifest(staging, "dataset", rows=1)

    def write_half():
        with atomic_directory(final, replace=True) as staging:
            write_manifest(staging, "dataset", rows=2)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_half()
    assert read_manifest(final, "dataset")["rows"] == 1
    assert names(tmp_path) == ["dataset"]


def test_a_killed_writer_leaves_nothing_at_the_final_name(tmp_path):
    code = (
        "import os, sys; from dlrm.files import check_replaceable, atomic_directory\n"
        "with atomic_directory(sys.argv[1]) as staging:\n"
        "    (staging / 'file').write_text('half')\n"
        "    os._exit(3)\n"
    )
    final = tmp_path / "dataset"
    killed = subprocess.run([sys.executable, "-c", code, str(final)], check=False)
    assert killed.returncode == 3
    assert not final.exists()


def test_an_entry_whose_replacement_was_killed_is_restored(tmp_path):
    final = tmp_path / "dataset"
    final.mkdir()
    (final / "file").write_text("old")
    write_manifest(final, "dataset")
    code = (
        "import os, pathlib, sys; from dlrm import files\n"
        "files.exchange = lambda one, other: False\n"
        "with files.atomic_directory(sys.argv[1], replace=True) as staging:\n"
        "    rename = pathlib.Path.rename\n"
        "    pathlib.Path.rename = lambda *paths: os._exit(3 + rename(*paths).exists())\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(final)], check=False)
    assert killed.returncode == 4
    assert not final.exists()
    tidy_leftovers(tmp_path)
    assert names(tmp_path) == ["dataset"]
    assert (final / "file").read_text() == "old"


def test_write_atomically_replaces_the_text_and_leaves_no_other_file(tmp_path):
    for text in ("old", "new"):
        write_atomically(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_a_checksum_has_the_crc_of_each_block_however_the_bytes_come(tmp_path):
    content = bytes(range(251)) * 40_000  # two blocks and part of a third
    (tmp_path / "file").write_bytes(content)
    blocks = [
        content[begin : begin + BLOCK_BYTES] for begin in range(0, 3 * BLOCK_BYTES, BLOCK_BYTES)
    ]
    expected = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
    assert checksum(tmp_path / "file") == expected
    joined = Checksum()
    for begin, end in pairwise([0, 1, 70_000, BLOCK_BYTES, 5_000_000, 9_000_000, len(content)]):
        part = Checksum(begin)
        part.update(content[begin:end])
        joined.join(part, "file")
    assert str(joined) == expected
    with pytest.raises(
        ValueError, match="file: expected the bytes from 10040000 on, got .* from 7 "
    ):
        joined.join(Checksum(7), "file")


@pytest.fixture
def written(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "label.bin").write_bytes(b"\0\1\1")
    write_manifest(tmp_path, "dataset", rows=3)
    return tmp_path


def test_a_manifest_keeps_facts_sizes_and_crcs(written):
    manifest = read_manifest(written, "dataset", check_crc=True)
    assert manifest["rows"] == 3
    assert manifest["files"] == {
        "train/label.bin": {"bytes": 3, "crc32": f"{zlib.crc32(bytes([0, 1, 1])):08x}"}
    }


def test_a_missing_file_is_named(written):
    (written / "train" / "label.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train/label\.bin: missing"):
        read_manifest(written, "dataset")


def test_a_truncated_file_is_named(written):
    (written / "train" / "label.bin").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match=r"label\.bin: expected 3 bytes, got 2"):
        read_manifest(written, "dataset")


def test_a_changed_byte_is_found_by_the_crc_only(written):
    (written / "train" / "label.bin").write_bytes(b"\0\0\1")
    read_manifest(written, "dataset")
    with pytest.raises(ValueError, match=r"label\.bin: expected CRC-32 .* damaged"):
        read_manifest(written, "dataset", check_crc=True)


def test_no_manifest_means_not_complete(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        read_manifest(tmp_path, "checkpoint")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"kind": "dataset", "version": 1, "files": {"a": 1}}']
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"manifest\.json: (not a manifest|expected|line 1, column 2: no JSON)"
    ):
        read_manifest(tmp_path, "dataset")


def test_another_kind_or_version_is_refused(written):
    with pytest.raises(ValueError, match="expected a checkpoint of version 2, got a dataset"):
        read_manifest(written, "checkpoint")
    manifest = json.loads((written / "manifest.json").read_text())
    (written / "manifest.json").write_text(sealed_json({**manifest, "version": 3}))
    with pytest.raises(ValueError, match="got a dataset of version 3"):
        read_manifest(written, "dataset")


def manifest_naming(directory, name):
    """Writes a sealed manifest of one file."""
    entry = {"bytes": 0, "crc32": "00000000"}
    text = sealed_json({"kind": "dataset", "version": 2, "files": {name: entry}})
    (directory / "manifest.json").write_text(text)


@pytest.mark.parametrize("name", ["../secret", "{absolute}", "a/../../secret", "", ".", "a\0b"])
def test_a_manifest_names_no_file_elsewhere(tmp_path, name):
    (tmp_path / "dataset" / "a").mkdir(parents=True)
    (tmp_path / "secret").touch()
    manifest_naming(tmp_path / "dataset", name.format(absolute=tmp_path / "secret"))
    with pytest.raises(ValueError, match=r"manifest\.json: expected a path within"):
        read_manifest(tmp_path / "dataset", "dataset")


def test_links_that_lead_out_of_a_directory_need_a_flag(tmp_path):
    (tmp_path / "secret").touch()
    for name, target in (("out", "../secret"), ("within", "other")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "file").symlink_to(target)
    manifest_naming(tmp_path / "out", "file")
    with pytest.raises(ValueError, match=r"'file': .* symbolic link to .*secret$"):
        read_manifest(tmp_path / "out", "dataset")
    with pytest.raises(ValueError, match="; --allow_links reads it all the same"):
        read_manifest(tmp_path / "out", "dataset", allow_links=False)
    read_manifest(tmp_path / "out", "dataset", allow_links=True)
    (tmp_path / "within" / "other").touch()
    manifest_naming(tmp_path / "within", "file")
    read_manifest(tmp_path / "within", "dataset")


def test_only_a_directory_of_the_same_kind_is_replaced(tmp_path):
    for name in ("page", "model"):
        with atomic_directory(tmp_path / name) as staging:
            (staging / "a").write_text(name)
            write_manifest(staging, name)
    with (
        pytest.raises(FileExistsError, match="or an earlier page to replace, got a 'model'"),
        atomic_directory(tmp_path / "model", replace="page"),
    ):
        raise AssertionError("begun")
    assert (tmp_path / "model" / "a").read_text() == "model"
    with atomic_directory(tmp_path / "page", replace="page") as staging:
        write_manifest(staging, "page")
    assert not (tmp_path / "page" / "a").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="expected a directory that may be written in"):
        check_replaceable(tmp_path / "a/b", replace=False)


def test_a_directory_inside_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="file: expected a directory that may be written in"):
        check_replaceable(tmp_path / "file/a/b", replace=False)


def fill_directory(path):
    with atomic_directory(path) as staging:
        (staging / "file").write_text("text")


@pytest.mark.parametrize("path", ["s3://bucket/x", Path("s3://bucket/x")])
def test_nothing_is_written_to_a_uri(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writers = (fill_directory, lambda path: write_atomically(path, ""), make_directories)
    for write in writers:
        with pytest.raises(ValueError, match="^s3://bucket/x: expected a path of this machine"):
            write(path)
    assert names(tmp_path) == []


def test_uris_of_every_form_are_refused():
    for uri in ("gs://b/x", "S3A://b", "dbfs:/mnt/x", "cache::s3://b/x", "data,s3://b/x"):
        with pytest.raises(ValueError, match=f"^--output {uri.replace('dbfs:/', 'dbfs://')}: "):
            check_local(uri, "--output")
    for uri in ("file:///x", Path("file:///x")):
        with pytest.raises(ValueError, match=r"got a URI \(file://\); leave out file://$"):
            check_local(uri, "--output")


def test_a_path_that_is_not_in_utf_8_is_refused(tmp_path, monkeypatch):
    for path in (
        b"log-\xff.json",
        os.fsdecode(b"log-\xff.json"),
        Path(os.fsdecode(b"log-\xff.json")),
    ):
        expected = r"^--log_path log-\\xff\.json: expected a path in UTF-8; rename it, or"
        with pytest.raises(ValueError, match=expected):
            check_local(path, "--log_path")
    for path in ("größe/日本", "größe".encode(), "a\nb", ""):
        check_local(path)


def test_a_locale_that_cannot_read_a_path_is_named():
    code = "import sys; from dlrm.files import check_local; check_local(sys.argv[1], '--log_path')"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, "größe"]
    environment = os.environ | ascii_only
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "or set PYTHONUTF8=1 if this locale's encoding, ascii, is another" in done.stderr
    subprocess.run(command, env=os.environ | {"PYTHONUTF8": "1"}, check=True)


def test_colons_in_a_path_are_no_uri():
    for path in ("a:b", "a/s3:/b", "2026-01-01T10:/x", "/s3:/b", "day_0", "", b"x"):
        check_local(path)


def write_beyond_a_limit(path, connection):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, resource.RLIM_INFINITY))  # 128 are the header
    try:
        write_array(path, np.zeros(10))
    except OSError as error:
        connection.send(error.errno)
    connection.close()


def test_an_array_whose_last_bytes_cannot_be_written_is_an_error(tmp_path):
    receiver, sender = forked.CONTEXT.Pipe(duplex=False)
    arguments = (tmp_path / "array.npy", sender)
    process = forked.CONTEXT.Process(target=write_beyond_a_limit, args=arguments)
    process.start()
    sender.close()
    assert receiver.recv() == errno.EFBIG  # numpy.save reports nothing
    process.join()


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomically(tmp_path / "nowhere" / "file", "text")
