"""The curve of a run: up to 51 points that average the losses, whatever is printed."""

import pytest
import torch
from toy import Line, Points, trainer

from dlrm.pages.pictures import write_picture
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.log import RunLog
from dlrm.train.progress import Progress
from dlrm.train.reports.curves import draw_curves


def trained(losses, print_freq, checkpoints=None, **config):
    """Trains with the given losses; returns the progress."""
    task, given = Line(), iter(losses)
    task.loss = lambda batch: 0 * next(task.model.parameters()).sum() + next(given)
    data = Points(len(losses))
    run = trainer(task, RunLog(quiet=True), checkpoints, print_freq=print_freq, **config)
    run.fit(data, Points(0))
    return run.progress


@pytest.mark.parametrize("steps", [1, 7, 50, 333])
@pytest.mark.parametrize("print_freq", [1, 10, 5000])
def test_points_are_means_of_the_steps_between_them(steps, print_freq, tmp_path):
    losses = torch.rand(steps, generator=torch.Generator().manual_seed(0)).tolist()
    checkpoints = CheckpointDirectory(tmp_path / "run")
    progress = trained(losses, print_freq, checkpoints, checkpoint_freq=max(steps // 3, 1))
    places = [int(point["step"]) for point in progress.curve]
    assert places[-1] == steps
    assert min(steps, 25) <= len(places) <= 51
    for begin, end, point in zip([0, *places], places, progress.curve, strict=False):
        assert point["loss"] == pytest.approx(sum(losses[begin:end]) / (end - begin), rel=1e-5)


def test_a_curve_changes_no_printed_line():
    losses = torch.rand(300, generator=torch.Generator().manual_seed(1)).tolist()
    printed = [entry["loss"] for entry in trained(losses, 100).history]
    expected = [sum(losses[:101]) / 101, sum(losses[101:201]) / 100, sum(losses[201:]) / 99]
    assert printed == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 200])
def test_every_run_has_a_picture(steps, tmp_path, curves):
    progress = trained([0.5] * steps, 1000)
    progress.best = {"step": steps, "score": 0.7, "error": 0.4}
    progress.history.append(progress.best)
    path = tmp_path / "curves.png"
    assert draw_curves(progress, Line(), path, lambda step: step / 10, "run, data") is None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "no step" in draw_curves(Progress(), Line(), tmp_path / "none.png", float)


@pytest.mark.usefixtures("curves")
def test_rates_are_asked_of_the_steps_of_a_run_that_continues_another(tmp_path):
    asked = []
    curve = [{"step": step, "loss": 0.5} for step in range(101, 111)]
    progress = Progress(step=110, first_step=100, curve=curve)
    path = tmp_path / "curves.png"
    assert draw_curves(progress, Line(), path, lambda step: asked.append(step) or 0.1) is None
    assert asked == [*range(101, 111)]


@pytest.mark.usefixtures("curves")
def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    nowhere, path = tmp_path / "missing" / "a.png", tmp_path / "a.png"
    assert str(nowhere) in write_picture(nowhere, lambda figure: figure.subplots())
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError):
        write_picture(path, lambda figure: 1 / 0)
    assert [(one, one.read_bytes()) for one in tmp_path.iterdir()] == [(path, b"before")]
    assert write_picture(path, lambda figure: figure.subplots()) is None
    assert path.read_bytes().startswith(b"\x89PNG")
