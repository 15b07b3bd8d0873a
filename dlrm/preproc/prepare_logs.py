"""Turns raw click logs into a dataset, or does one step of it, with Spark.

    --mode verify           check that all day files exist
    --mode prepare          the whole dataset: dictionary, train, test, validation (the default)
    --mode generate_models  fit a transform on days: writes --model_folder
    --mode transform        apply a fitted transform to days: writes --output_folder

Input is day_0, day_1, ..., or Kaggle's train.txt, which is cut into --num_days (7) days of equally
many lines, with test.txt beside it, if it is there; each plain, .gz or .zst. The same command
resumes a run that was stopped.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.command_line import Parser, exit_code_of, say
from dlrm.data.clicks.layout import write_model_size
from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.numeric_transforms import CRITEO_TRANSFORMS, described
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.limits import check_processes
from dlrm.preproc.execution.choice import ENGINES, open_engine
from dlrm.preproc.execution.engines import Engine, EngineError, TaskError
from dlrm.preproc.execution.work_folder import open_work_folder, shared_folders
from dlrm.preproc.logs import pipeline
from dlrm.preproc.logs.options import HALVES, LogOptions
from dlrm.preproc.logs.raw_log import find_days, find_file
from dlrm.preproc.stages.dataset_files import OUTPUT_FORMATS
from dlrm.preproc.stages.options import BAD_LINES, ORDERINGS
from dlrm.preproc.stages.pipeline import input_facts, summary
from dlrm.preproc.stages.stage import QUARANTINE, Run

DATASET = "binary_dataset"


_KAGGLE_DAYS = 7
# NVIDIA's settings of Spark's shuffles and joins, which are not used here.
_TUNING = (
    "dict_build_shuffle_parallel_per_day",
    "apply_shuffle_parallel_per_day",
    "skew_broadcast_pct",
)
_UNUSED = {
    "low_mem": "memory is bounded in any case",
    **dict.fromkeys(_TUNING, "Spark neither shuffles nor joins here"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    errors = (ValueError, OSError, TaskError, EngineError)
    hint = "the same command resumes the run"
    return exit_code_of(lambda: _run(_parse(arguments)), errors, hint=hint)


def _run(flags: argparse.Namespace) -> None:
    try:
        _check_mode(flags)
        _MODES[flags.mode](flags)
    except Exception:
        if flags.debug_mode:
            traceback.print_exc()
        raise


def _check_mode(flags: argparse.Namespace) -> None:
    if flags.no_numeric_log_col:
        raise ValueError(
            "--no_numeric_log_col: logarithms are always taken of logs; python -m "
            "dlrm.scripts.transcode --numeric_transform none keeps the numbers of a CSV"
        )
    if flags.model_size_file and flags.mode != "transform":
        raise ValueError(
            "--model_size_file: is for --mode transform; prepare writes model_size.json"
        )
    check_processes("--cores", flags.cores)
    for name, why in _UNUSED.items():
        if getattr(flags, name):
            say(f"note: --{name} is not used: {why}")
    if flags.mode in ("generate_models", "transform"):
        return
    for name in ("days", "input_file", "model_folder", "unlabelled"):
        if getattr(flags, name):
            raise ValueError(f"--{name}: is for --mode generate_models and transform")


class _Input(NamedTuple):
    """Files of days, or one file and its number of days; and a log without labels."""

    files: list[Path]
    num_days: int | None
    unlabelled: Path | None

    @property
    def all_files(self) -> list[Path]:
        return self.files + ([self.unlabelled] if self.unlabelled else [])


def _find_input(flags: argparse.Namespace) -> _Input:
    folder = flags.input_folder
    train = find_file(folder, "train.txt") if folder.is_dir() else None
    if train is None:
        return _Input(find_days(folder, flags.num_days), None, None)
    if any(folder.glob("day_*")):
        raise ValueError(f"{folder}: expected day files or train.txt, got both")
    return _Input([train], flags.num_days or _KAGGLE_DAYS, find_file(folder, "test.txt"))


def _verify(flags: argparse.Namespace) -> None:
    _required(flags, "input_folder")
    days = _find_input(flags)
    size = sum(path.stat().st_size for path in days.all_files)
    what = f"{len(days.files)} days" if days.num_days is None else days.files[0].name
    print(f"{flags.input_folder}: {what}, {size / 1e9:.2f} GB")


def _prepare(flags: argparse.Namespace) -> None:
    start = time.perf_counter()
    _required(flags, "input_folder")
    days = _find_input(flags)
    output = _required(flags, "output_folder") / DATASET
    facts = {"--num_days": days.num_days}
    with _opened(flags, output, days.all_files, facts) as run:
        say(f"{'start:':<31}{time.perf_counter() - start:8.1f} s")
        result = pipeline.prepare(run, *days)
        run.work.publish()
    for line in summary(result):
        say(line)
    for total in result["totals"].values():
        _warn_of_unknown(total)
    say(f"{output}: complete, in {time.perf_counter() - start:.1f} s")


def _warn_of_unknown(total: dict[str, int]) -> None:
    """A transform of other logs knows next to none of the values."""
    if total.get("present", 0) and total["known"] < 0.05 * total["present"]:
        share = total["known"] / total["present"]
        say(
            f"warning: only {share:.1%} of the categorical values have an id: is the transform one "
            "of these logs, and the frequency limit right?"
        )


def _generate_models(flags: argparse.Namespace) -> None:
    folder = _required(flags, "model_folder")
    days = _days(flags)
    with _opened(flags, folder, days, {"--mode": flags.mode}) as run:
        pipeline.fit_days(run, days)
        run.work.publish()
    say(f"{folder}: complete")


def _transform(flags: argparse.Namespace) -> None:
    folder, output = _required(flags, "model_folder"), _required(flags, "output_folder")
    days = _days(flags)
    facts = {"--mode": flags.mode, "--half": flags.half, "--model_folder": str(folder.resolve())}
    facts |= {"--unlabelled": flags.unlabelled}
    if (fitted := facts_file(folder)).is_file():
        facts |= input_facts([fitted])
    with _opened(flags, output, days, facts) as run:
        total = pipeline.transform_days(run, days, flags.half, folder, not flags.unlabelled)
        run.work.publish()
    if flags.model_size_file:
        cardinalities = Transform.load(folder).cardinalities
        write_model_size(flags.model_size_file.parent, cardinalities, flags.model_size_file.name)
    _warn_of_unknown(total)
    say(f"{output}: {total['rows']:,} rows, {total['clicks']:,} clicks; complete")


@contextmanager
def _opened(
    flags: argparse.Namespace, output: Path, files: list[Path], facts: dict[str, Any]
) -> Iterator[Run]:
    """Opens the work folder of an output, and starts the engine."""
    options = _options(flags)
    replace = flags.write_mode == "overwrite"
    facts = options.facts() | facts | input_facts(files)
    with open_work_folder(output, facts, replace, flags.restart) as work:
        if work.resumed:
            say(f"going on with what {work.path.parent} has")
        try:
            with _engine(flags, output) as engine:
                yield Run(engine, work, options, say)
        except (TaskError, EngineError) as error:
            hint = f"what is done is kept in {work.path.parent}: the same command goes on with it"
            raise type(error)(f"{error} ({hint})") from error


_MODES = {
    "verify": _verify,
    "prepare": _prepare,
    "generate_models": _generate_models,
    "transform": _transform,
}


def _engine(flags: argparse.Namespace, output: Path) -> AbstractContextManager[Engine]:
    settings = dict(item.split("=", 1) for item in flags.conf)
    return open_engine(
        flags.engine,
        flags.cores,
        output.parent / "spark.log",
        flags.master,
        flags.memory_gib,
        settings,
        shared_folders(output),
        say,
    )


def _options(flags: argparse.Namespace) -> LogOptions:
    return LogOptions(
        log_format=LogFormat(flags.num_numerical, flags.num_categorical),
        frequency_limit=flags.frequency_limit,
        numeric_transform=flags.numeric_transform,
        output_ordering=flags.output_ordering,
        dictionary_days=flags.dictionary_days,
        seed=flags.seed,
        split_bytes=flags.split_bytes,
        output_format=flags.output_format,
        bad_lines=flags.bad_lines,
        max_bad_lines=flags.max_bad_lines,
        report=flags.report and flags.mode == "prepare",
    )


def _required(flags: argparse.Namespace, name: str) -> Path:
    if getattr(flags, name) is None:
        raise ValueError(f"--{name}: needed by --mode {flags.mode}")
    return getattr(flags, name)


def _days(flags: argparse.Namespace) -> list[Path]:
    """Returns the files of `--days`, or `--input_file`."""
    if flags.input_file is not None:
        return [flags.input_file]
    try:
        return find_days(_required(flags, "input_folder"), flags.num_days, flags.days)
    except (FileNotFoundError, ValueError) as error:
        if flags.days is not None or not flags.input_folder.is_dir():
            raise
        raise type(error)(
            f"{error}; --days A-B needs these days only, --input_file names one file, and --half "
            "first or second takes a half of the rows"
        ) from None


def _range(text: str) -> tuple[int, int]:
    numbers = text.split("-")
    if not 1 <= len(numbers) <= 2 or not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(f"expected A-B, days A to B inclusive, got {text!r}")
    first, last = int(numbers[0]), int(numbers[-1])
    if first > last:
        raise argparse.ArgumentTypeError(f"expected A-B with A <= B, got {text!r}")
    return first, last


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def _setting(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return text


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        __doc__, "python -m dlrm.preproc.prepare_logs" if __name__ == "__main__" else None
    )
    add = parser.add_argument
    default = LogOptions()
    add("--mode", choices=_MODES, default="prepare", help="task to perform (default prepare)")
    add("--input_folder", type=Path, help="directory of day_0, day_1, ..., or of train.txt")
    add("--input_file", type=Path, help="generate_models, transform: one file instead of days")
    add("--output_folder", type=Path, help=f"prepare: directory in which to write {DATASET}/")
    add(
        "--model_folder",
        type=Path,
        help="generate_models, transform: directory of the fitted transform",
    )
    add("--num_days", type=int, help="expected number of day files (default: any), or number of "
        f"days into which train.txt is cut (default {_KAGGLE_DAYS})")  # fmt: skip
    add(
        "--days",
        type=_range,
        help="generate_models, transform: days A to B, both included, as A-B; default: all",
    )
    add(
        "--half",
        choices=HALVES,
        default="all",
        help="transform: rows to write: all, or one half of them",
    )
    add("--unlabelled", action="store_true", help="transform: the lines have no label")
    add("--write_mode", choices=("overwrite", "errorifexists"), default="overwrite",
        help="overwrite: replace earlier output once the new one is complete; errorifexists: "
        "refuse")  # fmt: skip
    add("--restart", action="store_true", help="discard an unfinished run and start again")
    add("--num_numerical", type=int, default=13, help="number of integer columns (default 13)")
    add(
        "--num_categorical", type=int, default=26, help="number of hexadecimal columns (default 26)"
    )
    add("--frequency_limit", default=default.frequency_limit,
        help="number of rows that a value must occur in to get an id: N, or COLUMN:N, "
        "comma-separated; the first categorical column is 1 + num_numerical "
        "(default 15)")  # fmt: skip
    add(
        "--dictionary_days",
        type=_range,
        help="days to fit on, as A-B; default: all, including the last",
    )
    add("--numeric_transform", choices=tuple(CRITEO_TRANSFORMS), default=default.numeric_transform,
        help=described(CRITEO_TRANSFORMS))  # fmt: skip
    add("--output_ordering", choices=ORDERINGS, default="total_random",
        help="order of training rows (of all rows for --mode transform)")  # fmt: skip
    add("--output_format", choices=OUTPUT_FORMATS, default="split_binary",
        help="split_binary: one file per feature; binary: NVIDIA's rows of 4-byte "
        "words")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of --output_ordering total_random")
    add("--bad_lines", choices=BAD_LINES, default="fail",
        help="fail: an unreadable line ends the run; quarantine: it is left out and written to "
        f"{QUARANTINE}/ with the reason")  # fmt: skip
    add("--max_bad_lines", type=float, default=default.max_bad_lines,
        help="maximum share of lines that quarantine may leave out (default 0.001)")  # fmt: skip
    add("--report", action=argparse.BooleanOptionalAction, default=True,
        help="write a report on the data, report.html and report.json (default on)")  # fmt: skip
    _add_engine_flags(parser)
    add("--debug_mode", action="store_true", help="show the traceback of an error")
    _add_nvidia_flags(parser)
    return parser.parse_args(arguments)


def _add_nvidia_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model_size_file", type=Path, help="transform: file to write the greatest ids to, in the "
        "form of model_size.json")  # fmt: skip
    add("--output_partitioning", choices=("none",), help="rows are not divided by day")
    add("--low_mem", action="store_true", help=f"unused: {_UNUSED['low_mem']}")
    for name in _TUNING:
        add(f"--{name}", type=float, help=f"unused: {_UNUSED[name]}")
    add("--no_numeric_log_col", action="store_true", help="refused")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="spark",
        help="spark: Spark; local: processes of this machine, without Java. Both write the same "
        "bytes")  # fmt: skip
    add(
        "--cores",
        type=_positive,
        default=os.cpu_count(),
        help="number of cores to use (default: all of this machine)",
    )
    add(
        "--split_bytes",
        type=int,
        help="bytes of text that one task reads; does not change the result",
    )
    add("--master", help="Spark master (default: that of spark-submit, else local[cores])")
    add("--memory_gib", type=int, default=4, help="total memory of Spark, in GiB; "
        "on a cluster that of the driver and of each executor (default 4)")  # fmt: skip
    add("--conf", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of Spark; may be repeated")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
