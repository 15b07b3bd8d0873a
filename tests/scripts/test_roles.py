"""Roles of rows: which choose the best weights, and which report."""

import json
from pathlib import Path

import pytest
from small_dataset import MODEL, ROWS, RUN, write_dataset

from dlrm.scripts import dist_main, main
from dlrm.scripts.common import dlrm_flags

EXPECTED = Path(__file__).with_name("without_recipe.json")
COMMANDS = {"main": None, "dist_main": dist_main.DEFAULTS}


@pytest.fixture(scope="module")
def two_splits(tmp_path_factory):
    """Directory of a dataset without validation rows."""
    rows = {"train": ROWS["train"], "test": ROWS["test"]}
    return write_dataset(tmp_path_factory.mktemp("roles") / "dataset", rows)


def logged(path):
    """Returns what a run logged, except its flags, without values that depend on the clock."""
    lines = Path(path).read_text().splitlines()
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    return [
        {
            key: _without_clock(value) if key == "data" else value
            for key, value in entry.items()
            if key not in ("timestamp", "datetime", "elapsedtime")
        }
        for entry in entries
        if entry.get("step") != "PARAMETER"
    ]


def _without_clock(data):
    return {name: 0 if "throughput" in name or "time" in name else v for name, v in data.items()}


def without_recipe(command, data, folder):
    """Trains as a user does without a recipe; returns what the run logged."""
    flags = [f"--dataset={data}", "--base_device=cpu", "--epochs=2", "--noverdict", *MODEL, *RUN]
    flags += [f"--save_checkpoint_path={folder}", "--embedding_type=joint_fused"]
    main.run(dlrm_flags.parse(flags, flags=dlrm_flags.make_flags(COMMANDS[command])))
    return logged(folder / "log.json")


@pytest.mark.parametrize("splits", ["three", "two"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_without_a_recipe_is_the_one_before_roles_had_names(
    command, splits, request, tmp_path
):
    data = request.getfixturevalue("dataset" if splits == "three" else "two_splits")
    found = without_recipe(command, data, tmp_path)
    expected = json.loads(EXPECTED.read_text())[splits]
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for one, other in zip(found, expected, strict=True):
        data, known = one.pop("data", {}), other.pop("data", {})
        assert one == other
        assert list(data) == list(known)
        # The same machine finds the same bits; others round sums differently.
        assert data == pytest.approx(known, rel=1e-4)
