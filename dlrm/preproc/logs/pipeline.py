"""The stages that turn raw logs into a dataset, on any engine.

    unpack      compressed files, if there are any
    cut         one file into days of equally many lines, if there is one file

Those of `dlrm.preproc.prepare` follow. Every finished stage leaves a marker in a `WorkFolder`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.transform.transform import Transform
from dlrm.manifest import write_manifest
from dlrm.preproc.fitting import Counted
from dlrm.preproc.logs.options import LogOptions
from dlrm.preproc.logs.raw_log import (
    COMPRESSIONS,
    LogSource,
    Split,
    count_lines,
    number_rows,
    split_days,
    start_of_line,
    unpack,
)
from dlrm.preproc.packing import Written
from dlrm.preproc.prepare import count, fit, part_bytes, quarantine, transform, write_dataset
from dlrm.preproc.report.facts import Files
from dlrm.preproc.source import Target
from dlrm.preproc.splits import DROPPED, TEST, TRAIN, VALIDATION, Ranges, SplitRows, Splitter
from dlrm.preproc.stage import PreparationRun

UNLABELED = "unlabeled"
_SPLIT_BYTES = (1 << 20, 64 << 20)  # smallest and largest, unless given
_SPLITS_PER_CORE = 4


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
    source, splits, counted = _read(run, files, num_days)
    days, end = range(splits[-1].file + 1), sum(split.rows for split in splits)
    if not end:
        raise ValueError("the input has no line that can be read; expected one or more")
    splitter, note = Ranges([0, end], [TRAIN]), "All days are training rows. "
    if run.options.hold_out:
        begin = sum(split.rows for split in splits if split.file < days[-1])
        edges = [0, begin, begin + (end - begin) // 2, end]
        splitter = Ranges(edges, [TRAIN, TEST, VALIDATION])
        note = "The last day is held out: its first half is test, the rest validation. "
    names = Files([f"day {day}" for day in days], "day", note)
    more = None if unlabeled is None else partial(_transform_unlabeled, run, unlabeled)
    return write_dataset(run, _split(splitter, source, splits, counted), names, more=more)


def _transform_unlabeled(run: PreparationRun, path: Path) -> Written:
    """Transforms a log without labels, in the order of its lines."""
    source, splits, counted = _read(run, [path], fit=False, name=UNLABELED, labeled=False)
    target = Target(UNLABELED, sum(split.rows for split in splits), TRAIN, labeled=False)
    split_rows = _split(Ranges([0, target.rows], [TRAIN]), source, splits, counted)
    return transform(run, split_rows, [target], UNLABELED)


def _read(
    run: PreparationRun,
    files: Sequence[Path],
    num_days: int | None = None,
    fit: bool = True,
    name: str = "input",
    labeled: bool = True,
) -> tuple[LogSource, list[Split], Counted]:
    """Unpacks and cuts the input, and reads every line once; only counts lines unless `fit`."""
    options: LogOptions = run.options
    days, fits = _unpacked(run, files, name), list[int]()
    if num_days is not None:
        days = _cut(run, days[0], num_days)
    splits = _splits(run, "count" if fit else name, days)
    if fit:
        first, last = options.dictionary_days or (0, len(days) - 1)
        if not 0 <= first <= last < len(days):
            raise ValueError(
                f"--dictionary_days {first}-{last}: expected days within 0-{len(days) - 1}"
            )
        fits = [TRAIN if first <= day <= last else TEST for day in range(len(days))]
        if run.parent is not None:
            run.parent.lookups = str(run.write_lookups("parent", run.parent.transform))
    splitter = Splitter(options.division, options.schema, 0, fits)
    source = LogSource(options.schema, replace(options.log_format, labeled=labeled))
    counted = count(run, source, splitter, splits, "count" if fit else f"{name} count", fit)
    splits = number_rows(splits, counted.facts)
    quarantine(run, splits, counted)
    return source, splits, counted


def _split(splitter: Ranges, source: LogSource, parts: list[Split], counted: Counted) -> SplitRows:
    rows = splitter.count(parts)
    return SplitRows(source, splitter, parts, rows, np.zeros((*rows.shape, 0), np.int64), counted)


def _unpacked(run: PreparationRun, files: Sequence[Path], name: str) -> list[Split]:
    """Returns the days of the files, with compressed ones unpacked into the work folder."""
    packed = [path for path in files if path.suffix in COMPRESSIONS]
    paths = {path: run.work.folder(f"{name}.unpacked") / path.stem for path in packed}
    if packed:
        with run.stage("unpack") as stage:
            items = [(str(path), str(target)) for path, target in paths.items()]
            sizes = run.work.once(f"{name}.unpack", lambda: [*run.engine.map(unpack, items)])
            stage.size = sum(sizes)
    days = []
    for number, path in enumerate(files):
        read = paths.get(path, path).resolve()
        days.append(Split(str(read), str(path), number, 0, read.stat().st_size))
    return days


def _cut(run: PreparationRun, day: Split, num_days: int) -> list[Split]:
    """Cuts a file into days of equally many lines; the first days get one more for a remainder."""
    with run.stage("cut") as stage:
        chunks = _splits(run, "cut", [day])
        lines = run.work.once("cut", lambda: [*run.engine.map(count_lines, chunks)])
        total, stage.size = sum(lines), day.size
        if total < num_days:
            raise ValueError(
                f"{day.source}: expected {num_days} lines or more, one a day (--num_days), got "
                f"{total}"
            )
        before = np.cumsum([0, *lines])  # each chunk
        edges = []
        for number in range(num_days):
            line = number * (total // num_days) + min(number, total % num_days)
            chunk = int(np.searchsorted(before, line, side="right")) - 1
            edges.append(start_of_line(chunks[chunk], line - before[chunk]))
    pairs = pairwise([*edges, day.end])
    return [day._replace(file=number, begin=a, end=b) for number, (a, b) in enumerate(pairs)]


def _splits(run: PreparationRun, name: str, days: Sequence[Split]) -> list[Split]:
    """Cuts days into splits, which are of the same size in a resumed run."""
    how = sum(day.size for day in days), _SPLIT_BYTES, _SPLITS_PER_CORE, " of logs"
    return split_days(days, run.work.once(f"{name}.part_bytes", lambda: part_bytes(run, *how)))


def fit_days(run: PreparationRun, files: Sequence[Path]) -> None:
    """Fits a transform only, as `--mode generate_models` does."""
    if run.work.result("described") is None:
        _, splits, counted = _read(run, files)
        fit(run, counted, run.work.output)
        write_manifest(run.work.output, "transform", rows=sum(split.rows for split in splits))
        run.work.finish_output(True)


def transform_days(
    run: PreparationRun, files: Sequence[Path], half: str, directory: Path, labeled: bool
) -> dict[str, int]:
    """Applies a fitted transform to days or half their rows, as `--mode transform` does.

    Returns:
        Totals of the rows; see `packed_rows`.
    """
    options, fitted = run.options, Transform.load(directory)
    shape = options.log_format.num_numerical, options.log_format.num_categorical
    if not fitted.is_log:
        raise ValueError(f"{directory}: expected the transform of a log, got that of a table")
    if (fitted.num_numerical, fitted.num_categorical) != shape:
        raise ValueError(
            f"{directory}: made for {fitted.num_numerical} numerical and {fitted.num_categorical} "
            f"categorical columns, got --num_numerical {shape[0]} --num_categorical {shape[1]}"
        )
    if (totals := run.work.result("described")) is not None:
        return totals
    run.work.output.mkdir(exist_ok=True)
    source, splits, counted = _read(run, files, fit=False, labeled=labeled)
    with run.stage("dictionary"):
        run.write_lookups("lookups", directory)
    rows = sum(split.rows for split in splits)
    first = rows // 2 if half == "second" else 0
    last = rows // 2 if half == "first" else rows
    splitter = Ranges([0, first, last, rows], [DROPPED, TRAIN, DROPPED])
    counts = splitter.count(splits)[:, TRAIN].tolist()
    used = [split for split, some in zip(splits, counts, strict=True) if some]
    shuffled = options.output_ordering == "total_random"
    target = Target("", last - first, shuffled=shuffled, labeled=labeled)
    split_rows = _split(splitter, source, used, counted)
    totals = transform(run, split_rows, [target], directory=directory).totals[""]
    write_manifest(run.work.output, "split", rows=target.rows)
    run.work.finish_output(totals)
    return totals
