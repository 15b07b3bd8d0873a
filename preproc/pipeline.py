"""The stages of preprocessing, whoever runs their tasks: from raw logs to a dataset that is whole.

    unpack      compressed files, if there are any
    cut         one file into days of equally many lines, if there is one file
    count       read every line once: rows, how often each value is there, lines that cannot be read
    dictionary  merge the counts, and give ids to the values that are frequent enough
    transform   read every line once more and write rows; those to be shuffled go into buckets
    shuffle     sort each bucket and write its rows
    describe    the report, the files that say what is in the dataset, and their checksums

Every task leaves a file when it is done, and every stage a marker, in a `WorkFolder`.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from dlrm.data import layout
from dlrm.data.dictionaries import FrequencyLimit
from dlrm.data.feature_spec import FeatureSpec
from dlrm.data.log_lines import LogFormat
from dlrm.data.transform import NUMERIC_TRANSFORMS, Transform, save_facts
from dlrm.files import crc32, write_manifest
from preproc import report
from preproc.dictionaries import (
    CountJob,
    FitJob,
    count_split,
    fit_columns,
    merge_bucket,
    write_lookups,
)
from preproc.engines import Engine, TaskError
from preproc.raw_log import (
    SUFFIXES,
    Day,
    Split,
    count_lines,
    number_rows,
    split_days,
    start_of_line,
    unpack,
)
from preproc.shuffle_files import remove_unfinished, total_counts
from preproc.tasks import (
    OUTPUT_FORMATS,
    Job,
    Target,
    create_files,
    transform_split,
    write_bucket,
)
from preproc.work_folder import Progress, WorkFolder

ORDERINGS = ("total_random", "input")
HALVES = ("all", "first", "second")
BAD_LINES = ("fail", "quarantine")
QUARANTINE = "quarantine"  # directory of the lines that were left out
UNLABELLED = "unlabelled"
_SPLIT_BYTES = (1 << 20, 64 << 20)  # smallest and largest, unless it is given
_SPLITS_PER_CORE = 4
_BUCKET_BYTES = 64 << 20  # of text whose rows one task sorts: a packed row is half of it
_GROUPS = 12
_COUNT_BUCKET_BYTES = 256 << 20  # of text whose counts one task merges, whatever repeats


@dataclass(frozen=True)
class Options:
    """How logs are turned into numbers. Only `split_bytes` and `max_bad_lines` change no output.

    Attributes:
        dictionary_days: first and last day whose values get ids; None: all.
        bad_lines: "fail", or "quarantine": leave them out and write them beside.
        max_bad_lines: the share of all lines that may be left out.
        report: whether `report.html` and `report.json` are written.
    """

    log_format: LogFormat = LogFormat()
    frequency_limit: str = "15"
    numeric_transform: str = "readme"
    output_ordering: str = "total_random"
    dictionary_days: tuple[int, int] | None = None
    seed: int = 0
    split_bytes: int | None = None
    output_format: str = "split_binary"
    bad_lines: str = "fail"
    max_bad_lines: float = 0.001
    report: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("numeric_transform", NUMERIC_TRANSFORMS),
            ("output_ordering", ORDERINGS),
            ("output_format", OUTPUT_FORMATS),
            ("bad_lines", BAD_LINES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: expected one of {allowed}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"--split_bytes {self.split_bytes}: expected 1 or more")
        if not 0 <= self.max_bad_lines <= 1:
            raise ValueError(f"--max_bad_lines {self.max_bad_lines}: expected a share, 0 to 1")
        self.parse_limit()

    def parse_limit(self) -> FrequencyLimit:
        """Returns what `frequency_limit` says of each column.

        Raises:
            ValueError: it is no limit, or has one for a column that is not categorical.
        """
        shape = self.log_format
        return FrequencyLimit.parse(
            self.frequency_limit, shape.num_numerical, shape.num_categorical
        )

    @property
    def quarantine(self) -> bool:
        """Whether lines that cannot be read are left out."""
        return self.bad_lines == "quarantine"

    def facts(self) -> dict[str, Any]:
        """What decides the bytes that are written, by flag."""
        values = asdict(self)
        shape = values.pop("log_format")
        del values["split_bytes"], values["max_bad_lines"]
        return {f"--{name}": value for name, value in (shape | values).items()}


@dataclass
class Run:
    """What all stages need: who runs tasks, where they leave what is done, and what to say."""

    engine: Engine
    work: WorkFolder
    options: Options
    say: Callable[[str], None] = print

    @contextmanager
    def stage(self, name: str) -> Iterator["Stage"]:
        """Says, at the end of a stage, how long it took."""
        stage, start = Stage(self, name), time.perf_counter()
        yield stage
        seconds = max(time.perf_counter() - start, 1e-9)
        rate = f"{stage.rows:>14,} rows" if stage.rows is not None else " " * 19
        speed = f" {stage.size / seconds / 1e6:>10,.1f} MB/s" if stage.size else ""
        self.say(f"{name + ':':<12}{rate} {seconds:8.1f} s{speed}")


@dataclass
class Stage:
    """A stage that goes on, and what it has to say at its end."""

    run: Run
    name: str
    rows: int | None = None
    size: int = 0

    def tasks(
        self,
        name: str,
        task: Callable[[Any], dict[str, Any]],
        items: Sequence[Any],
        sizes: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs a task on items, of `sizes` in bytes and of `rows`, and shows how it goes."""
        progress = Progress(self.name, len(items), sizes, rows)
        try:
            return self.run.work.run(self.run.engine, name, task, items, progress)
        finally:
            progress.clear()


def input_facts(files: Sequence[Path]) -> dict[str, str]:
    """What is remembered of input files, to notice when they change."""
    facts = {}
    for path in files:
        status = path.stat()
        facts[str(path.resolve())] = f"of {status.st_size} bytes, changed at {status.st_mtime_ns}"
    return facts


def prepare(
    run: Run, files: Sequence[Path], num_days: int | None = None, unlabelled: Path | None = None
) -> dict[str, Any]:
    """Writes a whole dataset; returns its cardinalities, and totals of each split.

    The days but the last are train/; the first floor(n/2) rows of the last are test/, the rest of
    it is validation/.

    Args:
        run: the engine, the folder and the options.
        files: one a day; or one for all days, with `num_days`.
        num_days: into how many days a single file is cut, of equally many lines.
        unlabelled: a log without labels, which is transformed too.

    Raises:
        ValueError: the options do not fit the days.
        TaskError: a line is not as it should be, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    if (facts := run.work.result("described")) is not None:
        return facts
    splits = _counted_splits(run, files, num_days)
    last_day = splits[-1].day
    train_rows, all_rows = _rows(splits, 0, last_day - 1), _rows(splits)
    if not all_rows:
        raise ValueError("the input has no line that can be read; expected one or more")
    half = train_rows + (all_rows - train_rows) // 2
    fit(run, splits, run.work.output / layout.TRANSFORM)
    shuffled = run.options.output_ordering == "total_random"
    edges = (0, train_rows, half, all_rows)
    targets = [
        Target(name, first, last, shuffled and name == "train")
        for name, first, last in zip(layout.SPLITS, edges, edges[1:], strict=False)
    ]
    totals = transform(run, splits, targets)
    if unlabelled is not None:
        totals |= _transform_unlabelled(run, unlabelled)
    return _describe(run, splits, totals)


def _counted_splits(run: Run, files: Sequence[Path], num_days: int | None) -> list[Split]:
    """Unpacks and cuts the input, and reads every line once; the splits then know their rows."""
    days = _unpacked(run, files, "input")
    if num_days is not None:
        (day,) = days
        days = _cut(run, day, num_days)
    splits = _splits(run, "count", days, 0)
    first, last = run.options.dictionary_days or (0, len(days) - 1)
    if not 0 <= first <= last < len(days):
        raise ValueError(
            f"--dictionary_days {first}-{last}: expected days within 0-{len(days) - 1}"
        )
    with run.stage("count") as stage:
        job = CountJob(
            run.options.log_format,
            str(run.work.folder("counts")),
            _count_buckets(run, splits),
            (first, last),
            run.options.quarantine,
        )
        sizes = [split.size for split in splits]
        task = partial(count_split, job=job)
        counted = stage.tasks("count", task, list(enumerate(splits)), sizes)
        splits = number_rows(splits, [result["rows"] for result in counted])
        stage.rows, stage.size = _rows(splits), sum(sizes)
    _quarantine(run, splits, [result["rejected"] for result in counted])
    return splits


def _numbered_splits(
    run: Run, name: str, files: Sequence[Path], first_day: int, log_format: LogFormat
) -> list[Split]:
    """Unpacks the input and reads every line once, to know the rows alone."""
    splits = _splits(run, name, _unpacked(run, files, name), first_day)
    with run.stage(f"{name} count") as stage:
        sizes = [split.size for split in splits]
        job = CountJob(log_format, "", 1, (-1, -1), run.options.quarantine)
        task = partial(count_split, job=job)
        counted = stage.tasks(f"{name}.count", task, list(enumerate(splits)), sizes)
        splits = number_rows(splits, [result["rows"] for result in counted])
        stage.rows, stage.size = _rows(splits), sum(sizes)
    _quarantine(run, splits, [result["rejected"] for result in counted])
    return splits


def _unpacked(run: Run, files: Sequence[Path], name: str) -> list[Day]:
    """Returns the days of the files, of which compressed ones are unpacked into the work folder."""
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
    """Cuts a file into days of equally many lines; the first ones have the remaining lines."""
    with run.stage("cut") as stage:
        chunks = _splits(run, "cut", [day], 0)
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


def _splits(run: Run, name: str, days: Sequence[Day], first_day: int) -> list[Split]:
    """Cuts days into splits: those of the run that goes on, or new ones."""
    stored = run.work.result(f"{name}.splits")
    if stored is None:
        smallest, largest = _SPLIT_BYTES
        even = sum(day.end - day.begin for day in days) // (_SPLITS_PER_CORE * run.engine.cores)
        split_bytes = run.options.split_bytes or min(max(even, smallest), largest)
        stored = [asdict(split) for split in split_days(days, split_bytes, first_day)]
        run.work.finish(f"{name}.splits", stored)
    return [Split(**split) for split in stored]


def _count_buckets(run: Run, splits: Sequence[Split]) -> int:
    buckets = run.work.result("count.buckets")
    if buckets is None:
        text = sum(split.size for split in splits)
        buckets = max(run.engine.cores, -(-text // _COUNT_BUCKET_BYTES))
        run.work.finish("count.buckets", buckets)
    return buckets


def _rows(splits: Sequence[Split], first_day: int = 0, last_day: int | None = None) -> int:
    return sum(
        split.rows
        for split in splits
        if split.day >= first_day and (last_day is None or split.day <= last_day)
    )


def _quarantine(run: Run, splits: Sequence[Split], rejected: Sequence[list]) -> None:
    """Writes the lines that were left out, a file a day, and refuses when they are too many.

    A line there: its number, why it was left out, and its text.
    """
    bad = sum(len(lines) for lines in rejected)
    if not run.options.quarantine:
        return
    total = bad + _rows(splits)
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


def fit(run: Run, splits: Sequence[Split], directory: Path) -> None:
    """Makes dictionaries of the counts, and writes a transform."""
    shape, limit = run.options.log_format, run.options.parse_limit()
    buckets = _count_buckets(run, splits)
    first, last = run.options.dictionary_days or (0, splits[-1].day)
    work = run.work
    directory.mkdir(parents=True, exist_ok=True)
    with run.stage("dictionary") as stage:
        stage.rows = _rows(splits, first, last)
        counts = work.folder("counts")
        sources = [str(counts / str(i)) for i, s in enumerate(splits) if first <= s.day <= last]
        merge = partial(
            merge_bucket, sources=sources, limit=limit, folder=str(work.folder("merged"))
        )
        if (merged := work.result("merged")) is None:
            merged = stage.tasks("merge", merge, range(buckets))
            work.finish("merged", merged)
        _remove(counts)
        job = FitJob(
            str(work.folder("merged")),
            [result["kept"] for result in merged],
            str(directory),
            str(work.folder("lookups")),
        )
        if (sizes := work.result("fitted")) is None:
            columns = _groups(range(shape.num_categorical))
            fitted = stage.tasks("fit", partial(fit_columns, job=job), columns)
            by_column = {int(i): size for part in fitted for i, size in part.items()}
            sizes = [by_column[i] for i in range(shape.num_categorical)]
            work.finish("fitted", sizes)
        _remove(work.folder("merged"))
    rule = run.options.numeric_transform
    save_facts(directory, shape.num_numerical, sizes, rule, limit)


def transform(
    run: Run,
    splits: Sequence[Split],
    targets: list[Target],
    name: str = "transform",
    directory: Path | None = None,
) -> dict[str, dict[str, int]]:
    """Transforms the rows of targets into the files of the output.

    Args:
        run: the engine, the folder and the options.
        splits: which know their rows.
        targets: which rows go where; one of them, or none, is shuffled.
        name: of the stage.
        directory: the fitted transform; that of the output if it is not given.

    Returns:
        For each target: rows, clicks, and so on, as `transform_split` counts them.
    """
    work = run.work
    job = _job(run, splits, targets, name, directory or work.output / layout.TRANSFORM)
    with run.stage(name) as stage:
        create_files(job)
        rows, sizes = [split.rows for split in splits], [split.size for split in splits]
        task = partial(transform_split, job=job)
        parts = stage.tasks(name, task, list(enumerate(splits)), sizes, rows)
        stage.rows, stage.size = sum(rows), sum(sizes)
    totals = {
        target.name: _sum([part.get(target.name, {}) for part in parts]) for target in targets
    }
    for target in targets:
        if totals[target.name].get("rows", 0) != target.rows:
            raise TaskError(
                f"{target.name}: expected {target.rows} rows, as were counted before, got "
                f"{totals[target.name].get('rows', 0)}: an input file has changed meanwhile"
            )
    for target in targets:
        if target.shuffled and target.rows:
            _shuffle(run, splits, parts, target, job)
    return totals


def _job(
    run: Run, splits: Sequence[Split], targets: list[Target], name: str, directory: Path
) -> Job:
    work, options = run.work, run.options
    if (buckets := work.result(f"{name}.buckets")) is None:
        text = sum(split.size for split in splits)
        buckets = max(2 * run.engine.cores, -(-text // (2 * _BUCKET_BYTES)))
        work.finish(f"{name}.buckets", buckets)
    labelled = all(target.labelled for target in targets)
    return Job(
        replace(options.log_format, labelled=labelled),
        str(directory),
        str(work.folder("lookups")),
        str(work.output),
        options.output_format,
        targets,
        str(work.folder(f"{name}.rows")),
        buckets,
        options.seed,
        options.quarantine,
        str(work.folder(f"{name}.statistics")) if options.report else None,
    )


def _shuffle(
    run: Run, splits: Sequence[Split], parts: Sequence[dict], target: Target, job: Job
) -> None:
    with run.stage("shuffle") as stage:
        stage.rows = target.rows
        if run.work.result("shuffled") is None:
            sources = [Path(job.shuffle, str(i)) for i, p in enumerate(parts) if target.name in p]
            rows = total_counts(sources).tolist()
            first_rows = [0, *accumulate(rows)][:-1]
            width = sum(dtype.itemsize for dtype in job.files(target).values())
            stage.tasks(
                "shuffle",
                partial(write_bucket, sources=[str(path) for path in sources], job=job),
                list(enumerate(first_rows)),
                [width * count for count in rows],
                rows,
            )
            run.work.finish("shuffled", True)
    _remove(Path(job.shuffle))


def _sum(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for part in counts for name in part)
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def _remove(folder: Path) -> None:
    """Removes what tasks left for a later stage, once it is finished."""
    shutil.rmtree(folder, ignore_errors=True)


def _transform_unlabelled(run: Run, path: Path) -> dict[str, dict[str, int]]:
    """Transforms a log without labels, in the order of its lines."""
    log_format = replace(run.options.log_format, labelled=False)
    splits = _numbered_splits(run, UNLABELLED, [path], 0, log_format)
    target = Target(UNLABELLED, 0, _rows(splits), labelled=False)
    return transform(run, splits, [target], UNLABELLED)


def _describe(
    run: Run, splits: Sequence[Split], totals: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """Writes the files that say what is in a dataset; the manifest last."""
    output, options = run.work.output, run.options
    fitted = Transform.load(output / layout.TRANSFORM)
    clicks = {name: totals[name].get("clicks", 0) for name in layout.SPLITS}
    clamped = {name: totals[name].get("clamped", 0) for name in layout.SPLITS}
    rows = {name: totals[name].get("rows", 0) for name in layout.SPLITS}
    with run.stage("describe"):
        if options.output_format == "split_binary":
            spec = FeatureSpec.default(
                output,
                fitted.num_numerical,
                fitted.cardinalities,
                layout.SPLITS,
                metadata={"clicks": clicks, "numerical_values_raised_to_1": clamped},
            )
            spec.save()
        layout.write_model_size(output, fitted.cardinalities)
        if options.report:
            report.write(run, splits, fitted, totals)
        remove_unfinished(output)
        layout.write_dataset_manifest(
            output, rows, fitted.cardinalities, transform_facts(options), _checksums(run)
        )
    facts = {"totals": totals, "cardinalities": fitted.cardinalities}
    run.work.finish_output(facts)
    return facts


def transform_facts(options: Options) -> dict[str, Any]:
    """What the manifest says of how the numbers were made."""
    return {
        "numeric_transform": options.numeric_transform,
        "frequency_limit": options.frequency_limit,
        "dictionary_days": options.dictionary_days and "{}-{}".format(*options.dictionary_days),
        "output_ordering": options.output_ordering,
        "seed": options.seed,
        "output_format": options.output_format,
        "bad_lines": options.bad_lines,
    }


def _checksums(run: Run) -> dict[str, str]:
    """CRC-32 of every large file, computed by the engine."""
    output = run.work.output
    names = [path.relative_to(output).as_posix() for path in sorted(output.rglob("*.bin"))]
    task = partial(_crc32_of, folder=str(output))
    parts = run.work.run(run.engine, "checksums", task, _groups(names))
    return {name: crc for part in parts for name, crc in part.items()}


def _crc32_of(names: list[str], folder: str) -> dict[str, Any]:
    return {name: crc32(Path(folder, name)) for name in names}


def _groups(items: Sequence[Any]) -> list[list[Any]]:
    """Shares small items out to tasks, since each task costs Spark a while."""
    return [part for i in range(_GROUPS) if (part := list(items[i::_GROUPS]))]


def fit_days(run: Run, files: Sequence[Path], num_days: int | None = None) -> None:
    """Fits a transform alone, as `--mode generate_models` does."""
    if run.work.result("described") is None:
        splits = _counted_splits(run, files, num_days)
        fit(run, splits, run.work.output)
        remove_unfinished(run.work.output)
        write_manifest(run.work.output, "transform", rows=_rows(splits))
        run.work.finish_output(True)


def transform_days(
    run: Run, files: Sequence[Path], half: str, directory: Path, labelled: bool
) -> dict[str, int]:
    """Applies a fitted transform to days or half their rows, as `--mode transform` does.

    Returns:
        Totals of the rows, as `transform_split` counts them.
    """
    options, fitted = run.options, Transform.load(directory)
    shape = options.log_format
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
    splits = _numbered_splits(run, "input", files, 0, replace(shape, labelled=labelled))
    rows = _rows(splits)
    first = rows // 2 if half == "second" else 0
    last = rows // 2 if half == "first" else rows
    with run.stage("dictionary") as stage:
        task = partial(
            write_lookups, transform=str(directory), folder=str(run.work.folder("lookups"))
        )
        stage.tasks("lookups", task, _groups(range(shape.num_categorical)))
    target = Target("", first, last, options.output_ordering == "total_random", labelled)
    used = [
        split for split in splits if split.first_row < last and split.first_row + split.rows > first
    ]
    totals = transform(run, used, [target], "transform", directory)[""]
    remove_unfinished(run.work.output)
    write_manifest(run.work.output, "split", rows=target.rows)
    run.work.finish_output(totals)
    return totals
