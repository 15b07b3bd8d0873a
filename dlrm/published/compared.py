"""Rows that compare runs of others: losses of two rows, metrics of many seeds."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm.published.jobs import Job, RunOptions, plan_jobs
from dlrm.published.results import Record, check_comparable, finished
from dlrm.published.rows import BenchmarkRow, catalog, find
from dlrm.published.runner import Records, run_job
from dlrm.published.tables import figure_of

_BOUND = 3e-2  # of the losses of two precisions
_SEEDS = range(8, 24)  # those of source 001


class FailedRunError(Exception):
    """A run that a comparison needs has failed; the results name it."""


def completed(job: Job, to: Records) -> list[Record]:
    """Runs a job and returns its successful results.

    Raises:
        FailedRunError: fewer runs than the job's repeats gave a value.
    """
    records = run_job(job, to)
    good = finished(records)[: job.repeats]
    if len(good) < job.repeats:
        errors = [record["error"] for record in records if record["exit_code"]]
        raise FailedRunError(
            f"{job.row.id} {job.label}: {job.repeats - len(good)} of {job.repeats} runs failed, "
            f"the last with: {errors[-1]}; the same command runs what is missing"
        )
    return good


def trend(row: BenchmarkRow, options: RunOptions, to: Records) -> bool:
    """Trains two rows on the same batches, and says whether their losses follow each other.

    The first fifth of the steps does not count.
    """
    steps = 20 if options.smoke else 500
    flags = (*options.flags, f"--max_steps={steps}", "--print_freq=1")
    pair = [find(name) for name in (row.of, row.against) if name]
    records = [
        completed(_one_place(one, replace(options, repeats=1, flags=flags)), to)[-1] for one in pair
    ]
    check_comparable(records, but=("arguments",))
    gap = trend_gap(records[0]["losses"], records[1]["losses"], steps // 5)
    verdict = "match" if gap <= _BOUND else "do not match"
    reduced = " at reduced sizes" if options.smoke else ""
    print(
        f"losses{reduced} of {row.of} and {row.against} {verdict}: largest gap {gap:.2e} of "
        f"smoothed losses after {steps // 5} of {steps} steps, bound {_BOUND:g}"
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
    smooth = list(zip(_smoothed(losses), _smoothed(reference), strict=True))[warmup:]
    gaps = [abs(value - expected) / max(abs(expected), 1e-12) for value, expected in smooth]
    if not all(map(math.isfinite, gaps)):
        raise ValueError("expected finite losses, got NaN or infinity")
    return max(gaps)


def _smoothed(values: Sequence[float]) -> list[float]:
    result, mean = [], values[0]
    for value in values:
        mean = 0.9 * mean + 0.1 * value
        result.append(mean)
    return result


def _one_place(row: BenchmarkRow, options: RunOptions) -> Job:
    if len(options.grid) > 1:
        raise ValueError(f"--grid {','.join(options.grid)}: expected one place")
    return plan_jobs(row, options)[0]


def seeds(row: BenchmarkRow, options: RunOptions, to: Records) -> str:
    """Trains once a seed in two precisions; returns the metrics' table, as source 001 prints it."""
    numbers = _SEEDS[:2] if options.smoke else _SEEDS
    single = replace(options, repeats=1)
    values: dict[str, list[float]] = {}
    for seed in numbers:
        for name, figure in zip((row.of, row.against), row.published, strict=True):
            own = catalog()[re.sub(r"/seed-\d+/", f"/seed-{seed}/", str(name))]
            records = completed(_one_place(own, single), to)
            title = f"{figure.system} {records[-1]['unit']}"
            values.setdefault(title, []).append(figure_of(own, records).value)
    return seeds_table(numbers, values)


def seeds_table(numbers: Sequence[int], values: dict[str, list[float]]) -> str:
    """Returns a Markdown table: a row a seed, then mean, range and standard deviation."""
    lines = [f"| Random seed | {' | '.join(values)} |", f"|---:|{'---:|' * len(values)}"]
    for seed, *cells in zip(numbers, *values.values(), strict=True):
        lines.append(f"| {seed} | {' | '.join(f'{cell:.6f}' for cell in cells)} |")
    summaries: dict[str, Callable[[list[float]], float]] = {
        "**mean**": statistics.fmean,
        "smallest": min,
        "largest": max,
        "standard deviation": statistics.stdev,
    }
    for name, summary in summaries.items():
        cells = [f"{summary(column):.6f}" for column in values.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
