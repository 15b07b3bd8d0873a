"""Commands that write models leave what there was or what they made, wherever they are killed.

The next run has the process id of the killed one, removes what it left, and succeeds.
"""

import random
import shutil
import time

import pytest
from killing import Forks, contents, report

from dlrm.manifest import read_manifest

pytestmark = pytest.mark.slow

SEED, KILLS = 20261125, 20


@pytest.fixture(scope="module")
def forks():
    with Forks("writing") as started:
        yield started


def whole(directory, kind):
    """Checks every file of a directory."""
    read_manifest(directory, kind, check_crc=True)


def models_are_whole(folder):
    if (folder / "made").exists():
        whole(folder / "made", "checkpoint")


def versions_are_whole(folder):
    for version in (folder / "repository/model").glob("[0-9]*"):
        whole(version, "served model")


@pytest.mark.parametrize(
    ("name", "check", "names"),
    [
        ("recalibrate", models_are_whole, {"made"}),
        ("save", models_are_whole, {"made"}),
        ("update", versions_are_whole, {"repository"}),
    ],
)
def test_twenty_kills_leave_whole_models(forks, trained, tmp_path, name, check, names):
    import writing

    function, began, faults = getattr(writing, name), time.monotonic(), []
    before, folder = tmp_path / "before", tmp_path / "run"
    before.mkdir()
    if name != "recalibrate":
        forks.result(function, trained.checkpoint, before)
    shutil.copytree(before, folder)
    outcome = forks.run(function, trained.checkpoint, folder, below=folder)
    assert not outcome.error, outcome.error
    for at in _points(outcome.calls):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        assert forks.run(function, trained.checkpoint, folder, below=folder, at=at).killed
        try:
            check(folder)
            if name == "save":
                assert (folder / "made").exists(), "the old model is gone"
            forks.result(function, trained.checkpoint, folder)
            check(folder)
            assert {path.name for path in folder.iterdir()} == names
            assert not list(folder.rglob(".*.partial-*"))
        except (AssertionError, OSError, ValueError) as error:
            faults.append((at, str(error)))
    report(name, KILLS, faults, began)


def test_twenty_kills_of_a_search_change_no_result(forks, trained, tmp_path):
    import writing

    dataset, began, faults, folder = trained.dataset, time.monotonic(), [], tmp_path / "run"
    folder.mkdir()
    outcome = forks.run(writing.search, dataset, folder, below=folder)
    assert not outcome.error, outcome.error
    expected = _results(folder)
    for at in _points(outcome.calls):
        shutil.rmtree(folder)
        folder.mkdir()
        assert forks.run(writing.search, dataset, folder, below=folder, at=at).killed
        rerun = forks.run(writing.search, dataset, folder)
        if rerun.error or _results(folder) != expected:
            faults.append((at, rerun.error or "other results"))
    report("tune", KILLS, faults, began)


def _points(calls):
    """Returns and prints the numbers of the calls to kill at."""
    points = sorted(random.Random(SEED).sample(range(1, len(calls) + 1), KILLS))
    print(f"{len(calls)} calls, killed at {points}, seed {SEED}")
    return points


def _results(folder):
    names = ("tuning.txt", "best.flags")
    return {name: content for name, content in contents(folder / "made").items() if name in names}
