"""`dlrm daily` is killed at each call that changes files; the next run ends as without the kill."""

import shutil
import time

import daily_steps
import pytest
from killing import Forks, contents, difference, kill_points, report

pytestmark = pytest.mark.slow
SEED = 20261129


def test_a_kill_at_any_call_loses_and_doubles_no_day(tmp_path):
    faults, began, chain = [], time.monotonic(), tmp_path / "chain"
    (tmp_path / "logs").mkdir()
    for day in (9, 10, 11):
        (tmp_path / f"logs/day_{day}.csv").write_text("rows")
    with Forks("daily_steps") as forks:
        outcome = forks.run(daily_steps.daily, tmp_path, "--keep=2", below=chain)
        assert outcome.value == 0, outcome.error
        expected = _kept(chain)
        points = kill_points(outcome.calls, every=1, seed=SEED)
        for at, half in points:
            shutil.rmtree(chain)
            run = forks.run(daily_steps.daily, tmp_path, "--keep=2", below=chain, at=at, half=half)
            assert run.killed
            outcome = forks.run(daily_steps.daily, tmp_path, "--keep=2")
            if outcome.value != 0 or (differing := difference(_kept(chain), expected)):
                faults.append(((at, half), outcome.error or f"other files: {differing}"))
    report("days", len(points), faults, began)


def _kept(chain):
    """Returns the files of a chain, except the log of its runs."""
    return {name: own for name, own in contents(chain).items() if name != "daily.log"}
