"""The stages of preprocessing, scheduled by Spark: dictionary, train, test, validation.

Spark runs the tasks of `preproc.tasks`, moves what they yield and retries; no row and no value is a
Python object on its way. Only counts of a split's distinct values are shuffled for the dictionary,
and packed rows where the training data is put in random order.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.data import layout
from dlrm.data.feature_spec import FeatureSpec
from dlrm.data.transform import (
    NUMERIC_TRANSFORMS,
    FrequencyLimit,
    Transform,
    save_facts,
)
from dlrm.files import staged_directory, write_manifest
from preproc import tasks
from preproc.raw_log import LogFormat, Split, count_rows, number_rows, split_days
from preproc.tasks import Target, Written

if TYPE_CHECKING:
    from pyspark import SparkContext

ORDERINGS = ("total_random", "input")
HALVES = ("all", "first", "second")
_SPLIT_BYTES = (1 << 20, 64 << 20)  # smallest and largest, unless it is given
_SPLITS_PER_CORE = 4
_BUCKET_BYTES = 64 << 20  # of packed rows that one task sorts
_COUNT_BUCKET_BYTES = 256 << 20  # of text whose counts one task merges, whatever repeats
_MARK = "dlrm-task-error:"


class TaskError(RuntimeError):
    """A task failed on its input or its output; the message is the task's own."""


class SparkError(RuntimeError):
    """There is no Spark, or it did not start, or it failed; its log says more."""


@dataclass(frozen=True)
class Options:
    """How logs are turned into numbers. Everything but `split_bytes` changes what is written."""

    log_format: LogFormat = LogFormat()
    frequency_limit: str = "15"
    numeric_transform: str = "readme"
    output_ordering: str = "total_random"
    dictionary_days: tuple[int, int] | None = None
    seed: int = 0
    split_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.numeric_transform not in NUMERIC_TRANSFORMS:
            raise ValueError(
                f"--numeric_transform {self.numeric_transform}: expected {NUMERIC_TRANSFORMS}"
            )
        if self.output_ordering not in ORDERINGS:
            raise ValueError(f"--output_ordering {self.output_ordering}: expected {ORDERINGS}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"--split_bytes {self.split_bytes}: expected 1 or more")
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


class Engine(NamedTuple):
    """A Spark context and what to say while it works."""

    spark: "SparkContext"
    say: Callable[[str], None] = print

    @property
    def cores(self) -> int:
        """Tasks that run at a time."""
        return max(self.spark.defaultParallelism, 1)


def prepare(engine: Engine, days: list[Path], staging: Path, options: Options) -> dict[str, Any]:
    """Writes a whole dataset into `staging`; returns rows, clicks and so on of each split.

    The days but the last are train/; the first floor(n/2) rows of the last are test/, the rest of
    it is validation/.

    Raises:
        ValueError: the options do not fit the days.
        TaskError: a line is not as it should be, or a file cannot be written.
        SparkError: Spark failed.
    """
    with _stage(engine, "count") as stage:
        splits = _numbered_splits(engine, days, 0, options)
        stage.rows = _rows(splits)
    last_day = len(days) - 1
    train_rows, all_rows = _rows(splits, 0, last_day - 1), _rows(splits)
    half = train_rows + (all_rows - train_rows) // 2
    transform = str(staging / layout.TRANSFORM)
    fit(engine, splits, Path(transform), options)
    written = {}
    for name, first, last in zip(
        layout.SPLITS, (0, train_rows, half), (train_rows, half, all_rows), strict=True
    ):
        target = Target(str(staging / name), first, last)
        ordering = options.output_ordering if name == "train" else "input"
        written[name] = write(engine, name, splits, transform, target, ordering, options)
    return _describe(staging, written, options)


def fit(engine: Engine, splits: list[Split], directory: Path, options: Options) -> None:
    """Fits the dictionaries on the splits of the dictionary's days and writes a transform."""
    shape, limit = options.log_format, options.parse_limit()
    first, last = options.dictionary_days or (0, splits[-1].day)
    if not splits[0].day <= first <= last <= splits[-1].day:
        raise ValueError(
            f"--dictionary_days {first}-{last}: expected days within "
            f"{splits[0].day}-{splits[-1].day}"
        )
    used = [split for split in splits if first <= split.day <= last]
    directory.mkdir()
    with _stage(engine, "dictionary") as stage:
        text = sum(split.end - split.begin for split in used)
        buckets = max(engine.cores, -(-text // _COUNT_BUCKET_BYTES))
        sizes = dict(
            _splits_rdd(engine, used)
            .flatMap(_named(partial(tasks.count_split, log_format=shape, buckets=buckets)))
            .partitionBy(buckets, int)
            .mapPartitions(_named(partial(_merge_partition, limit=limit)))
            .partitionBy(max(min(shape.num_categorical, 2 * engine.cores), 1), int)
            .mapPartitions(_named(partial(_fit_partition, directory=str(directory))))
            .collect()
        )
        stage.rows = _rows(used)
    save_facts(
        directory,
        shape.num_numerical,
        [sizes[i] for i in range(shape.num_categorical)],
        options.numeric_transform,
        limit,
    )


def write(
    engine: Engine,
    name: str,
    splits: list[Split],
    transform: str,
    target: Target,
    ordering: str,
    options: Options,
) -> Written:
    """Transforms a range of rows into the files of a directory."""
    fitted = Transform.load(transform)
    tasks.create_files(target, fitted)
    mine = [
        split
        for split in splits
        if split.first_row < target.last_row and split.first_row + split.rows > target.first_row
    ]
    shape = options.log_format
    with _stage(engine, name) as stage:
        if ordering == "input":
            write_split = partial(
                tasks.write_in_order, log_format=shape, transform=transform, target=target
            )
            parts = _splits_rdd(engine, mine).map(_named(write_split)).collect()
        else:
            parts = _shuffle(engine, mine, transform, target, options)
        written = sum(parts, Written())
        stage.rows = written.rows
    if written.rows != target.rows:
        raise TaskError(
            f"{name}: expected {target.rows} rows, as were counted before, got {written.rows}: "
            "a day file has changed meanwhile"
        )
    return written


def _shuffle(
    engine: Engine, splits: list[Split], transform: str, target: Target, options: Options
) -> list[Written]:
    text = sum(split.end - split.begin for split in splits)
    buckets = max(2 * engine.cores, -(-text // (2 * _BUCKET_BYTES)))  # a packed row is half of it
    route: dict[str, Any] = {"target": target, "seed": options.seed, "buckets": buckets}
    sizes = _splits_rdd(engine, splits).map(partial(tasks.bucket_sizes, **route)).sum()
    first_rows = [0, *accumulate(int(size) for size in sizes)]
    return (
        _splits_rdd(engine, splits)
        .flatMap(
            _named(
                partial(
                    tasks.shuffle_split, log_format=options.log_format, transform=transform, **route
                )
            )
        )
        .partitionBy(buckets, int)
        .mapPartitionsWithIndex(
            _named(
                partial(_write_partition, transform=transform, target=target, first_rows=first_rows)
            )
        )
        .collect()
    )


def _splits_rdd(engine: Engine, splits: list[Split]) -> Any:
    return engine.spark.parallelize(splits, max(len(splits), 1))


def _merge_partition(records: Iterator, limit: FrequencyLimit) -> Iterator:
    parts = [counts for _, counts in records]
    return tasks.merge_bucket(parts, limit) if parts else iter(())


def _fit_partition(records: Iterator, directory: str) -> Iterator:
    columns: dict[int, list] = {}
    for column, counts in records:
        columns.setdefault(column, []).append(counts)
    for column, parts in columns.items():
        yield tasks.fit_column(parts, column, directory)


def _write_partition(
    index: int, records: Iterator, transform: str, target: Target, first_rows: list[int]
) -> Iterator[Written]:
    parts = (packed for _, packed in records)
    yield tasks.write_bucket(parts, transform, target, first_rows[index])


class _named:  # noqa: N801  (used as a function)
    """A task whose errors about input and output can be told from Spark's own."""

    def __init__(self, task: Callable) -> None:
        self.task = task

    def __call__(self, *arguments: Any) -> Any:
        try:
            result = self.task(*arguments)
            return list(result) if isinstance(result, Iterator) else result
        except (ValueError, OSError) as error:
            raise RuntimeError(f"{_MARK}{error}{_MARK}") from None


def _numbered_splits(
    engine: Engine, days: list[Path], first_day: int, options: Options
) -> list[Split]:
    """Cuts the days into splits and counts their rows."""
    smallest, largest = _SPLIT_BYTES
    size = sum(path.stat().st_size for path in days)
    even = size // (_SPLITS_PER_CORE * engine.cores)
    split_bytes = options.split_bytes or min(max(even, smallest), largest)
    splits = split_days(days, split_bytes, first_day)
    with _failures():
        rows = _splits_rdd(engine, splits).map(_named(count_rows)).collect()
    return number_rows(splits, rows)


def _rows(splits: list[Split], first_day: int = 0, last_day: int | None = None) -> int:
    return sum(
        split.rows
        for split in splits
        if split.day >= first_day and (last_day is None or split.day <= last_day)
    )


def _describe(staging: Path, written: dict[str, Written], options: Options) -> dict[str, Any]:
    """Writes the files that say what is in a dataset; the manifest last."""
    transform = Transform.load(staging / layout.TRANSFORM)
    facts = {
        "numeric_transform": options.numeric_transform,
        "frequency_limit": options.frequency_limit,
        "dictionary_days": options.dictionary_days and "{}-{}".format(*options.dictionary_days),
        "output_ordering": options.output_ordering,
        "seed": options.seed,
    }
    clicks = {name: part.clicks for name, part in written.items()}
    clamped = {name: part.clamped for name, part in written.items()}
    spec = FeatureSpec.default(
        staging,
        transform.num_numerical,
        transform.cardinalities,
        layout.SPLITS,
        metadata={"clicks": clicks, "numerical_values_raised_to_1": clamped},
    )
    spec.save()
    layout.write_model_size(staging, transform.cardinalities)
    rows = {name: spec.num_rows(name) for name in layout.SPLITS}
    layout.write_dataset_manifest(staging, rows, transform.cardinalities, facts)
    return {
        "rows": rows,
        "clicks": clicks,
        "clamped": clamped,
        "cardinalities": transform.cardinalities,
    }


def fit_days(
    engine: Engine, days: list[Path], first_day: int, model_folder: Path, options: Options
) -> None:
    """Fits a transform alone, as `--mode generate_models` does."""
    with staged_directory(model_folder, replace=True) as staging:
        splits = _numbered_splits(engine, days, first_day, options)
        staging.rmdir()
        fit(engine, splits, staging, options)
        write_manifest(staging, "transform", rows=_rows(splits))


def transform_days(
    engine: Engine,
    days: list[Path],
    first_day: int,
    half: str,
    transform: Path,
    output: Path,
    options: Options,
) -> Written:
    """Applies a fitted transform to days or half their rows, as `--mode transform` does."""
    if half not in HALVES:
        raise ValueError(f"--half {half}: expected one of {HALVES}")
    fitted = Transform.load(transform)
    shape = options.log_format
    if (fitted.num_numerical, fitted.num_categorical) != (
        shape.num_numerical,
        shape.num_categorical,
    ):
        raise ValueError(
            f"{transform}: made for {fitted.num_numerical} numerical and {fitted.num_categorical} "
            f"categorical columns, got --num_numerical {shape.num_numerical} --num_categorical "
            f"{shape.num_categorical}"
        )
    with staged_directory(output, replace=True) as staging:
        splits = _numbered_splits(engine, days, first_day, options)
        rows = _rows(splits)
        first = rows // 2 if half == "second" else 0
        last = rows // 2 if half == "first" else rows
        staging.rmdir()
        target = Target(str(staging), first, last)
        ordering = options.output_ordering
        written = write(engine, output.name, splits, str(transform), target, ordering, options)
        write_manifest(staging, "split", rows=written.rows)
    return written


class _Stage:
    rows = 0


@contextmanager
def _stage(engine: Engine, name: str) -> Iterator[_Stage]:
    """Says how a stage goes, and at its end how long it took; failures become errors of ours."""
    stage, start = _Stage(), time.perf_counter()
    engine.spark.setJobGroup(name, name)
    with _progress(engine, name), _failures():
        yield stage
    seconds = max(time.perf_counter() - start, 1e-9)
    engine.say(
        f"{name + ':':<12}{stage.rows:>14,} rows {seconds:8.1f} s {stage.rows / seconds:>12,.0f} "
        "rows/s"
    )


@contextmanager
def _progress(engine: Engine, name: str) -> Iterator[None]:
    """Shows how many tasks are done, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    tracker = engine.spark.statusTracker()

    def show() -> None:
        while not over.wait(0.3):
            for identifier in tracker.getActiveStageIds():
                if info := tracker.getStageInfo(identifier):
                    text = f"{name}: {info.numCompletedTasks}/{info.numTasks} tasks"
                    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)


@contextmanager
def _failures() -> Iterator[None]:
    """Turns Spark's errors into one line: what the task said, else the cause that Spark found."""
    from py4j.protocol import Py4JError

    try:
        yield
    except Py4JError as error:
        text = str(error)
        if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
            raise TaskError(said[1]) from None
        named = r"^(?:Caused by: |: )?((?:[\w.$]+\.)?\w*(?:Error|Exception)): ?(.*)"
        causes = re.findall(named, text, re.MULTILINE)
        cause = ": ".join(causes[-1]) if causes else text.splitlines()[0]
        raise SparkError(f"Spark failed: {cause}") from error


@contextmanager
def spark_context(
    master: str,
    memory_gib: int,
    log: Path | None = None,
    settings: dict[str, str] | None = None,
) -> Iterator["SparkContext"]:
    """Starts Spark and stops it at the end.

    Args:
        master: "local[N]" or the address of a cluster.
        memory_gib: memory in all, and on a cluster that of the driver and of each executor; half is
            for the JVM, half for Python's workers.
        log: what the JVM prints goes there, not to the terminal.
        settings: Spark's own, which prevail.

    Raises:
        SparkError: there is no pyspark, or Spark does not start.
    """
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise SparkError(
            f"{sys.executable} has no pyspark ({error}); install it with: "
            f"{sys.executable} -m pip install 'pyspark>=4,<5'"
        ) from error
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path
    local = re.fullmatch(r"local(\[.*\])?", master)
    memory = f"{max(memory_gib // 2, 1)}g"
    configuration = {
        "spark.driver.memory": memory,
        "spark.executorEnv.PYTHONPATH": path,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_log4j()}",
        **(
            {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
            if local
            else {"spark.executor.memory": memory}
        ),
        **(settings or {}),
    }
    conf = SparkConf().setMaster(master).setAppName("dlrm preprocessing")
    conf.setAll(list(configuration.items()))
    try:
        with _new_local_folders_removed():
            with _standard_error_to(log), _failures():
                spark = SparkContext(conf=conf)
            try:
                yield spark
            finally:
                _stop(spark)
    except PySparkException as error:
        raise SparkError(f"Spark did not start: {error}; see {log}") from error
    except SparkError as error:
        raise SparkError(f"{error}; see {log}") from error


def _stop(spark: "SparkContext") -> None:
    """Stops Spark and its JVM, which removes the last of its temporary files when it ends."""
    gateway = spark._gateway
    assert gateway is not None  # it is there from the start of a SparkContext on
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(timeout=30)
    type(spark)._gateway = type(spark)._jvm = None  # so that another Spark can start


@contextmanager
def _new_local_folders_removed() -> Iterator[None]:
    """Removes, when they are empty, the folders of SPARK_LOCAL_DIRS that Spark created."""
    folders = filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(","))
    new = [folder for folder in folders if not os.path.lexists(folder)]
    try:
        yield
    finally:
        for folder in new:
            with suppress(OSError):
                os.rmdir(folder)


def _log4j() -> Path:
    return Path(__file__).with_name("log4j2.properties")


@contextmanager
def _standard_error_to(log: Path | None) -> Iterator[None]:
    """Lets processes that start in the block write their standard error to a file."""
    if log is None:
        yield
        return
    saved = os.dup(2)
    try:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
