#!/usr/bin/env python3
"""Turns raw click logs into a dataset, or does one step of it, with Spark.

    --mode verify           are all the day files there?
    --mode prepare          the whole dataset: dictionary, train, test, validation (the default)
    --mode generate_models  fit a transform on days: writes --model_folder
    --mode transform        apply a fitted transform to days: writes --output_folder

`prepare` runs its stages in one Spark application, which starts once.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.files import staged_directory
from preproc import spark_pipeline as pipeline
from preproc.raw_log import LogFormat, find_days

if TYPE_CHECKING:
    from pyspark import SparkContext

DATASET = "binary_dataset"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    flags = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half-written goes
    try:
        _MODES[flags.mode](flags)
    except (ValueError, OSError, pipeline.TaskError, pipeline.SparkError) as error:
        if flags.debug_mode:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _verify(flags: argparse.Namespace) -> None:
    days = find_days(flags.input_folder, flags.num_days)
    size = sum(path.stat().st_size for path in days)
    print(f"{flags.input_folder}: {len(days)} days, {size / 1e9:.2f} GB")


def _prepare(flags: argparse.Namespace) -> None:
    start = time.perf_counter()
    options = _options(flags)
    days = find_days(flags.input_folder, flags.num_days)
    output = _required(flags, "output_folder") / DATASET
    with (
        staged_directory(output, replace=flags.write_mode == "overwrite") as staging,
        _engine(flags, output.parent / "spark.log") as spark,
    ):
        _say(f"{'Spark start:':<32}{time.perf_counter() - start:8.1f} s")
        engine = pipeline.Engine(spark, _say)
        facts = pipeline.prepare(engine, days, staging, options)
    for name, rows in facts["rows"].items():
        rate = facts["clicks"][name] / rows if rows else float("nan")
        _say(f"{name + ':':<12}{rows:>14,} rows, click-through rate {rate:.4f}")
    cardinalities = facts["cardinalities"]
    _say(f"tables:     {sum(cardinalities):>14,} rows in {len(cardinalities)}")
    if clamped := sum(facts["clamped"].values()):
        _say(f"raised to 1:{clamped:>14,} numerical values whose logarithm would be under 0")
    _say(f"{output}: complete, in {time.perf_counter() - start:.1f} s")


def _generate_models(flags: argparse.Namespace) -> None:
    options = _options(flags)
    folder = _required(flags, "model_folder")
    days, first = _days(flags)
    with _engine(flags, folder.parent / "spark.log") as spark:
        pipeline.fit_days(pipeline.Engine(spark, _say), days, first, folder, options)
    _say(f"{folder}: complete")


def _transform(flags: argparse.Namespace) -> None:
    options = _options(flags)
    folder, output = _required(flags, "model_folder"), _required(flags, "output_folder")
    days, first = _days(flags)
    with _engine(flags, output.parent / "spark.log") as spark:
        written = pipeline.transform_days(
            pipeline.Engine(spark, _say), days, first, flags.half, folder, output, options
        )
    _say(f"{output}: {written.rows:,} rows, {written.clicks:,} clicks; complete")


_MODES = {
    "verify": _verify,
    "prepare": _prepare,
    "generate_models": _generate_models,
    "transform": _transform,
}


def _say(text: str) -> None:
    print(text, flush=True)


def _engine(flags: argparse.Namespace, log: Path) -> AbstractContextManager["SparkContext"]:
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = dict(item.split("=", 1) for item in flags.conf)
    return pipeline.spark_context(flags.master, flags.memory_gib, log, settings)


def _options(flags: argparse.Namespace) -> pipeline.Options:
    return pipeline.Options(
        LogFormat(flags.num_numerical, flags.num_categorical),
        flags.frequency_limit,
        flags.numeric_transform,
        flags.output_ordering,
        flags.dictionary_days,
        flags.seed,
        flags.split_bytes,
    )


def _required(flags: argparse.Namespace, name: str) -> Path:
    if getattr(flags, name) is None:
        raise ValueError(f"--{name}: needed by --mode {flags.mode}")
    return getattr(flags, name)


def _days(flags: argparse.Namespace) -> tuple[list[Path], int]:
    """Returns the files of `--days`, and the index of the first."""
    days = find_days(flags.input_folder, flags.num_days)
    first, last = flags.days or (0, len(days) - 1)
    if last >= len(days):
        raise ValueError(f"--days {first}-{last}: expected days within 0-{len(days) - 1}")
    return days[first : last + 1], first


def _range(text: str) -> tuple[int, int]:
    numbers = text.split("-")
    if not 1 <= len(numbers) <= 2 or not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(f"expected A-B, days A to B inclusive, got {text!r}")
    first, last = int(numbers[0]), int(numbers[-1])
    if first > last:
        raise argparse.ArgumentTypeError(f"expected A-B with A <= B, got {text!r}")
    return first, last


def _setting(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return text


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    default = pipeline.Options()
    add("--mode", choices=_MODES, default="prepare")
    add("--input_folder", type=Path, required=True, help="where day_0, day_1, ... are")
    add("--output_folder", type=Path, help=f"prepare: where {DATASET}/ is written")
    add("--model_folder", type=Path, help="generate_models, transform: the fitted transform")
    add("--num_days", type=int, help="how many day files there must be; default: what is there")
    add("--days", type=_range, help="generate_models, transform: A-B inclusive; default: all")
    add("--half", choices=pipeline.HALVES, default="all", help="transform: which half of the rows")
    add("--write_mode", choices=("overwrite", "errorifexists"), default="overwrite",
        help="prepare: may an earlier dataset be replaced, once the new one is whole")  # fmt: skip
    add("--num_numerical", type=int, default=13, help="integer columns (default 13)")
    add("--num_categorical", type=int, default=26, help="hexadecimal columns (default 26)")
    add("--frequency_limit", default=default.frequency_limit,
        help="how often a value must occur to get an id: N, or COLUMN:N, comma-separated; the "
        "first categorical column is 1 + num_numerical (default 15)")  # fmt: skip
    add("--dictionary_days", type=_range, help="A-B: days to fit on; default: all, the last too")
    add("--numeric_transform", choices=pipeline.NUMERIC_TRANSFORMS, default="readme",
        help="readme: ln(x + 2), missing x as 0; nvidia: ln(x + 3), 0 if missing")  # fmt: skip
    add("--output_ordering", choices=pipeline.ORDERINGS, default="total_random",
        help="order of training rows (of all rows for --mode transform)")  # fmt: skip
    add("--seed", type=int, default=0, help="of total_random")
    add("--split_bytes", type=int, help="text that one task reads; changes no result")
    add("--master", default=f"local[{os.cpu_count()}]", help="Spark master (default local)")
    add("--memory_gib", type=int, default=4, help="memory of Spark in all, in GiB; "
        "on a cluster that of the driver and of each executor (default 4)")  # fmt: skip
    add("--conf", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of Spark; may be repeated")  # fmt: skip
    add("--debug_mode", action="store_true", help="show where an error came from")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
