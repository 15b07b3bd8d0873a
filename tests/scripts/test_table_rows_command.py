"""`dlrm.scripts.checkpoint grow` and `evict`, and training from what they write."""

import re
import shutil

import numpy as np
import pytest
import trained_model
from small_dataset import TABLE_SIZES, write_dataset

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.transform.transform import Transform
from dlrm.scripts.checkpoint.comparison import compare
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.directory import find_checkpoint, last_checkpoint

LARGER = (60, 200, 3, 140)


@pytest.fixture
def tool(checkpoint_tool):
    """Runs the command in this process; returns its exit code and what it printed."""

    def run(*words):
        done = checkpoint_tool(*words)
        return done.returncode, done.stdout + done.stderr

    return run


def differing(one, other):
    """Weights and state that differ in the last checkpoints of two runs."""
    return compare(last_checkpoint(one), last_checkpoint(other))["weights"]


def test_a_training_goes_on_with_grown_tables_and_resumes_exactly(tool, command, tmp_path):
    further = write_dataset(tmp_path / "further", table_sizes=LARGER, seed=5)
    command("--max_steps=6", "--save_checkpoint_path=old")
    code, said = tool("grow", f"--dataset={further}", "--output=grown", "old")
    assert (code, said.startswith("grown: 20 rows appended")) == (0, True)
    going_on = ["--load_checkpoint_path=grown", "--load_optimizer_state", "--print_freq=100"]
    command("--max_steps=8", "--save_checkpoint_path=whole", *going_on, data=further)
    going_on.append("--save_checkpoint_path=parts")
    command("--max_steps=5", *going_on, data=further)
    command("--max_steps=8", "--resume", *going_on, data=further)
    assert differing("whole", "parts") == {}
    for flag, directory in (("--load_optimizer_state", "fresh"), ("--noload_optimizer_state", "x")):
        shutil.rmtree(directory, ignore_errors=True)
        begun = ["--max_steps=1", f"--save_checkpoint_path={directory}", flag]
        command(*begun, "--load_checkpoint_path=grown", data=further)
    assert differing("fresh", "x")  # Adam's first step depends on its moments


def copy_with_dictionaries(dataset, directory, change):
    """Copies a dataset with other dictionaries, and tables of their sizes."""
    shutil.copytree(dataset, directory)
    own = Transform.load(directory / layout.TRANSFORM)
    dictionaries = [change(i, one.keys.copy()) for i, one in enumerate(own.dictionaries)]
    shutil.rmtree(directory / layout.TRANSFORM)
    other = Transform.from_logs(own.num_numerical, dictionaries)
    other.save(directory / layout.TRANSFORM)
    spec = FeatureSpec.default(directory, own.num_numerical, other.cardinalities, ["train", "test"])
    spec.save()
    layout.write_dataset_manifest(directory, trained_model.ROWS, other.cardinalities, {})
    return directory


def test_grow_takes_a_dataset_whose_dictionaries_go_on_and_refuses_others(
    tool, command, trained, tmp_path
):
    further = np.arange(1, 6, dtype=np.uint32)
    added = copy_with_dictionaries(
        trained.dataset, tmp_path / "added", lambda i, d: np.append(d, further[: min(2 * i, 5)])
    )
    inserted = copy_with_dictionaries(
        trained.dataset,
        tmp_path / "inserted",
        lambda i, d: np.insert(d, i, further[: min(2 * i, 5)]),
    )
    checkpoint = find_checkpoint(trained.checkpoint)
    code, said = tool("grow", f"--dataset={inserted}", "--output=refused", checkpoint)
    assert code == 2
    named = (
        r"expected the transform of .*: categorical 1: id 2 is \w{8} for the model and 00000001 h"
    )
    assert re.search(f"{inserted}: {named}", said)
    assert not (tmp_path / "refused").exists()
    code, said = tool("grow", f"--dataset={added}", "--output=grown", checkpoint)
    assert (code, said.startswith("grown: 11 rows appended")) == (0, True), said
    sizes = Transform.load("grown/transform").cardinalities
    assert sizes == Transform.load(added / "transform").cardinalities
    for path in (added / "transform").iterdir():
        assert path.samefile(f"grown/transform/{path.name}")
    tested = command("--mode=test", "--load_checkpoint_path=grown", data=added, model=[])
    assert tested["auc"] > 0.7  # without --allow_other_transform, since the ids are the same
    going_on = [f"--continue_from={checkpoint}", "--save_checkpoint_path=run"]
    with pytest.raises(ValueError, match=f"{inserted}: {named}"):
        command(*going_on, data=inserted, model=[], training=[])
    command(*going_on, data=added, model=[], training=[])
    assert [table["rows"] for table in read_config(last_checkpoint("run"))["tables"]] == sizes
    assert Transform.load(last_checkpoint("run") / "transform").cardinalities == sizes


def test_a_run_with_evicted_rows_resumes_exactly(tool, command, tmp_path):
    command("--max_steps=6", "--save_checkpoint_path=old")
    (tmp_path / "rows.csv").write_text("table,row\n1,7\n3,0\n1,9\n", encoding="utf-8")
    name = last_checkpoint("old").name
    for run in ("whole", "parts"):
        code, said = tool("evict", "--rows=rows.csv", f"--output={run}/{name}", "old")
        assert (code, "3 rows of the tables" in said) == (0, True)
    command("--max_steps=9", "--resume", "--save_checkpoint_path=whole")
    for steps in (7, 9):
        command(f"--max_steps={steps}", "--resume", "--save_checkpoint_path=parts")
    assert differing("whole", "parts") == {}


@pytest.mark.parametrize(
    ("words", "text", "error"),
    [
        (["grow", "--output=x"], "", "grow: expected --dataset DIR or --table_sizes, and --output"),
        (["grow", "--table_sizes=a", "--output=x"], "", "--table_sizes a: expected integers"),
        (["grow", "--table_sizes=60,200", "--output=x"], "", "the rows of 4 tables, got 2"),
        (["evict", "--output=x"], "", "evict: expected --rows FILE and --output DIR"),
        (["evict", "--rows=rows.csv", "--output=x"], "row\n1", "line 1: expected table,row, got"),
        (["evict", "--rows=rows.csv", "--output=x"], "table,row\n1\n", "line 2: expected table"),
        (["evict", "--rows=rows.csv", "--output=x"], "table,row\n0,-1\n", "line 2: .*number"),
        (["evict", "--rows=rows.csv", "--output=x"], "table,row\n0,50\n", "from 0 to 49, got 50"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tool, command, tmp_path, words, text, error):
    assert len(TABLE_SIZES) == 4
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    command("--max_steps=1", "--save_checkpoint_path=old")
    code, said = tool(*words, "old")
    assert code == 2
    assert re.search(error, said)
    assert not (tmp_path / "x").exists()
