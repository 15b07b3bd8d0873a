"""Learning rates of every step, against NVIDIA's published ones."""

import math
from dataclasses import replace

import pytest
import torch

from dlrm.train.schedule import (
    CurveConfig,
    ScheduleConfig,
    check_schedule,
    idle_steps_note,
    learning_rate,
    short_run_advice,
)

# Step index (from 0) and rate in the README of NVIDIA's PyTorch DLRM, June 2020.
PUBLISHED = [(200, 0.8794), (400, 1.7544), (1000, 4.3794), (2200, 9.6294)]


@pytest.mark.parametrize(("index", "rate"), PUBLISHED)
def test_warmup_gives_the_published_rates(index, rate):
    assert round(learning_rate(ScheduleConfig(), index + 1), 4) == rate


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        # 8 * (3/4)**2 = 4.5 and 8 * (2/4)**2 = 2; 8 * (1/4)**2 = 0.5 is below decay_end_lr
        (
            {"warmup_steps": 4, "decay_start_step": 6, "decay_steps": 4, "decay_end_lr": 1},
            [2, 4, 6, 8, 8, 8, 4.5, 2, 1, 1, 1, 1],
        ),
        ({"warmup_steps": 4, "warmup_factor": 1, "decay_steps": 0}, [5, 6, 7, 8, 8]),
        (
            {"warmup_steps": 2, "decay_start_step": None, "decay_steps": 2, "decay_power": 1},
            [4, 8, 4, 0],
        ),
        ({"warmup_steps": 0, "decay_steps": 0}, [8] * 9),
    ],
)
def test_rates_of_nvidias_schedule_by_hand(changes, rates):
    config = ScheduleConfig(lr=8, **changes)
    assert [learning_rate(config, step) for step in range(1, len(rates) + 1)] == rates


def test_a_run_shorter_than_its_warmup_gets_flags_that_fit():
    advice = short_run_advice(ScheduleConfig(), 200, by_default=False)
    assert "200 steps, fewer than --warmup_steps 6400" in advice
    assert "ends at 0.875" in advice  # 28 * 200 / 6400
    schedule = "--warmup_steps 10 --decay_start_step 100 --decay_steps 100"
    assert advice.endswith(f"Flags that fit: {schedule}")
    advice = short_run_advice(ScheduleConfig(), 200, by_default=True)
    assert advice.endswith(
        "Flags that fit: --mlp_optimizer adam --embedding_optimizer adam "
        f"--embedding_init_scale 0.1 --lr 1e-3 {schedule}"
    )
    advice = short_run_advice(ScheduleConfig(), 200, by_default=False, recipe=True)
    assert ". --recipe auto chooses flags from the rows. Flags that fit: --warmup" in advice
    fits = ScheduleConfig(warmup_steps=10, decay_start_step=100, decay_steps=100)
    assert short_run_advice(fits, 200, by_default=True) is None


def test_rates_that_fall_over_the_whole_run():
    shape = {"lr": 8, "decay_end_lr": 4}
    linear = ScheduleConfig(schedule="linear", **shape).rates(4, 2)
    assert [linear(step) for step in (1, 2, 3, 4)] == [8, 7, 6, 5]
    cosine = ScheduleConfig(schedule="cosine", **shape).rates(4, 2)
    expected = [4 + 2 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    assert [cosine(step) for step in (1, 2, 3, 4)] == pytest.approx(expected)
    constant = ScheduleConfig(schedule="constant", lr=8).rates(4, 2)
    assert [constant(step) for step in (1, 4)] == [8, 8]


@pytest.mark.parametrize(("warmup", "unit"), [(0.5, "run"), (2, "epochs"), (4, "steps")])
def test_a_warmup_in_shares_epochs_or_steps(warmup, unit):
    config = ScheduleConfig(schedule="constant", lr=8, warmup=warmup, warmup_unit=unit)
    rates = config.rates(num_steps=8, steps_per_epoch=2)
    assert [rates(step) for step in range(1, 9)] == [0, 2, 4, 6, 8, 8, 8, 8]


def test_its_rates_have_the_recorded_bits():
    steps = {"warmup_steps": 270, "decay_start_step": 460, "decay_steps": 700}
    config = ScheduleConfig(lr=24.7, warmup_factor=2, decay_power=3, decay_end_lr=1e-3, **steps)
    recorded = {
        **{1: 18.54787037037037, 100: 20.812037037037037, 270: 24.7, 271: 24.7, 460: 24.7},
        **{461: 24.594294009620988, 800: 3.35977609329446, 1100: 0.015554518950437317},
        **{1159: 0.001, 1160: 0.001},
    }
    rate = config.rates(num_steps=1500, steps_per_epoch=400)
    assert {step: rate(step) for step in recorded} == recorded


def test_flags_that_a_schedule_does_not_read_are_refused():
    check_schedule("nvidia", ["warmup_steps"])
    check_schedule("linear", ["lr", "warmup"])
    with pytest.raises(ValueError, match="--decay_steps contradicts --schedule cosine"):
        check_schedule("cosine", ["decay_steps"])


def curve(num_steps=100, steps_per_epoch=10, **config):
    rate = CurveConfig(lr=2.0, **config).rates(num_steps, steps_per_epoch)
    return [rate(step) for step in range(1, num_steps + 1)]


def torchs(scheduler, num_steps=100):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = scheduler(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_cosine_and_the_steps_are_torchs():
    of = torch.optim.lr_scheduler
    assert curve(lr_schedule="cosine") == pytest.approx(
        torchs(lambda optimizer: of.CosineAnnealingLR(optimizer, 100))
    )
    every_third = curve(lr_schedule="stepped", lr_drops=(3, 6, 9), lr_drops_unit="epochs")
    assert every_third == pytest.approx(torchs(lambda optimizer: of.StepLR(optimizer, 30, 0.1)))


def test_the_warmup_multiplies_the_curve():
    plain, warm = curve(), curve(lr_warmup=2)
    assert warm[0] == 0
    assert [w / p for w, p in zip(warm, plain, strict=True)] == pytest.approx(
        [min(i / 20, 1) for i in range(100)]
    )
    assert curve(lr_warmup=20, lr_warmup_unit="steps") == warm
    assert curve(lr_warmup=0.2, lr_warmup_unit="run") == warm


def test_the_exponential_decays_at_equally_spaced_points():
    rates = curve(num_steps=350, steps_per_epoch=1, lr_schedule="exponential")
    assert rates[:4] == pytest.approx([2, 2, 2, 2 * 0.97])  # every 350 / 146 = 2.397 epochs
    assert rates[-1] == pytest.approx(2 * 0.97 ** math.floor(349 * 146 / 350))


def test_poly_by_hand():
    """NVIDIA's schedule for BERT, whose rate drops as soon as the warm-up ends."""
    rates = curve(lr_schedule="poly", lr_warmup=0.25, lr_warmup_unit="run", num_steps=8)
    # 2 * 1/2 in the warm-up of 2 steps, then 2 * sqrt(1 - i/8)
    expected = [1, 2 * 0.75**0.5, 2 * 0.625**0.5, 2 * 0.5**0.5, 2 * 0.375**0.5, 1]
    assert rates == pytest.approx([*expected, 2 * 0.125**0.5, 0])
    linear = curve(lr_schedule="poly", lr_power=1, num_steps=4)
    assert linear == [1.5, 1, 0.5, 0]


def test_poly_of_the_published_phases():
    phase_one = CurveConfig("poly", 6e-3, lr_warmup=0.2843, lr_warmup_unit="run")
    rate = phase_one.rates(7038, 1)
    assert rate(1) == pytest.approx(6e-3 / (0.2843 * 7038))
    assert rate(2000) == pytest.approx(6e-3 * 2000 / (0.2843 * 7038))  # the warm-up's last
    assert rate(2001) == pytest.approx(6e-3 * 0.846, rel=1e-4)
    assert rate(7038) == 0


def test_linear_by_hand():
    rates = curve(lr_schedule="linear", lr_warmup=2, lr_warmup_unit="steps", num_steps=6)
    assert rates == [0, 1, 2, 1.5, 1, 0.5]
    ends = curve(lr_schedule="linear", lr_end=1, lr_warmup=2, lr_warmup_unit="steps", num_steps=6)
    assert ends == [1, 1.5, 2, 1.75, 1.5, 1.25]
    assert curve(lr_schedule="linear", num_steps=4) == [2, 1.5, 1, 0.5]  # without a warm-up
    short = curve(lr_schedule="linear", lr_warmup=8, lr_warmup_unit="steps", num_steps=4)
    assert short == [0, 0.25, 0.5, 0.75]


def test_linear_keeps_a_rate_for_some_steps():
    options = {"lr_schedule": "linear", "lr_warmup": 3, "lr_warmup_unit": "steps", "num_steps": 11}
    assert curve(lr_update_every=2, **options) == pytest.approx(
        [0, 0, 4 / 3, 2, 2, 1.5, 1.5, 1, 1, 0.5, 0.5]
    )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (ScheduleConfig, {"schedule": "fast"}, "--schedule fast"),
        (ScheduleConfig, {"schedule": "linear", "warmup": 1.0}, "--warmup 1.0: .*below 1"),
        (ScheduleConfig, {"schedule": "linear", "warmup": -0.1}, "--warmup -0.1"),
        (ScheduleConfig, {"schedule": "linear", "warmup_unit": "days"}, "--warmup_unit days"),
        (ScheduleConfig, {"warmup": 0.1}, "--warmup 0.1 needs --schedule constant, linear or"),
        (ScheduleConfig, {"lr": 0}, "--lr 0"),
        (ScheduleConfig, {"lr": float("nan")}, "--lr nan"),
        (ScheduleConfig, {"warmup_steps": -1}, "--warmup_steps -1"),
        (ScheduleConfig, {"warmup_factor": -1}, "--warmup_factor -1"),
        (ScheduleConfig, {"decay_start_step": 10}, "--decay_start_step 10: .*--warmup_steps 6400"),
        (ScheduleConfig, {"decay_end_lr": 30}, "--decay_end_lr 30"),
        (CurveConfig, {"lr_schedule": "square"}, "--lr_schedule square"),
        (CurveConfig, {"lr": -1.0}, "--lr -1"),
        (CurveConfig, {"lr_warmup": -1}, "--lr_warmup -1"),
        (CurveConfig, {"lr_warmup_unit": "days"}, "--lr_warmup_unit days"),
        (CurveConfig, {"lr_drops": (0.6, 0.3)}, "--lr_drops .*ascending"),
        (CurveConfig, {"lr_drop_rate": 0}, "--lr_drop_rate 0"),
        (CurveConfig, {"lr_num_decays": -1}, "--lr_num_decays -1"),
        (CurveConfig, {"lr_power": 0}, "--lr_power 0"),
        (CurveConfig, {"lr_end": 0.2}, "--lr_end 0.2: expected 0 to --lr 0.1"),
        (CurveConfig, {"lr_update_every": 0}, "--lr_update_every 0"),
    ],
)
def test_impossible_schedules_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_run_that_trains_in_less_than_half_of_its_steps_says_so():
    config = ScheduleConfig(warmup_steps=2, decay_start_step=10, decay_steps=30)
    note = idle_steps_note(config, 80)
    assert note.startswith("the learning rate is 0 from step 40 on, so 41 of this run's 80 steps")
    rates = [learning_rate(config, step) for step in range(1, 81)]
    assert rates.count(0) == 41
    assert idle_steps_note(config, 78) is None  # exactly half
    assert idle_steps_note(replace(config, decay_end_lr=0.1), 800) is None
    assert idle_steps_note(replace(config, decay_steps=0), 800) is None
    assert idle_steps_note(ScheduleConfig(schedule="linear"), 10**6) is None
    assert idle_steps_note(ScheduleConfig(), 128_000) is None  # NVIDIA's
