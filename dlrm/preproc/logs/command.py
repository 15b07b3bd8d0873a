"""Prepares raw click logs, or does one step of it, by the flags of `prepare_logs`."""

import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.command_line import say
from dlrm.data.clicks.layout import write_model_size
from dlrm.data.sources.text_format import LogFormat
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.flags import UsageError, Values
from dlrm.limits import check_processes
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.logs import pipeline
from dlrm.preproc.logs.options import DATASET, KAGGLE_DAYS, UNUSED, LogOptions
from dlrm.preproc.logs.raw_log import find_days, find_file
from dlrm.preproc.options import IncrementConfig, RunConfig
from dlrm.preproc.parent import open_parent
from dlrm.preproc.prepare import input_facts, summary
from dlrm.preproc.spark.session import SparkConfig, local_inputs, open_engine
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.work_folder import open_work_folder
from dlrm.settings import settings_of


def run(values: Values) -> None:
    try:
        _check_mode(values)
        _MODES[values["mode"]](values)
    except Exception as error:
        if values["debug_mode"]:
            traceback.print_exc()
        if isinstance(error, FileExistsError):
            how = "--write_mode overwrite (--overwrite of dlrm prepare)"
            raise FileExistsError(f"{error}; {how} replaces it") from error
        raise


def _check_mode(values: Values) -> None:
    if values["no_numeric_log_col"]:
        raise ValueError(
            "--no_numeric_log_col: logarithms are always taken of logs; dlrm prepare keeps numbers "
            "whose transform in the schema is none"
        )
    if values["model_size_file"] and values["mode"] != "transform":
        raise ValueError(
            "--model_size_file: is for --mode transform; prepare writes model_size.json"
        )
    check_processes("--cores", values.config(RunConfig).num_cores)
    for name, why in UNUSED.items():
        if values[name]:
            say(f"note: --{name} is not used: {why}")
    if values["mode"] in ("generate_models", "transform"):
        for name in settings_of(IncrementConfig):
            if name in values.given:
                raise ValueError(f"--{name}: is for --mode prepare")
        return
    for name in ("days", "input_file", "model_folder", "unlabeled"):
        if values[name]:
            raise ValueError(f"--{name}: is for --mode generate_models and transform")


class _Input(NamedTuple):
    """Files of days, or one file and its number of days; and a log without labels."""

    files: list[Path]
    num_days: int | None
    unlabeled: Path | None

    @property
    def all_files(self) -> list[Path]:
        return self.files + ([self.unlabeled] if self.unlabeled else [])


def _find_input(values: Values) -> _Input:
    folder = values["input_folder"]
    train = find_file(folder, "train.txt") if folder.is_dir() else None
    if train is None:
        days = find_days(folder, values["num_days"], hold_out=values["hold_out"])
        return _Input(days, None, None)
    if any(folder.glob("day_*")):
        raise ValueError(f"{folder}: expected day files or train.txt, got both")
    return _Input([train], values["num_days"] or KAGGLE_DAYS, find_file(folder, "test.txt"))


def _verify(values: Values) -> None:
    _required(values, "input_folder")
    found = _find_input(values)
    size = sum(path.stat().st_size for path in found.all_files)
    days = f"{len(found.files)} day{'s' * (len(found.files) != 1)}"
    what = days if found.num_days is None else found.files[0].name
    shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    print(f"{values['input_folder']}: {what}, {shown}")


def _prepare(values: Values) -> None:
    output = _required(values, "output_folder") / DATASET
    with local_inputs(values, ["input_folder"], output) as local:
        _prepare_into(local, output)


def _prepare_into(values: Values, output: Path) -> None:
    start = time.perf_counter()
    _required(values, "input_folder")
    found = _find_input(values)
    facts = {"--num_days": found.num_days}
    with _opened(values, output, found.all_files, facts) as run:
        say(f"{'start:':<31}{time.perf_counter() - start:8.1f} s")
        result = pipeline.prepare(run, *found)
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


def _generate_models(values: Values) -> None:
    folder = _required(values, "model_folder")
    days = _days(values)
    with _opened(values, folder, days, {"--mode": values["mode"]}) as run:
        pipeline.fit_days(run, days)
        run.work.publish()
    say(f"{folder}: complete")


def _transform(values: Values) -> None:
    folder, output = _required(values, "model_folder"), _required(values, "output_folder")
    days = _days(values)
    facts = {
        "--mode": values["mode"],
        "--half": values["half"],
        "--model_folder": str(folder.resolve()),
        "--unlabeled": values["unlabeled"],
    }
    if (fitted := facts_file(folder)).is_file():
        facts |= input_facts([fitted])
    with _opened(values, output, days, facts) as run:
        total = pipeline.transform_days(run, days, values["half"], folder, not values["unlabeled"])
        run.work.publish()
    if values["model_size_file"]:
        cardinalities = Transform.load(folder).cardinalities
        write_model_size(
            values["model_size_file"].parent, cardinalities, values["model_size_file"].name
        )
    _warn_of_unknown(total)
    say(f"{output}: {total['rows']:,} rows, {total['clicks']:,} clicks; complete")


@contextmanager
def _opened(
    values: Values, output: Path, files: list[Path], facts: dict[str, Any]
) -> Iterator[PreparationRun]:
    """Opens the work folder of an output, and starts the engine."""
    options = _options(values)
    parent = open_parent(options.increment, options.schema)
    replace = values["write_mode"] == "overwrite"
    facts = options.facts() | facts | input_facts(files)
    facts |= {} if parent is None else parent.facts()
    with open_work_folder(output, facts, replace, values["restart"]) as work:
        if work.resumed:
            say(f"continuing with what {work.shown} has")
        spark, running = values.config(SparkConfig), values.config(RunConfig)
        how = work.folder("spill"), running.memory_bytes, spark, output, say
        try:
            with open_engine(values["engine"], running.num_cores, *how) as engine:
                yield PreparationRun(engine, work, options, say, parent)
        except (TaskError, EngineError) as error:
            hint = f"what is done is kept in {work.shown}: the same command resumes it"
            raise type(error)(f"{error} ({hint})") from error


_MODES = {
    "verify": _verify,
    "prepare": _prepare,
    "generate_models": _generate_models,
    "transform": _transform,
}


def _options(values: Values) -> LogOptions:
    return values.config(
        LogOptions,
        log_format=values.config(LogFormat),
        dictionary_days=_range("dictionary_days", values["dictionary_days"]),
        report=values["report"] and values["mode"] == "prepare",
        increment=values.config(IncrementConfig),
    )


def _required(values: Values, name: str) -> Path:
    if values[name] is None:
        raise ValueError(f"--{name}: needed by --mode {values['mode']}")
    return Path(values[name])


def _days(values: Values) -> list[Path]:
    """Returns the files of `--days`, or `--input_file`."""
    if values["input_file"] is not None:
        return [values["input_file"]]
    try:
        days = _range("days", values["days"])
        return find_days(_required(values, "input_folder"), values["num_days"], days)
    except (FileNotFoundError, ValueError) as error:
        if values["days"] is not None or not values["input_folder"].is_dir():
            raise
        raise type(error)(
            f"{error}; --days A-B needs these days only, --input_file names one file, and --half "
            "first or second takes a half of the rows"
        ) from None


def _range(name: str, text: str | None) -> tuple[int, int] | None:
    """Returns the first and last day of a flag."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text or "")
    days = found and (int(found[1]), int(found[2] or found[1]))
    if text is not None and (not days or days[0] > days[1]):
        raise UsageError(f"--{name} {text}: expected A-B, days A to B inclusive")
    return days
