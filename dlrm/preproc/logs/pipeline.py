"""The stages that turn raw logs into a dataset, on any engine.

    unpack      compressed files, if there are any
    cut         one file into days of equally many lines, if there is one file

Those of `dlrm.preproc.prepare` follow. Every finished task leaves a file, and every
finished stage a marker, in a `WorkFolder`.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.preproc.division import (
    DROPPED,
    TEST,
    TRAIN,
    VALIDATION,
    Divided,
    Divider,
    Ranges,
)
from dlrm.preproc.fitting import Counted
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import (
    SUFFIXES,
    Day,
    Split,
    count_lines,
    number_rows,
    split_days,
    start_of_line,
    unpack,
)
from dlrm.preproc.logs.source import LogSource
from dlrm.preproc.packing import Written
from dlrm.preproc.prepare import count, fit, part_bytes, quarantine, transform, write_dataset
from dlrm.preproc.report.facts import Files
from dlrm.preproc.source import Target
from dlrm.preproc.stage import PreparationRun

UNLABELED = "unlabeled"
_SPLIT_BYTES = (1 << 20, 64 << 20)  # smallest and largest, unless given
_SPLITS_PER_CORE = 4
_NOTE = "The last day is held out: its first half is test, the rest validation. "
_ALL = "All days are training rows. "


def prepare(
    run: PreparationRun,
    files: Sequence[Path],
    num_days: int | None = None,
    unlabeled: Path | None = None,
) -> dict[str, Any]:
    """Writes a whole dataset; returns its cardinalities, and the totals of each split.

    All days except the last are train/; of the n rows of the last day, the first floor(n/2) are
    test/, the others validation/. With `hold_out` of the options false, all days are train/.

    Args:
        run: the engine, the folder and the options, which are `LogOptions`.
        files: one file per day; or one for all days, with `num_days`.
        num_days: number of days of equally many lines to cut a single file into.
        unlabeled: a log without labels to transform as well.

    Raises:
        ValueError: the options do not match the days.
        TaskError: a line is unreadable, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    if (facts := run.work.result("described")) is not None:
        return facts
    splits, counted = _counted_days(run, files, num_days)
    last_day, all_rows = splits[-1].day, sum(split.rows for split in splits)
    train_rows = sum(split.rows for split in splits if split.day < last_day)
    if not all_rows:
        raise ValueError("the input has no line that can be read; expected one or more")
    half = train_rows + (all_rows - train_rows) // 2
    divider = Ranges((0, all_rows), (TRAIN,))
    if run.options.hold_out:
        divider = Ranges((0, train_rows, half, all_rows), (TRAIN, TEST, VALIDATION))
    divided = _divided(run, run.options.log_format, divider, splits, counted)
    note = _NOTE if run.options.hold_out else _ALL
    days = Files([f"day {day}" for day in range(last_day + 1)], "day", note)
    more = None if unlabeled is None else partial(_transform_unlabeled, run, unlabeled)
    return write_dataset(run, divided, days, more=more)


def _counted_days(
    run: PreparationRun, files: Sequence[Path], num_days: int | None
) -> tuple[list[Split], Counted]:
    """Unpacks and cuts the input, and reads every line once."""
    options: LogOptions = run.options
    days = _unpacked(run, files, "input")
    if num_days is not None:
        (day,) = days
        days = _cut(run, day, num_days)
    splits = _splits(run, "count", days)
    first, last = options.dictionary_days or (0, len(days) - 1)
    if not 0 <= first <= last < len(days):
        raise ValueError(
            f"--dictionary_days {first}-{last}: expected days within 0-{len(days) - 1}"
        )
    fits = [TRAIN if first <= day <= last else TEST for day in range(len(days))]
    divider = Divider(options.division, options.schema, 0, fits)
    source = LogSource(options.schema, options.log_format)
    if run.parent is not None:
        run.parent.lookups = str(run.write_lookups("parent", run.parent.transform))
    counted = count(run, source, divider, splits)
    splits = number_rows(splits, counted.facts)
    quarantine(run, splits, counted)
    return splits, counted


def _numbered(
    run: PreparationRun, name: str, files: Sequence[Path], log_format: LogFormat
) -> tuple[list[Split], Counted]:
    """Unpacks the input and reads every line once, only to count rows."""
    splits = _splits(run, name, _unpacked(run, files, name))
    divider = Divider(run.options.division, run.options.schema, 0)
    source = LogSource(run.options.schema, log_format)
    counted = count(run, source, divider, splits, f"{name} count", fit=False)
    splits = number_rows(splits, counted.facts)
    quarantine(run, splits, counted)
    return splits, counted


def _unpacked(run: PreparationRun, files: Sequence[Path], name: str) -> list[Day]:
    """Returns the days of the files, with compressed ones unpacked into the work folder."""
    packed = [path for path in files if path.suffix in SUFFIXES]
    paths = {path: path for path in files}
    if packed:
        folder = run.work.folder(f"{name}.unpacked")
        paths |= {path: folder / path.stem for path in packed}
        with run.stage("unpack") as stage:
            items = [(str(path), str(paths[path])) for path in packed]
            unpacked = run.work.once(f"{name}.unpack", lambda: [*run.engine.map(_unpack, items)])
            stage.size = sum(unpacked)
    return [
        Day(str(paths[path].resolve()), 0, paths[path].stat().st_size, str(path)) for path in files
    ]


def _unpack(item: tuple[str, str]) -> int:
    return unpack(*item)


def _cut(run: PreparationRun, day: Day, num_days: int) -> list[Day]:
    """Cuts a file into days of equally many lines; the first days get one more for a remainder."""
    with run.stage("cut") as stage:
        chunks = _splits(run, "cut", [day])
        lines = run.work.once("cut", lambda: [*run.engine.map(count_lines, chunks)])
        total, stage.size = sum(lines), sum(chunk.size for chunk in chunks)
        if total < num_days:
            raise ValueError(
                f"{day.source}: expected {num_days} lines or more, one a day (--num_days), got "
                f"{total}"
            )
        edges = [0]
        for number in range(1, num_days):
            line = number * (total // num_days) + min(number, total % num_days)
            chunk = 0
            while line >= lines[chunk]:
                line -= lines[chunk]
                chunk += 1
            edges.append(start_of_line(chunks[chunk], line))
        edges.append(day.end)
    return [day._replace(begin=a, end=b) for a, b in zip(edges, edges[1:], strict=False)]


def _splits(run: PreparationRun, name: str, days: Sequence[Day]) -> list[Split]:
    """Cuts days into splits: those of a resumed run, or new ones."""

    def cut() -> list[dict[str, Any]]:
        text = sum(day.end - day.begin for day in days)
        split_bytes = part_bytes(run, text, _SPLIT_BYTES, _SPLITS_PER_CORE, " of logs")
        return [asdict(split) for split in split_days(days, split_bytes)]

    return [Split(**split) for split in run.work.once(f"{name}.splits", cut)]


def _transform_unlabeled(run: PreparationRun, path: Path) -> Written:
    """Transforms a log without labels, in the order of its lines."""
    log_format = replace(run.options.log_format, labeled=False)
    splits, counted = _numbered(run, UNLABELED, [path], log_format)
    rows = sum(split.rows for split in splits)
    divided = _divided(run, log_format, Ranges((0, rows), (TRAIN,)), splits, counted)
    target = Target(UNLABELED, rows, TRAIN, labeled=False)
    return transform(run, divided, [target], UNLABELED)


def _divided(
    run: PreparationRun,
    log_format: LogFormat,
    divider: Ranges,
    splits: Sequence[Split],
    counted: Counted,
) -> Divided:
    source, rows = LogSource(run.options.schema, log_format), divider.count(splits)
    return Divided(source, divider, splits, rows, np.zeros((*rows.shape, 0), np.int64), counted)


def fit_days(run: PreparationRun, files: Sequence[Path]) -> None:
    """Fits a transform only, as `--mode generate_models` does."""
    if run.work.result("described") is None:
        splits, counted = _counted_days(run, files, None)
        fit(run, counted, run.work.output)
        rows = sum(split.rows for split in splits)
        write_manifest(run.work.output, "transform", rows=rows)
        run.work.finish_output(True)


def transform_days(
    run: PreparationRun, files: Sequence[Path], half: str, directory: Path, labeled: bool
) -> dict[str, int]:
    """Applies a fitted transform to days or half their rows, as `--mode transform` does.

    Returns:
        Totals of the rows; see `transform_split`.
    """
    options, fitted = run.options, Transform.load(directory)
    shape = options.log_format
    if not fitted.is_log:
        raise ValueError(f"{directory}: expected the transform of a log, got that of a table")
    if (fitted.num_numerical, fitted.num_categorical) != (
        shape.num_numerical,
        shape.num_categorical,
    ):
        raise ValueError(
            f"{directory}: made for {fitted.num_numerical} numerical and {fitted.num_categorical} "
            f"categorical columns, got --num_numerical {shape.num_numerical} --num_categorical "
            f"{shape.num_categorical}"
        )
    if (totals := run.work.result("described")) is not None:
        return totals
    run.work.output.mkdir(exist_ok=True)
    splits, counted = _numbered(run, "input", files, replace(shape, labeled=labeled))
    rows = sum(split.rows for split in splits)
    first = rows // 2 if half == "second" else 0
    last = rows // 2 if half == "first" else rows
    with run.stage("dictionary"):
        run.write_lookups("lookups", directory)
    divider = Ranges((0, first, last, rows), (DROPPED, TRAIN, DROPPED))
    counts = divider.count(splits)[:, TRAIN].tolist()
    used = [split for split, some in zip(splits, counts, strict=True) if some]
    shuffled = options.output_ordering == "total_random"
    target = Target("", last - first, shuffled=shuffled, labeled=labeled)
    divided = _divided(run, replace(shape, labeled=labeled), divider, used, counted)
    totals = transform(run, divided, [target], directory=directory).totals[""]
    write_manifest(run.work.output, "split", rows=target.rows)
    run.work.finish_output(totals)
    return totals
