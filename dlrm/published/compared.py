"""Rows that compare runs of others: losses of two rows, metrics of many seeds."""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from dlrm.published.jobs import RunOptions, plan_jobs
from dlrm.published.results import Record, finished
from dlrm.published.rows import BenchmarkRow, find
from dlrm.published.runner import Records, run_job
from dlrm.published.tables import result_of, where

_BOUND = 3e-2  # of the losses of two precisions
_SEEDS = range(8, 24)  # those of source 001


def _one_run(row: BenchmarkRow, options: RunOptions, to: Records) -> Record:
    """Runs a row once.

    Raises:
        ChildProcessError: the run has failed.
    """
    if len(options.grid) > 1:
        raise ValueError(f"--grid {','.join(options.grid)}: expected one place")
    (job,) = plan_jobs(row, replace(options, repeats=1))
    records = run_job(job, to)
    if good := finished(records):
        return good[0]
    error = f"{job.name} failed: {records[-1]['error']}"
    raise ChildProcessError(f"{error}; the same command runs what is missing")


def trend(row: BenchmarkRow, options: RunOptions, to: Records) -> bool:
    """Trains two rows on the same batches, and says whether their losses follow each other.

    The first fifth of the steps does not count.
    """
    steps = 20 if options.smoke else 500
    options = replace(options, flags=(*options.flags, f"--max_steps={steps}", "--print_freq=1"))
    first, second = (_one_run(find(str(name)), options, to) for name in (row.of, row.against))
    gap = trend_gap(first["losses"], second["losses"], steps // 5)
    verdict = "match" if gap <= _BOUND else "do not match"
    reduced = " at reduced sizes" if options.smoke else ""
    print(
        f"losses{reduced} of {row.of} and {row.against} {verdict}: largest gap {gap:.2e} of "
        f"smoothed losses after {steps // 5} of {steps} steps, bound {_BOUND:g} "
        f"({where(first)})"
    )
    return gap <= _BOUND


def trend_gap(losses: Sequence[float], reference: Sequence[float], warmup: int) -> float:
    """Returns the largest relative distance of two smoothed curves of losses.

    Losses are smoothed by an exponential moving average of decay 0.9, so that one batch does not
    decide.

    Args:
        losses, reference: of each step, on the same batches.
        warmup: number of first steps to leave out.

    Raises:
        ValueError: the curves have different lengths, or hold NaN.
    """
    if len(losses) != len(reference):
        raise ValueError(
            f"expected as many losses as the reference has, {len(reference)}, got {len(losses)}"
        )
    curves = (
        accumulate(of, lambda mean, loss: 0.9 * mean + 0.1 * loss) for of in (losses, reference)
    )
    smooth = list(zip(*curves, strict=True))[warmup:]
    gaps = [abs(value - expected) / max(abs(expected), 1e-12) for value, expected in smooth]
    if not all(map(math.isfinite, gaps)):
        raise ValueError("expected finite losses, got NaN or infinity")
    return max(gaps)


def seeds(row: BenchmarkRow, options: RunOptions, to: Records) -> Iterator[str]:
    """Trains once a seed in each precision; yields a line about the metrics of each precision."""
    numbers = _SEEDS[:2] if options.smoke else _SEEDS
    for name, figure in zip((row.of, row.against), row.published, strict=True):
        own = [find(re.sub(r"/seed-\d+/", f"/seed-{seed}/", str(name))) for seed in numbers]
        runs = [_one_run(one, options, to) for one in own]
        values = [result_of(one, [run]).value for one, run in zip(own, runs, strict=True)]
        yield (
            f"{figure.system} {runs[0]['unit']}, {len(values)} seeds: "
            f"mean {statistics.fmean(values):.6f}, smallest {min(values):.6f}, "
            f"largest {max(values):.6f}, standard deviation {statistics.stdev(values):.6f} "
            f"({where(runs[0])})"
        )
