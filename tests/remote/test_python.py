"""Python functions that take URIs."""

import gc
import os

import numpy as np
import pyarrow as pa
import pytest

import dlrm
from dlrm.files import MANIFEST
from dlrm.locks import remove_unused
from dlrm.remote.objects import find_entries, open_store
from dlrm.remote.publish import publish
from dlrm.train.checkpoints.checkpoint import Checkpoint

RANDOM = np.random.default_rng(0)
TABLE = pa.table(
    {
        "label": RANDOM.integers(0, 2, 400),
        "age": RANDOM.normal(size=400),
        "user": [f"u{i}" for i in RANDOM.integers(0, 9, 400)],
    }
)
SCHEMA = {"label": {"column": "label"}, "numerical": ["age"], "categorical": ["user"]}
SMALL = {"embedding_dim": 4, "bottom_mlp_sizes": [4], "top_mlp_sizes": [4, 1], "max_steps": 2}


def names(uri):
    return [entry.key.removeprefix(uri.folder) for entry in find_entries(uri)]


def test_a_schema_is_written_and_read(bucket):
    uri = str(bucket.below("schema.yaml"))
    schema = dlrm.Schema.from_dict(SCHEMA)
    schema.save(uri)
    assert dlrm.Schema.load(uri) == schema
    with pytest.raises(FileNotFoundError, match=f"^{bucket}other.yaml: no such object"):
        dlrm.Schema.load(str(bucket.below("other.yaml")))
    open_store(bucket).write("bad.yaml", b"label: 3")
    with pytest.raises(ValueError, match=f"^{bucket}bad.yaml: "):
        dlrm.Schema.load(str(bucket.below("bad.yaml")))


def test_a_dataset_is_published_and_opened(bucket, tmp_path):
    uri = str(bucket.below("data"))
    made = dlrm.Dataset.from_arrow(TABLE, SCHEMA, uri)
    opened = dlrm.Dataset(uri)
    assert made.rows == opened.rows
    assert made.origin == opened.origin == uri
    assert repr(made) == repr(opened)
    local = dlrm.Dataset.from_arrow(TABLE, SCHEMA, tmp_path / "local")
    manifest = (local.path / MANIFEST).read_bytes()
    assert (opened.path / MANIFEST).read_bytes().startswith(manifest[:200])
    with pytest.raises(FileExistsError, match=f"{uri}: exists .*overwrite"):
        dlrm.Dataset.from_arrow(TABLE, SCHEMA, uri)
    dlrm.Dataset.from_arrow(TABLE.slice(100), SCHEMA, uri, overwrite=True)
    assert sum(dlrm.Dataset(uri).rows.values()) == 300
    assert sum(opened.rows.values()) == 400  # and its files, although they were replaced
    assert (opened.path / "train" / "label.bin").stat().st_size == opened.rows["train"]


def test_copies_stay_as_long_as_the_object(bucket):
    uri = str(bucket.below("data"))
    dlrm.Dataset.from_arrow(TABLE, SCHEMA, uri)
    opened = dlrm.Dataset(uri)
    view = next(path for path in opened.path.parents if path.parent.name == "views")
    assert not remove_unused(view)
    del opened
    gc.collect()
    assert remove_unused(view)


@pytest.mark.slow
def test_a_model_lives_at_uris(bucket):
    data, run, saved = (str(bucket.below(name)) for name in ("data", "run", "saved"))
    schema = str(bucket.below("schema.yaml"))
    dlrm.Schema.from_dict(SCHEMA).save(schema)
    trained = dlrm.fit(TABLE, schema=schema, save_checkpoint_path=run, **SMALL)
    assert repr(trained).startswith(f"Predictor('{run}/step-")
    assert "best.json" in names(bucket.below("run"))
    with pytest.raises(FileExistsError, match=f"{run}/step-.*: of an earlier run; name another"):
        dlrm.fit(TABLE, schema=schema, save_checkpoint_path=run, **SMALL)
    loaded = dlrm.load(run)
    rows = TABLE.drop_columns("label")
    assert np.array_equal(loaded.predict(rows), trained.predict(rows))
    loaded.save(saved)
    assert np.array_equal(dlrm.load(saved).predict(rows), trained.predict(rows))
    with pytest.raises(FileExistsError, match=f"{saved}: exists"):
        loaded.save(saved)
    loaded.save(saved, overwrite=True)
    dlrm.Dataset.from_arrow(TABLE, SCHEMA, data)
    assert loaded.evaluate(data) == loaded.evaluate(dlrm.Dataset(data))
    again = dlrm.fit(data, **SMALL)
    assert Checkpoint(again.path).config["flags"]["dataset"] == data


def test_a_teacher_is_read_by_its_uri(bucket):
    data = dlrm.Dataset.from_arrow(TABLE, SCHEMA)
    run = str(bucket.below("run"))
    dlrm.fit(data, save_checkpoint_path=run, **SMALL)
    student = dlrm.fit(data, distill=run, **SMALL)
    assert Checkpoint(student.path).config["flags"]["distill"] == run
    alone = dlrm.fit(data, **SMALL)
    assert not np.array_equal(student.predict(TABLE), alone.predict(TABLE))
    nowhere = str(bucket.below("nowhere"))
    with pytest.raises(FileNotFoundError, match=f"^{nowhere}"):
        dlrm.fit(data, distill=nowhere, **SMALL)


def forked_child(act):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_scores_and_loads(bucket, trained):
    uri = bucket.below("model")
    (step,) = trained.checkpoint.glob("step-*")
    publish(step, uri, None)
    model = dlrm.load(str(uri))
    expected = model.predict(trained.rows[:9])

    def act():
        same = np.array_equal(model.predict(trained.rows[:9]), expected)
        again = dlrm.load(str(uri)).predict(trained.rows[:9])
        return same and np.array_equal(again, expected)

    assert forked_child(act) == 0
