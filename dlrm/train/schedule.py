"""The learning rate of every step: warm-up, plateau, polynomial decay."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning-rate schedule; field names are those of the command line's flags.

    Attributes:
        lr: the rate of the plateau.
        warmup_steps: steps until the plateau is reached; 0 starts on it.
        warmup_factor: f >= 0; the rate grows from lr * (1 - 2**-f), which is 0 by default.
        decay_start_step: the plateau's last step; None is right after the warm-up.
        decay_steps: steps from there to the end of the decay; 0 never decays.
        decay_power: exponent of the decay.
        decay_end_lr: the decay ends at this rate, and the rate stays there.

    Raises:
        ValueError: values that do not fit together; flag and value are named.
    """

    lr: float = 28.0
    warmup_steps: int = 6400
    warmup_factor: int = 0
    decay_start_step: int | None = 64000
    decay_steps: int = 80000
    decay_power: int = 2
    decay_end_lr: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr {self.lr}: expected a number above 0")
        for flag in ("warmup_steps", "warmup_factor", "decay_steps", "decay_power"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected 0 or more")
        if not 0 <= self.decay_end_lr <= self.lr:
            raise ValueError(
                f"--decay_end_lr {self.decay_end_lr}: expected 0 to --lr {self.lr}, both included"
            )
        if self.decay_steps and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"--decay_start_step {self.decay_start_step}: expected at least --warmup_steps "
                f"{self.warmup_steps}"
            )

    @property
    def decay_start(self) -> int:
        return self.warmup_steps if self.decay_start_step is None else self.decay_start_step


def learning_rate(config: ScheduleConfig, step: int) -> float:
    """Returns the learning rate of a step, counted from 1 (NVIDIA's formula).

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


def short_run_advice(config: ScheduleConfig, num_steps: int) -> str | None:
    """Returns a line for the user whose run ends within the warm-up, or None.

    It names flags that fit: a twentieth of the run to warm up, the second half to decay.
    """
    if num_steps >= config.warmup_steps:
        return None
    warmup, half = num_steps // 20, num_steps // 2
    return (
        f"this run has {num_steps} steps, fewer than --warmup_steps {config.warmup_steps}: its "
        f"learning rate ends at {learning_rate(config, max(num_steps, 1)):.4g}, short of --lr "
        f"{config.lr:g}. Flags that fit: --warmup_steps {warmup} --decay_start_step {half} "
        f"--decay_steps {num_steps - half}"
    )
