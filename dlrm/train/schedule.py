"""The learning rate of every step: NVIDIA's for DLRM, and schedules of image and text networks."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

LR_SCHEDULES = ("constant", "cosine", "exponential", "stepped", "poly", "linear")
SCHEDULES = ("nvidia", "constant", "linear", "cosine")
UNITS = ("epochs", "steps", "run")
OF_NVIDIA = ("warmup_steps", "warmup_factor", "decay_start_step", "decay_steps", "decay_power")
_SMALL_RUN = "--mlp_optimizer adam --embedding_optimizer adam --embedding_init_scale 0.1 --lr 1e-3 "

MAX_RATE = 3e38  # within float32, in which updates are computed


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule; field names are those of the command line's flags.

    Attributes:
        schedule: "nvidia" warms up, stays on a plateau and decays, at the steps of the next
            fields; the others warm up for `warmup`: "constant" then stays at `lr`, "linear" and
            "cosine" fall to `decay_end_lr` by the end of the run.
        lr: the highest rate.
        warmup: length of the warm-up of the other schedules.
        warmup_unit: unit of `warmup`: "epochs", "steps" or "run", a share of the run.
        warmup_steps: steps until the plateau is reached; 0 starts on it.
        warmup_factor: f >= 0; the rate grows from lr * (1 - 2**-f), which is 0 by default.
        decay_start_step: the plateau's last step; None is right after the warm-up.
        decay_steps: steps from there to the end of the decay; 0 never decays.
        decay_power: exponent of the decay.
        decay_end_lr: the decay ends at this rate, and the rate stays there.

    Raises:
        ValueError: values do not fit together; the message names flag and value.
    """

    schedule: str = "nvidia"
    lr: float = 28.0
    warmup: float = 0.0
    warmup_unit: str = "run"
    warmup_steps: int = 6400
    warmup_factor: int = 0
    decay_start_step: int | None = 64000
    decay_steps: int = 80000
    decay_power: int = 2
    decay_end_lr: float = 0.0
    lr_update_every: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 < self.lr <= MAX_RATE:
            raise ValueError(f"--lr {self.lr}: expected a number above 0, up to {MAX_RATE:g}")
        for flag in ("warmup_steps", "warmup_factor", "decay_steps", "decay_power"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected 0 or more")
        if not 0 <= self.decay_end_lr <= self.lr:
            raise ValueError(
                f"--decay_end_lr {self.decay_end_lr}: expected 0 to --lr {self.lr}, both included"
            )
        for flag, choices in (("schedule", SCHEDULES), ("warmup_unit", UNITS)):
            if getattr(self, flag) not in choices:
                raise ValueError(
                    f"--{flag} {getattr(self, flag)}: expected one of {', '.join(choices)}"
                )
        self._check_warmup()
        if self.schedule == "nvidia" and self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"--decay_start_step {self.decay_start_step}: expected at least --warmup_steps "
                f"{self.warmup_steps}"
            )

    def _check_warmup(self) -> None:
        most = 1.0 if self.warmup_unit == "run" else math.inf
        if not 0 <= self.warmup < most:
            raise ValueError(
                f"--warmup {self.warmup}: expected 0 or more"
                + (", below 1, a share of the run" if most == 1 else "")
            )
        if self.warmup and self.schedule == "nvidia":
            raise ValueError(
                f"--warmup {self.warmup} needs --schedule {', '.join(SCHEDULES[1:-1])} or "
                f"{SCHEDULES[-1]}; --schedule nvidia takes --warmup_steps"
            )

    @property
    def knows_the_run(self) -> bool:
        """Returns whether rates depend on the length of the run."""
        by_share = self.warmup > 0 and self.warmup_unit == "run"
        return self.schedule in ("linear", "cosine") or by_share

    def rates(self, num_steps: int, steps_per_epoch: int) -> Callable[[int], float]:
        """Returns the learning rate of each step, counted from 1, of a run of `num_steps`."""
        warmup = _in_steps(self.warmup, self.warmup_unit, num_steps, steps_per_epoch)
        return partial(_CURVES[self.schedule], self, _Run(num_steps, warmup))

    @property
    def lr_end(self) -> float:
        return self.decay_end_lr

    @property
    def decay_start(self) -> int:
        return self.warmup_steps if self.decay_start_step is None else self.decay_start_step


def check_schedule(schedule: str, given: Collection[str]) -> None:
    """Raises ValueError for flags that the schedule does not read.

    Args:
        schedule: its name.
        given: flags that the user set.
    """
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
        config: the schedule.
        num_steps: length of the run.
        by_default: rate and optimizers are the defaults, which do not fit a short run either: the
            default rate ruins the weights on its plateau.
        recipe: the run can have `--recipe auto`, which is then named first.
    """
    if config.schedule != "nvidia" or num_steps >= config.warmup_steps:
        return None
    warmup, half = num_steps // 20, num_steps // 2
    return (
        f"this run has {num_steps} steps, fewer than --warmup_steps {config.warmup_steps}: its "
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
    """A learning-rate curve over a whole run; field names are those of the flags.

    Attributes:
        lr_schedule: with i of N steps done, lr is multiplied by 1 ("constant"); by
            (1 + cos(pi * i / N)) / 2 ("cosine", which ends at `lr_end`); by `lr_decay_rate` at
            each of `lr_num_decays` equally spaced points ("exponential"); by `lr_drop_rate` at
            each of `lr_drops` ("stepped"). "poly" is NVIDIA's for BERT: step i of N, counted from
            1, has a rate of lr * i / W in the warm-up (i < W), and then lr * (1 - i / N)**p, which
            starts below lr. "linear" goes from `lr_end` to lr in the warm-up, and back by
            the end.
        lr: the rate that is multiplied.
        lr_warmup: length of the warm-up W, in which the rate of the other schedules is also
            multiplied by i / W.
        lr_warmup_unit: "epochs", "steps" or "run", a share of the run.
        lr_drops: points at which "stepped" drops, ascending.
        lr_drops_unit: as `lr_warmup_unit`.
        lr_decay_rate, lr_num_decays: parameters of "exponential".
        lr_drop_rate: factor of "stepped".
        lr_power: p of "poly".
        lr_end: final rate of "linear" and "cosine".
        lr_update_every: "linear" keeps a rate for this many steps, in the warm-up and after it.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    lr_schedule: str = "cosine"
    lr: float = 0.1
    lr_warmup: float = 0.0
    lr_warmup_unit: str = "epochs"
    lr_drops: tuple[float, ...] = (0.3, 0.6, 0.8, 0.9)
    lr_drops_unit: str = "run"
    lr_decay_rate: float = 0.97
    lr_num_decays: int = 146
    lr_drop_rate: float = 0.1
    lr_power: float = 0.5
    lr_end: float = 0.0
    lr_update_every: int = 1

    def __post_init__(self) -> None:
        if self.lr_schedule not in LR_SCHEDULES:
            raise ValueError(f"--lr_schedule {self.lr_schedule}: expected one of {LR_SCHEDULES}")
        for flag in ("lr_warmup_unit", "lr_drops_unit"):
            if getattr(self, flag) not in UNITS:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected epochs, steps or run")
        if not 0 < self.lr <= MAX_RATE:
            raise ValueError(f"--lr {self.lr}: expected a number above 0, up to {MAX_RATE:g}")
        if not 0 <= self.lr_warmup < math.inf:
            raise ValueError(f"--lr_warmup {self.lr_warmup}: expected 0 or more")
        for flag in ("lr_decay_rate", "lr_drop_rate"):
            if not 0 < getattr(self, flag) <= 1:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected above 0, at most 1")
        if self.lr_num_decays < 0:
            raise ValueError(f"--lr_num_decays {self.lr_num_decays}: expected 0 or more")
        if not 0 < self.lr_power < math.inf:
            raise ValueError(f"--lr_power {self.lr_power}: expected a number above 0")
        if not 0 <= self.lr_end <= self.lr:
            raise ValueError(f"--lr_end {self.lr_end}: expected 0 to --lr {self.lr}, both included")
        if self.lr_update_every < 1:
            raise ValueError(f"--lr_update_every {self.lr_update_every}: expected 1 or more")
        if list(self.lr_drops) != sorted(self.lr_drops) or min(self.lr_drops, default=0) < 0:
            raise ValueError(f"--lr_drops {self.lr_drops}: expected ascending numbers from 0 on")


def learning_rate_curve(
    config: CurveConfig, num_steps: int, steps_per_epoch: int
) -> Callable[[int], float]:
    """Returns the learning rate of each step, counted from 1, of a run of `num_steps`."""
    size = (num_steps, steps_per_epoch)
    warmup = _in_steps(config.lr_warmup, config.lr_warmup_unit, *size)
    drops = tuple(_in_steps(drop, config.lr_drops_unit, *size) for drop in config.lr_drops)
    return partial(_CURVES[config.lr_schedule], config, _Run(num_steps, warmup, drops))


class _Run(NamedTuple):
    """The lengths, in steps, that curves depend on."""

    num_steps: int
    warmup: float
    drops: tuple[float, ...] = ()


def _in_steps(length: float, unit: str, num_steps: int, steps_per_epoch: int) -> float:
    return length * {"epochs": steps_per_epoch, "steps": 1, "run": num_steps}[unit]


def _cosine(config: Any, run: _Run, step: int) -> float:
    share = 0.5 * (1 + math.cos(math.pi * (step - 1) / run.num_steps))
    return _warmed(config.lr_end + (config.lr - config.lr_end) * share, run, step)


def _exponential(config: CurveConfig, run: _Run, step: int) -> float:
    decays = config.lr_num_decays * (step - 1) // run.num_steps
    return _warmed(config.lr * config.lr_decay_rate**decays, run, step)


def _stepped(config: CurveConfig, run: _Run, step: int) -> float:
    dropped = sum(step - 1 >= drop for drop in run.drops)
    return _warmed(config.lr * config.lr_drop_rate**dropped, run, step)


def _warmed(rate: float, run: _Run, step: int) -> float:
    done = step - 1
    return rate * done / run.warmup if done < run.warmup else rate


def _poly(config: CurveConfig, run: _Run, step: int) -> float:
    if step < run.warmup:
        return config.lr * step / run.warmup
    return config.lr * max(1 - step / run.num_steps, 0.0) ** config.lr_power


def _linear(config: Any, run: _Run, step: int) -> float:
    every, top, done = config.lr_update_every, config.lr - config.lr_end, step - 1
    if done < run.warmup:
        return config.lr_end + top * (done - done % every) / run.warmup
    since = done - run.warmup
    left = run.num_steps - run.warmup - (since - since % every)
    return config.lr_end + top * max(left, 0.0) / max(run.num_steps - run.warmup, 1)


_CURVES: dict[str, Callable[[Any, _Run, int], float]] = {
    "nvidia": lambda config, run, step: learning_rate(config, step),
    "constant": lambda config, run, step: _warmed(config.lr, run, step),
    "cosine": _cosine,
    "exponential": _exponential,
    "stepped": _stepped,
    "poly": _poly,
    "linear": _linear,
}
