"""Comparisons of runs: losses of two rows, many seeds of one, places of a grid."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dlrm.published.documents.benchmark_row import BenchmarkRow
from dlrm.published.documents.measurement import trend_gap
from dlrm.published.jobs import MOST, Job, RunOptions, plan_jobs
from dlrm.published.results import Record, check_comparable, finished
from dlrm.published.runner import Records, run_job
from dlrm.published.tables import figure_of
from dlrm.settings import REQUIRED, setting

_TRAINING = ("train", "pretrain", "finetune", "benchmark_training")
_BOUNDS = {True: 1e-4, False: 3e-2}  # of equal precisions, and of different ones


class FailedRunError(Exception):
    """A run that a comparison needs has failed; the results name it."""


@dataclass(frozen=True)
class TrendConfig:
    """Two rows whose losses are compared; field names are those of the flags."""

    row: str = setting(REQUIRED, "id of a row", positional=True)
    against: str = setting(REQUIRED, "row to compare with")
    steps: int | None = setting(
        None, "number of steps; default: 500, or 20 with --smoke", least=5, most=MOST
    )
    bound: float | None = setting(
        None,
        "largest relative difference of losses; default: 1e-4, or 3e-2 if the rows differ in "
        "precision",
    )
    change: tuple[str, ...] = setting(
        (),
        "flag of the first row only, such as --change=--execution=graph",
        repeated=True,
    )


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


def trend(
    row: BenchmarkRow,
    against: BenchmarkRow,
    asked: TrendConfig,
    options: RunOptions,
    to: Records,
) -> bool:
    """Trains both rows on the same batches, and says whether their losses follow each other.

    The first fifth of the steps does not count.

    Raises:
        ValueError: a row does not train, both are the same, or they train on different data or
            batches.
    """
    steps, bound, change = asked.steps, asked.bound, asked.change
    steps = steps or (20 if options.smoke else 500)
    if row.id == against.id and not change:
        raise ValueError(f"{row.id}: expected another row to compare with, or --change FLAG")
    if bound is not None and not 0 < bound < math.inf:
        raise ValueError(f"--bound {bound:g}: expected a number above 0")
    for one in (row, against):
        if not one.given["mode"].startswith(_TRAINING):
            raise ValueError(f"{one.id} has no losses, since it does not train")
    flags = (*options.flags, f"--max_steps={steps}", "--print_freq=1")
    both = replace(options, repeats=1, flags=flags)
    changed = replace(both, flags=(*flags, *change))
    jobs = [_one_place(row, changed), _one_place(against, both)]
    for key in ("global_batch", "data"):
        first, second = (job.setting[key] for job in jobs)
        if first != second:
            raise ValueError(
                f"{row.id} and {against.id} cannot be compared: {key} {first} and {second}"
            )
    records = [completed(job, to)[-1] for job in jobs]
    check_comparable(records, but=("arguments",))
    if bound is None:
        bound = _BOUNDS[_precision([*row.flags, *change]) == _precision(against.flags)]
    gap = trend_gap(records[0]["losses"], records[1]["losses"], steps // 5)
    verdict = "match" if gap <= bound else "do not match"
    reduced = " at reduced sizes" if options.smoke else ""
    to.say(
        f"losses{reduced} of {row.id} and {against.id} {verdict}: largest gap {gap:.2e} of "
        f"smoothed losses after {steps // 5} of {steps} steps, bound {bound:g}"
    )
    return gap <= bound


def _precision(flags: Sequence[str]) -> str:
    given = [flag for flag in flags if flag.startswith(("--precision=", "--amp"))]
    return given[-1] if given else "--precision=fp32"


def _one_place(row: BenchmarkRow, options: RunOptions) -> Job:
    if len(options.grid) > 1:
        raise ValueError(f"--grid {','.join(options.grid)}: expected one place")
    return plan_jobs(row, options)[0]


def seeds(
    columns: Sequence[Callable[[int], tuple[BenchmarkRow, RunOptions]]],
    numbers: Sequence[int],
    names: Sequence[str],
    to: Records,
) -> str:
    """Trains once a seed in each column; returns the table of the metrics, as source 001 prints it.

    Args:
        columns: a seed's row, and how it is run.
        names: titles of the columns, such as "Mixed precision".
    """
    values: dict[str, list[float]] = {}
    jobs = [[_one_place(*column(seed)) for column in columns] for seed in numbers]
    for one_seed in jobs:
        for name, job in zip(names, one_seed, strict=True):
            records = completed(job, to)
            title = f"{name} {records[-1]['unit']}".strip()
            values.setdefault(title, []).append(figure_of(job.row, records).value)
    return seeds_table(numbers, values)


def seeds_table(numbers: Sequence[int], values: dict[str, list[float]]) -> str:
    """Returns a Markdown table: a row a seed, then mean, range and standard deviation."""
    lines = [f"| Random seed | {' | '.join(values)} |", f"|---:|{'---:|' * len(values)}"]
    for i, seed in enumerate(numbers):
        lines.append(f"| {seed} | {' | '.join(f'{column[i]:.6f}' for column in values.values())} |")
    summaries: list[tuple[str, Callable[[list[float]], float]]] = [
        ("**mean**", statistics.fmean),
        ("smallest", min),
        ("largest", max),
    ]
    if len(numbers) > 1:
        summaries.append(("standard deviation", statistics.stdev))
    for name, summary in summaries:
        cells = (f"{summary(column):.6f}" for column in values.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaled(row: BenchmarkRow, options: RunOptions, to: Records) -> list[Record]:
    """Runs a row at each place of a grid, of which one is a single device; returns the results.

    Raises:
        ValueError: a place is larger than the machine, there is no single device to compare with,
            or the row has no throughput.
    """
    if "1n1d" not in options.grid:
        raise ValueError(
            f"--grid {','.join(options.grid) or '(none)'}: expected 1n1d and other places, since "
            "the others are compared with it"
        )
    jobs = plan_jobs(row, options)
    if jobs[0].rule.quantity != "throughput":
        raise ValueError(f"{row.id}: expected a row that is measured by its throughput")
    if emulated := [job.label for job in jobs if job.setting["emulated"]]:
        raise ValueError(
            f"--grid {','.join(options.grid)}: {emulated[0]} can only be emulated here, and an "
            "emulated place has no efficiency"
        )
    return [record for job in jobs for record in completed(job, to)]
