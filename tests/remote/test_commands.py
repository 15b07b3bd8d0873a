"""Commands that read and write by URI."""

import json

import numpy as np
import pytest

from dlrm.files import MANIFEST
from dlrm.manifest import write_manifest
from dlrm.remote.output import Addition
from dlrm.remote.publish import check_publishable, find_published, publish, publish_plain
from dlrm.remote.store import find_entries, open_store
from dlrm.scripts.commands import COMMANDS, run


def put(path, uri):
    """Copies a directory as other tools do, or a file."""
    store = open_store(uri)
    if path.is_file():
        store.write(uri.key, path)
        return uri
    for file in (file for file in path.rglob("*") if file.is_file()):
        store.write(uri.below(file.relative_to(path).as_posix()).key, file)
    return uri


def names(uri):
    return [entry.key.removeprefix(uri.folder) for entry in find_entries(uri)]


def content(uri, name):
    store = open_store(uri)
    return bytes(store.read(store.entry(uri.below(name).key)))


@pytest.fixture
def dlrm(capsys):
    """Returns a function that runs a command, and returns what it printed."""

    def ended(name, *words, code=0):
        assert run(COMMANDS[name], list(map(str, words))) == code, capsys.readouterr()
        said = capsys.readouterr()
        text = said.err if code else said.out
        assert "/cache/" not in text
        return text

    return ended


@pytest.fixture
def model(trained, bucket):
    """The URI of a run, whose checkpoints were published while it trained."""
    uri = bucket.below("run")
    for path in trained.checkpoint.iterdir():
        if (path / MANIFEST).is_file():
            publish(path, uri.below(path.name), None)
        elif path.is_file():
            put(path, uri.below(path.name))
    return uri


def test_scores_are_those_of_local_files(dlrm, trained, model, bucket, tmp_path):
    log, scores = put(trained.log, bucket.below("logs/test.tsv")), bucket.below("scores.npy")
    told = dlrm("predict", f"--checkpoint={model}", f"--input={log}", f"--output={scores}")
    assert f"{scores}: 1,000 scores (probability) by {model}/step-" in told
    local = tmp_path / "scores.npy"
    dlrm(
        "predict",
        f"--checkpoint={trained.checkpoint}",
        f"--input={trained.log}",
        f"--output={local}",
    )
    assert content(bucket, "scores.npy") == local.read_bytes()
    assert len(np.load(local)) == 1000


def test_a_page_and_its_facts_have_uris(dlrm, trained, model, bucket):
    data, page = put(trained.dataset, bucket.below("data")), bucket.below("page")
    for _ in range(2):  # an earlier page is replaced
        dlrm("evaluate", f"--checkpoint={model}", f"--dataset={data}", f"--output={page}")
    assert names(page) == ["evaluation.html", "evaluation.json", MANIFEST]
    assert "/cache/" not in content(page, "evaluation.html").decode()
    facts = json.loads(content(page, "evaluation.json"))
    assert facts["checkpoint"].startswith(f"{model}/step-")
    assert facts["sources"] == [str(data)]
    put(trained.log, bucket.below("other/a.txt"))
    told = dlrm(
        *("evaluate", f"--checkpoint={model}", f"--dataset={data}"),
        *(f"--output={bucket.below('other')}",),
        code=1,
    )
    assert f"error: {bucket}other: has objects, such as other/a.txt, but no manifest" in told


@pytest.mark.slow
def test_an_export_is_added_to_a_repository(dlrm, trained, model, bucket):
    repository = bucket.below("models")
    words = [f"--checkpoint={model}", f"--save-dir={repository}", f"--dataset={trained.dataset}"]
    dlrm("export", *words, "--triton-model-name=a")
    before = set(names(repository))
    assert {"a/config.pbtxt", "a/1/model.py", "a/1/manifest.json"} <= before
    told = dlrm("export", *words, "--triton-model-name=a", code=1)
    assert f"error: {repository}/a: there is a model of that name; --update adds" in told
    dlrm("export", *words, "--triton-model-name=a", "--update")
    dlrm("export", *words, "--triton-model-name=b")
    added = {name.partition("/")[0] + "/" + name.split("/")[1] for name in names(repository)}
    assert added == {"a/1", "a/2", "a/config.pbtxt", "b/1", "b/config.pbtxt"}
    assert before < set(names(repository))


def made(path, *files):
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)


def test_two_exports_to_one_repository_do_not_mix(bucket, tmp_path):
    uri = bucket.below("models")
    first, second = (Addition(uri, tmp_path / name) for name in ("one", "two"))
    for one in (first, second):
        made(one.path, f"m/1/{MANIFEST}", "m/1/model.py", "m/config.pbtxt", "m_raw/config.pbtxt")
        (one.path / "m_raw" / "1").mkdir()
    first.publish()
    with pytest.raises(FileExistsError, match=f"{uri}/m/1/{MANIFEST}: another process has written"):
        second.publish()
    files = [f"m/1/{MANIFEST}", "m/1/model.py", "m/config.pbtxt"]
    assert names(uri) == [*files, "m_raw/1/.keep", "m_raw/config.pbtxt"]
    third = Addition(uri, tmp_path / "three")
    assert (third.path / "m/1").is_dir()
    assert (third.path / "m/config.pbtxt").read_text() == "m/config.pbtxt"
    made(third.path, f"m/2/{MANIFEST}")
    third.publish()
    assert names(uri)[:4] == [*files[:2], f"m/2/{MANIFEST}", files[2]]


def test_an_export_that_was_killed_is_no_model(bucket, tmp_path):
    uri = bucket.below("models")
    put_text(uri, f"m/1/{MANIFEST}", "m/1/model.py")  # config.pbtxt comes last
    new = Addition(uri, tmp_path / "new")
    assert not list(new.path.iterdir())
    made(new.path, f"m/1/{MANIFEST}", "m/config.pbtxt")
    new.publish()
    assert content(uri, f"m/1/{MANIFEST}") == f"m/1/{MANIFEST}".encode()


def put_text(uri, *names):
    for name in names:
        open_store(uri).write(uri.below(name).key, b"old")


def test_a_plain_directory_is_unfinished_until_it_is_whole(bucket, tmp_path):
    uri = bucket.below("page")
    made(tmp_path, "a", "b")
    write_manifest(tmp_path, "page")
    publish_plain(tmp_path, uri, check_publishable(uri, "page"))
    assert names(uri) == ["a", "b", MANIFEST]
    (tmp_path / "b").unlink()
    write_manifest(tmp_path, "page")
    version = check_publishable(uri, "page")
    (tmp_path / "a").rename(tmp_path / "elsewhere")  # fails in the middle
    with pytest.raises(FileNotFoundError):
        publish_plain(tmp_path, uri, version)
    with pytest.raises(ValueError, match=f"{uri}: is not complete"):
        find_published(uri)
    with pytest.raises(FileExistsError, match="another process"):
        publish_plain(tmp_path, uri, version)
    (tmp_path / "elsewhere").rename(tmp_path / "a")
    publish_plain(tmp_path, uri, check_publishable(uri, False))
    assert names(uri) == ["a", MANIFEST]
