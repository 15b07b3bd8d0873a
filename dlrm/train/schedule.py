"""The learning rate of every step: NVIDIA's for DLRM, and schedules of image and text networks."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from dlrm.settings import check_settings, setting

LR_SCHEDULES = ("constant", "cosine", "exponential", "stepped", "poly", "linear")
SCHEDULES = ("nvidia", "constant", "linear", "cosine")
UNITS = ("epochs", "steps", "run")
OF_NVIDIA = ("warmup_steps", "warmup_factor", "decay_start_step", "decay_steps", "decay_power")
_SMALL_RUN = "--mlp_optimizer adam --embedding_optimizer adam --embedding_init_scale 0.1 --lr 1e-3 "

MAX_RATE = 3e38  # within float32, in which updates are computed


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule; field names are those of the command line's flags."""

    schedule: str = setting(
        "nvidia",
        "nvidia: warm-up, plateau and polynomial decay at given steps; constant: --lr after the "
        "warm-up; linear, cosine: falls to --decay_end_lr by the end of the run",
        choices=SCHEDULES,
    )
    lr: float = setting(
        28.0, "Learning rate after the warm-up, and before any decay", above=0, most=MAX_RATE
    )
    warmup: float = setting(
        0.0,
        "Length of the warm-up of --schedule constant, linear and cosine, in --warmup_unit",
        least=0,
    )
    warmup_unit: str = setting(
        "run", "Unit of --warmup; run: a share of the run, such as 0.05", choices=UNITS
    )
    warmup_steps: int = setting(6400, "Optimization steps of the warm-up; 0: no warm-up", least=0)
    warmup_factor: int = setting(
        0, "The warm-up starts at --lr * (1 - 2**-this); an integer, 0 or more", least=0
    )
    decay_start_step: int | None = setting(
        64000,
        "Optimization step after which the learning rate decays; None: right after the warm-up",
    )
    decay_steps: int = setting(80000, "Optimization steps of the decay; 0: no decay", least=0)
    decay_power: int = setting(2, "Exponent of the polynomial decay", least=0)
    decay_end_lr: float = setting(0.0, "Learning rate at the end of the decay", least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        _check_end("decay_end_lr", self.decay_end_lr, self.lr)
        if self.warmup and self.schedule == "nvidia":
            raise ValueError(
                f"--warmup {self.warmup} needs --schedule constant, linear or cosine; --schedule "
                "nvidia takes --warmup_steps"
            )
        if self.warmup >= 1 and self.warmup_unit == "run":
            raise ValueError(f"--warmup {self.warmup}: expected a share of the run, below 1")
        if self.schedule == "nvidia" and self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"--decay_start_step {self.decay_start_step}: expected at least --warmup_steps "
                f"{self.warmup_steps}"
            )

    @property
    def knows_the_run(self) -> bool:
        """Returns whether rates depend on the length of the run."""
        by_share = self.warmup > 0 and self.warmup_unit == "run"
        return self.schedule in ("linear", "cosine") or by_share

    def rates(self, num_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """Returns the learning rate of each step, counted from 1, of a run of `num_steps`."""
        if self.schedule == "nvidia":
            return partial(learning_rate, self)
        shape = self.schedule, self.lr, self.warmup, self.warmup_unit
        return CurveConfig(*shape, lr_end=self.decay_end_lr).rates(num_steps, steps_per_epoch)

    @property
    def decay_start(self) -> int:
        """Returns the last step before the decay of the schedule "nvidia"."""
        return self.warmup_steps if self.decay_start_step is None else self.decay_start_step


def check_schedule(schedule: str, given: Collection[str]) -> None:
    """Raises ValueError for flags that the user has given and the schedule does not read."""
    if schedule != "nvidia" and (unread := [flag for flag in OF_NVIDIA if flag in given]):
        raise ValueError(
            f"--{unread[0]} contradicts --schedule {schedule}, which has --warmup, and whose decay "
            "takes the whole run"
        )


def learning_rate(config: ScheduleConfig, step: int) -> float:
    """Returns the learning rate of a step, counted from 1, of the schedule "nvidia".

    Through `warmup_steps` W it is lr * (1 - (W - step) / (W * 2**f)), then lr; after
    `decay_start_step` S it is lr * ((S + N - step) / N)**p with N = `decay_steps`, but never under
    `decay_end_lr`.
    """
    warmup, start = config.warmup_steps, config.decay_start
    if step <= warmup:
        return config.lr * (1 - (warmup - step) / (warmup * 2**config.warmup_factor))
    if not config.decay_steps or step <= start:
        return config.lr
    left = max(start + config.decay_steps - step, 0) / config.decay_steps
    return max(config.lr * left**config.decay_power, config.decay_end_lr)


def short_run_advice(
    config: ScheduleConfig, num_steps: int, by_default: bool, recipe: bool = False
) -> str | None:
    """Returns advice for a user whose run ends within the warm-up, or None.

    It names flags that fit: a twentieth of the run to warm up, the second half to decay.

    Args:
        by_default: rate and optimizers are the defaults, which do not fit a short run either.
        recipe: the run can have `--recipe auto`, which is then named first.
    """
    if config.schedule != "nvidia" or num_steps >= config.warmup_steps:
        return None
    warmup, half = num_steps // 20, num_steps // 2
    steps = f"{num_steps} step{'s' * (num_steps != 1)}"
    return (
        f"this run has {steps}, fewer than --warmup_steps {config.warmup_steps}: its "
        f"learning rate ends at {learning_rate(config, max(num_steps, 1)):.4g}, short of --lr "
        f"{config.lr:g}. {'--recipe auto chooses flags from the rows. ' if recipe else ''}"
        f"Flags that fit: {_SMALL_RUN if by_default else ''}--warmup_steps {warmup} "
        f"--decay_start_step {half} --decay_steps {num_steps - half}"
    )


def idle_steps_note(config: ScheduleConfig, num_steps: int) -> str | None:
    """Returns a line about a run whose learning rate is 0 in most of its steps, or None."""
    end = config.decay_start + config.decay_steps  # the first step whose rate is 0
    idle = num_steps + 1 - end
    decays = config.schedule == "nvidia" and config.decay_steps and not config.decay_end_lr
    if not decays or 2 * idle <= num_steps:
        return None
    return (
        f"the learning rate is 0 from step {end:,} on, so {idle:,} of this run's {num_steps:,} "
        f"steps change no weights: --decay_start_step {config.decay_start} and --decay_steps "
        f"{config.decay_steps} end there; let them end later, or set --decay_end_lr above 0"
    )


@dataclass(frozen=True)
class CurveConfig:
    """A learning-rate curve over a whole run; field names are those of the flags."""

    lr_schedule: str = setting(
        "cosine", "Shape of the learning rate's curve after the warm-up", choices=LR_SCHEDULES
    )
    lr: float = setting(
        0.1, "Highest learning rate, which the schedule scales down", above=0, most=MAX_RATE
    )
    lr_warmup: float = setting(
        0.0, "Length of the learning rate's linear warm-up, in --lr_warmup_unit", least=0
    )
    lr_warmup_unit: str = setting(
        "epochs", "Unit of --lr_warmup; run: a share of the run", choices=UNITS
    )
    lr_drops: tuple[float, ...] = setting(
        (0.3, 0.6, 0.8, 0.9),
        "Points at which --lr_schedule stepped drops, in --lr_drops_unit",
        least=0,
    )
    lr_drops_unit: str = setting("run", "Unit of --lr_drops; run: shares of the run", choices=UNITS)
    lr_decay_rate: float = setting(
        0.97,
        "Factor of --lr_schedule exponential at each of --lr_num_decays points",
        above=0,
        most=1,
    )
    lr_num_decays: int = setting(
        146, "Number of equally spaced points at which --lr_schedule exponential decays", least=0
    )
    lr_drop_rate: float = setting(
        0.1, "Factor of --lr_schedule stepped at each drop", above=0, most=1
    )
    lr_power: float = setting(0.5, "Exponent of --lr_schedule poly", above=0)
    lr_end: float = setting(
        0.0,
        "Learning rate at which --lr_schedule linear and cosine end, and linear also starts",
        least=0,
    )
    lr_update_every: int = setting(
        1, "Number of steps for which --lr_schedule linear keeps a rate", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _check_end("lr_end", self.lr_end, self.lr)
        if list(self.lr_drops) != sorted(self.lr_drops):
            raise ValueError(f"--lr_drops {self.lr_drops}: expected ascending numbers from 0 on")

    def rates(self, num_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """Returns the learning rate of each step, counted from 1, of a run of `num_steps`."""
        steps = {"epochs": steps_per_epoch, "steps": 1, "run": num_steps}
        drops = [drop * steps[self.lr_drops_unit] for drop in self.lr_drops]
        warmup = self.lr_warmup * steps[self.lr_warmup_unit]
        return partial(_rate, self, num_steps, warmup, drops)


def _check_end(flag: str, end: float, lr: float) -> None:
    if end > lr:
        raise ValueError(f"--{flag} {end}: expected 0 to --lr {lr}, both included")


def _rate(
    config: CurveConfig, num_steps: int, warmup: float, drops: Sequence[float], step: int
) -> float:
    """Returns the rate of a step; lengths are in steps."""
    kind, lr, end, done = config.lr_schedule, config.lr, config.lr_end, step - 1
    if kind == "poly":  # as NVIDIA's program for BERT, which counts from 1
        if step < warmup:
            return lr * step / warmup
        return lr * max(1 - step / num_steps, 0.0) ** config.lr_power
    if kind == "linear":
        every = config.lr_update_every
        if done < warmup:
            return end + (lr - end) * (done - done % every) / warmup
        since = done - warmup
        left = num_steps - warmup - (since - since % every)
        return end + (lr - end) * max(left, 0.0) / max(num_steps - warmup, 1)
    rate = lr
    if kind == "cosine":
        rate = end + (lr - end) * (0.5 * (1 + math.cos(math.pi * done / num_steps)))
    elif kind == "exponential":
        rate = lr * config.lr_decay_rate ** (config.lr_num_decays * done // num_steps)
    elif kind == "stepped":
        rate = lr * config.lr_drop_rate ** sum(done >= drop for drop in drops)
    return rate * done / warmup if done < warmup else rate
