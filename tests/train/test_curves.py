"""The curve of a run: up to 51 points that average the losses, whatever is printed."""

import pytest
import torch

from dlrm.pages.pictures import write_picture
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog
from dlrm.train.progress import LossWindow, Progress, StepReport
from dlrm.train.reports.curves import draw_curves


class Clock:
    def lap(self, step):
        return 0.0

    def seconds(self):
        return 0.0


def trained(steps, print_freq, losses, save_at=()):
    """Runs steps with the given losses; returns the progress and the printed points."""
    from dlrm.distributed import World
    from dlrm.train.precision import LossScaler

    progress, lines = Progress(), []
    window = LossWindow(progress, World(), None)
    log = RunLog(quiet=True)
    log.console.point = lines.append
    config = TrainConfig(max_steps=steps, print_freq=print_freq)
    report = StepReport(
        window,
        Clock(),
        config=config,
        schedule=lambda step: 0.1,
        scaler=LossScaler(),
        log=log,
        steps_per_epoch=steps,
    )
    report._throughput = type("None", (), {"count": lambda self, samples: None})()
    for step, loss in enumerate(losses, 1):
        progress.step = step
        report.step(torch.tensor(loss), 1)
        if step in save_at:
            window.save()
    return progress, lines


@pytest.mark.parametrize("steps", [1, 7, 50, 333, 1000])
@pytest.mark.parametrize("print_freq", [1, 10, 5000])
def test_points_are_means_of_the_steps_between_them(steps, print_freq):
    losses = torch.rand(steps, generator=torch.Generator().manual_seed(0)).tolist()
    progress, _ = trained(steps, print_freq, losses, save_at=(3, 20, 21))
    places = [int(point["step"]) for point in progress.curve]
    assert places[-1] == steps
    assert min(steps, 25) <= len(places) <= 51
    for begin, end, point in zip([0, *places], places, progress.curve, strict=False):
        assert point["loss"] == pytest.approx(sum(losses[begin:end]) / (end - begin), rel=1e-5)


def test_a_curve_changes_no_printed_line():
    losses = torch.rand(300, generator=torch.Generator().manual_seed(1)).tolist()
    progress, lines = trained(300, 100, losses)
    printed = [entry["loss"] for entry in progress.history]
    expected = [sum(losses[:101]) / 101, sum(losses[101:201]) / 100, sum(losses[201:]) / 99]
    assert len(lines) == 3
    assert printed == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 200])
def test_every_run_has_a_picture(steps, tmp_path, curves):
    progress, _ = trained(steps, 1000, [0.5] * steps)
    history = [*progress.history, {"step": steps, "auc": 0.7, "log_loss": 0.4}]
    drawn = draw_curves(
        progress.curve,
        history,
        "auc",
        "log_loss",
        tmp_path / "curves.png",
        title="run, data",
        schedule=lambda step: min(step / 10, 1.0),
        best_step=steps,
    )
    assert drawn is None
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "no step" in draw_curves([], [], "auc", "log_loss", tmp_path / "none.png")


@pytest.mark.usefixtures("curves")
def test_rates_are_asked_of_the_steps_of_a_run_that_continues_another(tmp_path):
    asked = []
    problem = draw_curves(
        [{"step": step, "loss": 0.5} for step in range(101, 111)],
        [],
        "auc",
        "log_loss",
        tmp_path / "curves.png",
        schedule=lambda step: asked.append(step) or 0.1,
        first_step=100,
    )
    assert problem is None
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
