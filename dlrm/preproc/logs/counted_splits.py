"""Splits of raw logs with known rows: the stages unpack, cut and count."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrm.data.sources.log_lines import LogFormat
from dlrm.limits import MAX_TASKS
from dlrm.preproc.execution.engines import TaskError
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
from dlrm.preproc.stages.dictionary_merge import CountJob, count_split
from dlrm.preproc.stages.pipeline import count_buckets
from dlrm.preproc.stages.stage import QUARANTINE, Run

_SPLIT_BYTES = (1 << 20, 64 << 20)  # smallest and largest, unless given
_SPLITS_PER_CORE = 4
_COUNT_BUCKET_BYTES = 256 << 20  # of text


def counted_splits(run: Run, files: Sequence[Path], num_days: int | None) -> list[Split]:
    """Unpacks and cuts the input, and reads every line once; returns splits with known rows."""
    days = _unpacked(run, files, "input")
    if num_days is not None:
        (day,) = days
        days = _cut(run, day, num_days)
    splits = _splits(run, "count", days)
    first, last = run.options.dictionary_days or (0, len(days) - 1)
    if not 0 <= first <= last < len(days):
        raise ValueError(
            f"--dictionary_days {first}-{last}: expected days within 0-{len(days) - 1}"
        )
    job = CountJob(
        LogSource(run.options.log_format, (first, last)),
        str(run.work.folder("counts")),
        count_buckets(run, sum(split.size for split in splits), _COUNT_BUCKET_BYTES),
        run.options.quarantine,
    )
    return _counted(run, "count", "count", splits, job)


def numbered_splits(
    run: Run, name: str, files: Sequence[Path], log_format: LogFormat
) -> list[Split]:
    """Unpacks the input and reads every line once, only to count rows."""
    splits = _splits(run, name, _unpacked(run, files, name))
    job = CountJob(LogSource(log_format), "", 1, run.options.quarantine)
    return _counted(run, f"{name} count", f"{name}.count", splits, job)


def _counted(
    run: Run, stage_name: str, name: str, splits: list[Split], job: CountJob
) -> list[Split]:
    with run.stage(stage_name) as stage:
        sizes = [split.size for split in splits]
        task = partial(count_split, job=job)
        counted = stage.tasks(name, task, list(enumerate(splits)), sizes)
        splits = number_rows(splits, [result["rows"] for result in counted])
        # Runs started by version 0.1.0 have no checksums.
        crcs = [result.get("crc") for result in counted]
        splits = [replace(split, crc=crc) for split, crc in zip(splits, crcs, strict=True)]
        stage.rows, stage.size = num_rows(splits), sum(sizes)
    _quarantine(run, splits, [result["rejected"] for result in counted])
    return splits


def _unpacked(run: Run, files: Sequence[Path], name: str) -> list[Day]:
    """Returns the days of the files, with compressed ones unpacked into the work folder."""
    packed = [path for path in files if path.suffix in SUFFIXES]
    paths = {path: path for path in files}
    if packed:
        folder = run.work.folder(f"{name}.unpacked")
        paths |= {path: folder / path.stem for path in packed}
        with run.stage("unpack") as stage:
            sizes = [path.stat().st_size for path in packed]
            items = [(str(path), str(paths[path])) for path in packed]
            unpacked = stage.tasks(f"{name}.unpack", _unpack, items, sizes)
            stage.size = sum(result["bytes"] for result in unpacked)
    return [
        Day(str(paths[path].resolve()), 0, paths[path].stat().st_size, str(path)) for path in files
    ]


def _unpack(item: tuple[str, str]) -> dict[str, Any]:
    return unpack(*item)


def _cut(run: Run, day: Day, num_days: int) -> list[Day]:
    """Cuts a file into days of equally many lines; the first days get one more for a remainder."""
    with run.stage("cut") as stage:
        chunks = _splits(run, "cut", [day])
        sizes = [chunk.size for chunk in chunks]
        lines = [r["lines"] for r in stage.tasks("cut", _count_lines, chunks, sizes)]
        total, stage.size = sum(lines), sum(sizes)
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


def _count_lines(split: Split) -> dict[str, Any]:
    return {"lines": count_lines(split)}


def _splits(run: Run, name: str, days: Sequence[Day]) -> list[Split]:
    """Cuts days into splits: those of a resumed run, or new ones."""
    stored = run.work.result(f"{name}.splits")
    if stored is None:
        smallest, largest = _SPLIT_BYTES
        text = sum(day.end - day.begin for day in days)
        if run.options.split_bytes and text > MAX_TASKS * run.options.split_bytes:
            least = -(-text // MAX_TASKS)
            raise ValueError(
                f"--split_bytes {run.options.split_bytes}: expected {least} or more, "
                f"which cuts {text} bytes of logs into {MAX_TASKS} tasks"
            )
        even = text // (_SPLITS_PER_CORE * run.engine.cores)
        split_bytes = run.options.split_bytes or min(max(even, smallest), largest)
        stored = [asdict(split) for split in split_days(days, split_bytes)]
        run.work.finish(f"{name}.splits", stored)
    return [Split(**split) for split in stored]


def num_rows(splits: Sequence[Split], first_day: int = 0, last_day: int | None = None) -> int:
    """Returns the rows of the splits of some days, or of all."""
    return sum(
        split.rows
        for split in splits
        if split.day >= first_day and (last_day is None or split.day <= last_day)
    )


def _quarantine(run: Run, splits: Sequence[Split], rejected: Sequence[list]) -> None:
    """Writes the lines that were left out, one file per day; raises an error if they are too many.

    Each line has its number, the reason, and its text.
    """
    bad = sum(len(lines) for lines in rejected)
    if not run.options.quarantine:
        return
    total = bad + num_rows(splits)
    if bad > run.options.max_bad_lines * total:
        raise TaskError(
            f"{bad} of {total} lines cannot be read, a share above --max_bad_lines "
            f"{run.options.max_bad_lines}; the first: {_first_rejected(splits, rejected)}"
        )
    folder = run.work.output / QUARANTINE
    folder.mkdir(parents=True, exist_ok=True)
    for source in dict.fromkeys(split.source for split in splits):
        lines_before, texts = 0, []
        for split, lines in zip(splits, rejected, strict=True):
            if split.source == source:
                texts += [f"{lines_before + n + 1}\t{why}\t{text}\n" for n, why, text in lines]
                lines_before += split.rows + len(lines)
        name = Path(source).name
        (folder / f"{name}.tsv").write_text("".join(texts), encoding="utf-8")
    run.say(f"{'quarantined:':<12}{bad:>14,} lines")


def _first_rejected(splits: Sequence[Split], rejected: Sequence[list]) -> str:
    before: dict[str, int] = {}
    for split, lines in zip(splits, rejected, strict=True):
        if lines:
            number, why, _ = lines[0]
            return f"{split.source}: line {before.get(split.source, 0) + number + 1}, {why}"
        before[split.source] = before.get(split.source, 0) + split.rows
    raise AssertionError("no line was rejected")
