"""Commands that read and write by URI."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm.files import MANIFEST
from dlrm.manifest import write_manifest
from dlrm.remote.localize import localize
from dlrm.remote.objects import find_entries, open_store
from dlrm.remote.publish import Addition, Output, check_publishable, find_published, publish
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
    return open_store(uri).content(uri.below(name).key)


@pytest.fixture
def dlrm(capsys):
    """Returns a function that runs a command, and returns what it printed."""

    def ended(name, *words, code=0):
        assert run(COMMANDS[name], list(map(str, words))) == code, capsys.readouterr()
        said = capsys.readouterr()
        text = said.err if code else said.out
        assert "remote/views" not in text
        assert "remote/outputs" not in text
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
    assert f"error: {bucket}other: has objects, such as a.txt, but no manifest" in told


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
        (one.path / f"m/1/{MANIFEST}").write_text(one.path.name)
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


def test_a_plain_directory_is_damaged_until_it_is_whole(bucket, tmp_path):
    uri = bucket.below("page")
    made(tmp_path / "page", "a", "b", "c")
    write_manifest(tmp_path / "page", "page")
    publish(tmp_path / "page", uri, None, plain=True)
    assert names(uri) == ["a", "b", "c", MANIFEST]
    open_store(uri).write(uri.below("a").key, b"of a new version")
    with pytest.raises(ValueError, match=f"{uri}/a: expected 1 bytes, got 16"):
        find_published(uri)
    (tmp_path / "page/b").unlink()
    write_manifest(tmp_path / "page", "page")
    version = check_publishable(uri, "page")[""]
    publish(tmp_path / "page", uri, version, plain=True)
    assert find_published(uri).manifest["kind"] == "page"
    assert names(uri) == ["a", "c", MANIFEST]
    write_manifest(tmp_path / "page", "page", note="of another")
    with pytest.raises(FileExistsError, match="another process"):
        publish(tmp_path / "page", uri, version, plain=True)


def files(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_folder_of_datasets_is_replaced_one_by_one(bucket, tmp_path):
    uri, path = bucket.below("out"), tmp_path / "out"
    made(path, "binary/a", "note")
    write_manifest(path / "binary", "dataset")
    saved = shutil.copytree(path, tmp_path / "saved")
    output = Output(uri, path, False)
    shutil.copytree(saved, path, dirs_exist_ok=True)
    output.publish()
    assert find_published(uri.below("binary")) is not None
    open_store(uri).remove(uri.below("note").key)
    with pytest.raises(FileExistsError, match=f"{uri}/binary: exists .*--overwrite replaces it"):
        Output(uri, path, False)
    output = Output(uri, path, True)
    assert [file.name for file in path.iterdir()] == ["note"]  # what was complete is gone
    shutil.copytree(saved, path, dirs_exist_ok=True)
    (path / "binary/a").write_text("new")
    write_manifest(path / "binary", "dataset")
    output.publish()
    assert len([name for name in names(uri) if name.endswith("/a")]) == 1
    put_text(uri, "other")
    with pytest.raises(FileExistsError, match=f"{uri}: has objects, such as (note|other), but no"):
        Output(uri, path, True)


def test_what_is_wrong_is_named_before_any_work(dlrm, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "a.csv")
    data = put(tmp_path / "a.csv", bucket.below("a.csv"))
    words = ["schema", "--label=y", "--output=schema.yaml"]
    for uri, message in (
        (bucket.below("b.csv"), f"{bucket}b.csv: no such object, and none below it"),
        (bucket.below("*.gz"), rf"{bucket}\*.gz: no object of this pattern among 1"),
        ("s3://no-such-bucket-here/a.csv", "s3://no-such-bucket-here/: no such bucket"),
        ("dbfs://a/b", "--input dbfs://a/b: expected a URI of s3://.* or a path, got dbfs://"),
        ("s3://me:secret@b/a", r"--input s3://\.\.\.@b/a: expected no user or password"),
    ):
        assert re.match(f"error: {message}", dlrm(*words, f"--input={uri}", code=1))
    told = dlrm(*words, f"--input={data}", "--cache_gib=1e-9", code=1)
    assert re.match(rf"error: {data}: needs 5 bytes in .* and 1 may be used \(--cache", told)
    told = dlrm(
        "predict", f"--checkpoint={data}", "--input=a.csv", f"--output={bucket}x.npy", code=1
    )
    assert told.startswith(f"error: {data}: ")
    assert not (tmp_path / "schema.yaml").exists()


BY_URI = (  # command, words of which {} is the place of the files, and what it writes
    ("convert", "--dataset={}/data --values=ids --output={}/parquet", "parquet"),
    ("checkpoint", "inspect {}/run", ""),
    ("checkpoint", "convert {}/STEP --to=nvidia --output={}/nvidia", "nvidia"),
    ("transcode", "--input={}/csv --output={}/t", "t"),
    (
        "synthetic",
        "--synthetic_dataset_num_entries=64 --synthetic_dataset_table_sizes=9 "
        "--synthetic_dataset_dir={}/random",
        "random",
    ),
    ("simulate", "--rows=400 --days=2 --output={}/raw", "raw"),
    ("prepare-logs", "--engine=local --input_folder={}/raw --output_folder={}/logs", "logs"),
    (
        "prepare-logs",
        "--engine=local --input_folder={}/raw --output_folder={}/rows --output_format=binary",
        "rows",
    ),
    ("split-dataset", "--dataset={}/rows/binary_dataset --output={}/split", "split"),
)
CSV_SPEC = """
feature_spec: {y: {}, a: {}, c: {cardinality: auto}}
channel_spec: {label: [y], numerical: [a], categorical: [c]}
source_spec:
  train: &chunks [{type: csv, features: [y, a, c], files: [t.csv]}]
  test: *chunks
"""
VARYING = {MANIFEST, "report.json", "report.html"}  # have times or places


@pytest.mark.slow
def test_each_command_does_by_uri_what_it_does_with_files(dlrm, trained, tmp_path, bucket):
    here, there = tmp_path / "here", bucket.below("there")
    shutil.copytree(trained.dataset, here / "data")
    shutil.copytree(trained.checkpoint, here / "run")
    (step,) = (here / "run").glob("step-*")
    (here / "csv").mkdir()
    (here / "csv/t.csv").write_text("".join(f"{i % 2},{i},{i % 3}\n" for i in range(60)))
    (here / "csv/feature_spec.yaml").write_text(CSV_SPEC)
    put(here, there)
    for name, line, output in BY_URI:
        words = line.replace("STEP", f"run/{step.name}").split()
        for place in (here, there):
            dlrm(name, *(word.replace("{}", str(place)) for word in words))
        if (here / output).is_file():
            assert content(there, output) == (here / output).read_bytes()
        elif output:
            copy = localize(there.below(output))
            found = files(Path(copy))
            expected = files(here / output)
            assert found.keys() == expected.keys()
            assert all(
                found[name] == expected[name]
                for name in found
                if name.rpartition("/")[2] not in VARYING
            ), name
