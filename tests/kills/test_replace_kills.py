"""A directory that is being replaced is whole at every instant, wherever its writer is killed."""

import shutil
import time

import pytest
from killing import Forks, kill_points, report
from replacing import replace

from dlrm.manifest import read_manifest

pytestmark = pytest.mark.long
SEED = 20261125


@pytest.fixture(scope="module")
def forks():
    with Forks("replacing") as started:
        yield started


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_at_any_call_leaves_the_old_or_the_new(forks, tmp_path, exchange):
    final, began, faults = tmp_path / "dataset", time.monotonic(), []

    def start():
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        forks.result(replace, final, "old")

    start()
    calls = forks.run(replace, final, "new", exchange, below=tmp_path).calls
    points = kill_points(calls, every=1, seed=SEED)
    for at, half in points:
        start()
        assert forks.run(replace, final, "new", exchange, below=tmp_path, at=at, half=half).killed
        # Without an exchange the next writer restores the old one.
        if exchange and (found := _texts(final)) not in ({"old"}, {"new"}):
            faults.append(((at, half), f"found {found}"))
        outcome = forks.run(replace, final, "next", exchange)
        left = [path.name for path in tmp_path.iterdir()]
        if outcome.error or _texts(final) != {"next"} or left != ["dataset"]:
            faults.append(((at, half), f"the next writer: {outcome.error}, left {left}"))
    report(f"replacing a directory, exchange {exchange}", len(points), faults, began)


def _texts(final):
    try:
        read_manifest(final, "dataset", check_crc=True)
    except (OSError, ValueError) as error:
        return str(error)
    return {(final / name).read_text() for name in ("one", "two")}
