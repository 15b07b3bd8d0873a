"""Rules of measurement: a document's number of runs, its warm-up and the reported statistic."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SPREAD_LIMIT = 0.05


@dataclass(frozen=True)
class Rule:
    """A document's rule for measuring a row.

    Attributes:
        title: the rule in one line.
        repeats: runs, each in fresh processes.
        flags: flags that the rule adds to the row's command line.
        quantity: reported quantity: "throughput", or a metric of the trained model.
        values: source of a run's value: "summary", the throughput that the command reports,
            which leaves the warm-up out; or "series", one for each logged step.
        drop: first values of each run's series to leave out.
        statistic: "median" or "mean" of the values.
    """

    title: str
    repeats: int = 1
    flags: tuple[str, ...] = ()
    quantity: str = "throughput"
    values: str = "summary"
    drop: int = 0
    statistic: str = "mean"


_STEPS_120 = ("--max_steps=120", "--benchmark_warmup_steps=20")
RULES = {
    "dlperf": Rule(
        "7 fresh runs of 120 steps, the first 20 dropped, 100 timed; median",
        repeats=7,
        flags=_STEPS_120,
        statistic="median",
    ),
    "gaudi": Rule("one run of 120 steps, the first 20 dropped", flags=_STEPS_120),
    "gaudi_pretraining": Rule(
        "one run of 6 steps of hundreds of micro-batches, the first dropped",
        flags=("--max_steps=6", "--benchmark_warmup_steps=1"),
    ),
    "ipu": Rule(
        "a throughput for each logged step, the first dropped; mean",
        flags=("--print_freq=1",),
        values="series",
        drop=1,
    ),
    "ipu_inference": Rule("10 passes in one process, the first dropped; mean"),
    "nvidia": Rule(
        "one run of 1,000 steps, the first 500 dropped",
        flags=("--max_steps=1000", "--benchmark_warmup_steps=500"),
    ),
    "nvidia_inference": Rule("200 batches of each size; mean throughput of the largest"),
    "checkpoint": Rule("one test of a checkpoint; its metric", quantity="metric"),
    "result": Rule("one training to its end; the metric of its test", quantity="metric"),
}


@dataclass(frozen=True)
class Measured:
    """The figure of the runs of one setting.

    Attributes:
        value: the rule's statistic of `values`.
        values: a value for each run; for a series its mean.
        spread: (largest - smallest) / value; 0 for a single run.
    """

    value: float
    values: tuple[float, ...]
    spread: float

    @property
    def warning(self) -> str:
        """Returns a line about a spread that is too large for comparisons, or an empty string."""
        if self.spread <= SPREAD_LIMIT:
            return ""
        return (
            f"warning: the {len(self.values)} runs differ by {self.spread:.1%}, more than "
            f"{SPREAD_LIMIT:.0%}; the machine may have had other work"
        )


def measured(runs: Sequence[Sequence[float]], rule: Rule) -> Measured:
    """Returns a rule's figure of runs.

    Args:
        runs: the values of each run: one, or a series.
        rule: the values of a series to leave out, and the statistic to take.

    Raises:
        ValueError: there is no run, or one whose series ends before its first value counts.
    """
    if not runs:
        raise ValueError("expected one run or more, got none")
    if short := [run for run in runs if len(run) <= rule.drop]:
        raise ValueError(
            f"expected more than {rule.drop} logged values in each run, since the first "
            f"{rule.drop} do not count, got {len(short[0])}"
        )
    values = tuple(statistics.fmean(run[rule.drop :]) for run in runs)
    value = statistics.median(values) if rule.statistic == "median" else statistics.fmean(values)
    spread = (max(values) - min(values)) / value if value else 0.0
    return Measured(value, values, spread)


def trend_gap(losses: Sequence[float], reference: Sequence[float], warmup: int) -> float:
    """Returns the largest relative distance of two smoothed curves of losses.

    Losses are smoothed by an exponential moving average of decay 0.9, so that one batch does not
    decide.

    Args:
        losses, reference: of each step, on the same batches.
        warmup: number of first steps to leave out.

    Raises:
        ValueError: the curves have different lengths, end within the warm-up, or hold NaN.
    """
    if len(losses) != len(reference):
        raise ValueError(
            f"expected as many losses as the reference has, {len(reference)}, got {len(losses)}"
        )
    if len(losses) <= warmup:
        raise ValueError(f"expected more than {warmup} steps, got {len(losses)}")
    gaps = []
    smooth = list(zip(_smoothed(losses), _smoothed(reference), strict=True))[warmup:]
    for value, expected in smooth:
        gaps.append(abs(value - expected) / max(abs(expected), 1e-12))
    if not all(math.isfinite(gap) for gap in gaps):
        raise ValueError("expected finite losses, got NaN or infinity")
    return max(gaps)


def _smoothed(values: Sequence[float]) -> list[float]:
    result, mean = [], values[0]
    for value in values:
        mean = 0.9 * mean + 0.1 * value
        result.append(mean)
    return result
