"""Averages of weights against explicit sums."""

import pytest
import torch
from torch import nn
from toy import Line, Points, trainer

from dlrm.distributed import World
from dlrm.tasks.networks.flags import NetworkRunConfig
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import TrainConfig
from dlrm.train.ema import EMA, average_in_order
from dlrm.train.trainer import Trainer


def averaged(
    decay=0.9, checkpoints=None, device="cpu", after_step=lambda step: None, **config
) -> Trainer:
    task = Line(device=device)
    base = trainer(task, schedule=lambda step: 0.05)
    return Trainer(
        task,
        optimizers=base.optimizers,
        schedule=base.schedule,
        config=TrainConfig(**config),
        world=World(device=device),
        checkpoints=checkpoints,
        run={"flags": {}},
        ema=EMA(task.model, decay),
        after_step=after_step,
    )


def test_the_moving_average_by_hand(device):
    def follow(step):
        for name, value in run.task.model.state_dict().items():
            expected[name] = 0.75 * expected[name] + 0.25 * value

    run = averaged(decay=0.75, device=device, after_step=follow, max_steps=3)
    expected = {name: value.clone() for name, value in run.task.model.state_dict().items()}
    run.fit(Points(device=device), Points(2, device=device))
    torch.testing.assert_close(run.ema.state, expected)


def test_the_average_is_tested_and_the_weights_go_on():
    run = averaged(decay=0.99)
    seen = []
    evaluate = run.task.evaluate

    def watching(loader):
        seen.append(run.task.weights())
        return evaluate(loader)

    run.task.evaluate = watching
    run.fit(Points(), Points(2))
    assert all(map(torch.equal, seen[0], run.ema.state.values()))
    plain = trainer(schedule=lambda step: 0.05)
    plain.fit(Points(), Points(2))
    assert all(map(torch.equal, run.task.weights(), plain.task.weights()))


def test_buffers_are_averaged_and_counters_copied(device):
    model = nn.BatchNorm1d(2, device=device)
    ema = EMA(model, 0.5)
    model(torch.tensor([[2.0, 4.0], [4.0, 8.0]], device=device))  # running mean: 0.1 * (3, 6)
    ema.update()
    torch.testing.assert_close(ema.state["running_mean"].cpu(), torch.tensor([0.15, 0.3]))
    assert ema.state["num_batches_tracked"] == 1


def test_checkpoints_are_averaged_in_order():
    series = [{"w": torch.tensor([x]), "n": torch.tensor(i)} for i, x in enumerate((1.0, 2.0, 4.0))]
    average = average_in_order(series, 0.5)
    assert (average["w"].item(), average["n"].item()) == (0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 4, 2)
    assert series[0]["w"].item() == 1.0


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_impossible_decays_are_refused(decay):
    for name in ("ema_decay", "weight_avg_exp"):
        with pytest.raises(ValueError, match=f"--{name}"):
            NetworkRunConfig(**{name: decay})


def test_no_checkpoints_make_no_average():
    with pytest.raises(ValueError, match="got none"):
        average_in_order([], 0.9)


def test_a_new_average_begins_at_the_weights_that_are_loaded(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "run")
    trainer(checkpoints=checkpoints).fit(Points(), Points(2))
    run = averaged()
    Checkpoint(checkpoints.last()).load(run.parameters)
    torch.testing.assert_close(run.ema.state, dict(run.task.model.state_dict()))
