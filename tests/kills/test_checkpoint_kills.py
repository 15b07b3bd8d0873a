"""A training run killed anywhere loses nothing: its files are complete, and it can be resumed."""

import random
import shutil
import time

import pytest
import training
from killing import Call, Forks, contents, kill_points, report

pytestmark = pytest.mark.long
SEED = 20261122
_SYNC, _BACKGROUND = (1, False), (2, True)  # number kept, in background


@pytest.fixture(scope="module")
def forks():
    with Forks("training") as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with notes that checkpoints attach."""
    path = tmp_path_factory.mktemp("runs")
    (path / "notes").mkdir()
    (path / "notes" / "note.txt").write_text("kept in each")
    return path


class Campaign:
    """Kills a run of one or several processes and checks the files.

    Args:
        forks: run all calls.
        folder: holds the runs.
        kind: number of checkpoints kept, and whether to write in the background.
        size: number of processes.
        victim: the rank that is killed.
    """

    def __init__(self, forks, folder, kind, size=1, victim=0):
        self.forks, self.folder, self.kind, self.size = forks, folder, kind, size
        self.victim, self.faults = victim, []
        self.every_step, final = folder / f"every-step-by-{size}", folder / "final"
        if not self.every_step.exists():
            self._succeed(self.train(self.every_step, (100, False)))
        assert self._steps(self.every_step) == training.SAVED
        self.calls = self._succeed(self.train(final, kind)).calls
        assert self._steps(final) == ((8, 12) if kind[0] == 1 else (8, 9, 12))
        self.whole = contents(final)
        shutil.rmtree(final)

    def train(self, run, kind, at=0, half=False):
        """Returns the outcomes of the ranks, which train to the end or are killed."""
        store = (self.folder / f"store-{time.monotonic_ns()}").as_uri()
        calls = []
        for rank in range(self.size):
            arguments = (run, *kind, rank, self.size, store)
            armed = (at, half) if rank == self.victim else ()
            calls.append(Call(training.train, arguments, run, *armed))
        return self.forks.together(calls)

    def kill(self, *points):
        """Kills a run at each point in turn, resuming in between; then lets it finish."""
        run = self.folder / "killed"
        for at, half in points:
            outcome = self.train(run, self.kind, at, half)[self.victim]
            # Background calls have no fixed order or number, so a kill may not happen.
            assert outcome.killed or not outcome.error, outcome.error
            self._check(points, training.check_left, run, self.every_step)
        if self.size == 1:
            arguments = (run, self.every_step, self.whole, *self.kind)
            self._check(points, training.resume_and_check, *arguments)
        else:
            for outcome in self.train(run, self.kind):
                self._note(points, outcome.error)
            self._check(points, training.check_end, run, self.every_step, self.whole)
        shutil.rmtree(run, ignore_errors=True)

    def _check(self, points, function, run, *arguments):
        self._note(points, self.forks.run(function, run, *arguments, below=run).error)

    def _note(self, points, error):
        if error and (not self.faults or self.faults[-1][0] != points):  # only the first of each
            self.faults.append((points, error.strip().splitlines()[-1]))

    def _succeed(self, outcomes):
        for outcome in outcomes:
            assert not outcome.error, outcome.error
        return outcomes[self.victim]

    def _steps(self, run):
        return tuple(sorted(int(path.name[5:]) for path in run.glob("step-*")))


def run_campaign(campaign, every):
    began = time.monotonic()
    points = kill_points(campaign.calls, every, SEED)
    for point in points:
        campaign.kill(point)
    of = f"{campaign.kind}, rank {campaign.victim} of {campaign.size}"
    report(of, len(points), campaign.faults, began)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every"), [(_SYNC, 1), (_BACKGROUND, 1), ((2, False), 10), ((1, True), 10)], ids=str
)
def test_no_kill_costs_anything(forks, folder, kind, every):
    run_campaign(Campaign(forks, folder, kind), every)


@pytest.mark.slow
def test_a_kill_of_what_was_killed_costs_nothing(forks, folder):
    campaign, began, choose = Campaign(forks, folder, _SYNC), time.monotonic(), random.Random(SEED)
    points = kill_points(campaign.calls, 1, SEED)
    for _ in range(40):
        first, second = choose.choice(points), choose.choice(points[: len(points) // 2])
        campaign.kill(first, second)
    report("two kills", 80, campaign.faults, began)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "every"), [(0, 16), (1, 4)], ids=str)
@pytest.mark.parametrize("kind", [_SYNC, _BACKGROUND], ids=str)
def test_a_killed_rank_costs_nothing(forks, folder, kind, victim, every):
    run_campaign(Campaign(forks, folder, kind, 2, victim), every)


@pytest.mark.parametrize("reads", [70, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_model_is_read_while_its_training_prunes(forks, folder, reads):
    run, end = folder / "read", folder / "end"
    calls = [
        Call(training.train_until, (run, end), run),
        Call(training.read_again_and_again, (run, reads, end)),
    ]
    trainer, reader = forks.together(calls)
    assert not trainer.error, trainer.error
    assert not reader.error, reader.error
    print(f"{reads} reads beside {trainer.value} steps: {len(reader.value)} errors {reader.value}")
    assert not reader.value
    assert trainer.value > 10
