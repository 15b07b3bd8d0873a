"""Prepares raw click logs, or does one step of it, by the flags of `prepare_logs`."""

import re
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dlrm.command_line import say
from dlrm.data.layout import write_model_size
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
from dlrm.preproc.prepare import input_facts, summary
from dlrm.preproc.spark.session import SparkConfig, local_inputs, open_engine
from dlrm.preproc.stage import PreparationRun, open_run
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


def _find_input(values: Values) -> tuple[list[Path], int | None, Path | None]:
    """Returns files of days; or one file, its number of days, and perhaps one without labels."""
    folder = _required(values, "input_folder")
    train = find_file(folder, "train.txt") if folder.is_dir() else None
    if train is None:
        days = find_days(folder, values["num_days"], hold_out=values["hold_out"])
        return days, None, None
    if any(folder.glob("day_*")):
        raise ValueError(f"{folder}: expected day files or train.txt, got both")
    return [train], values["num_days"] or KAGGLE_DAYS, find_file(folder, "test.txt")


def _verify(values: Values) -> None:
    files, num_days, unlabeled = _find_input(values)
    size = sum(path.stat().st_size for path in filter(None, [*files, unlabeled]))
    what = f"{len(files)} day{'s' * (len(files) != 1)}" if num_days is None else files[0].name
    shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    print(f"{values['input_folder']}: {what}, {shown}")


def _prepare(values: Values) -> None:
    output = _required(values, "output_folder") / DATASET
    with local_inputs(values, ["input_folder"], output) as local:
        start = time.perf_counter()
        files, num_days, unlabeled = _find_input(local)
        every = [*files, *filter(None, [unlabeled])]
        with _opened(local, output, every, {"--num_days": num_days}) as run:
            say(f"{'start:':<31}{time.perf_counter() - start:8.1f} s")
            result = pipeline.prepare(run, files, num_days, unlabeled)
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
    folder, days = _required(values, "model_folder"), _days(values)
    with _opened(values, folder, days, {"--mode": values["mode"]}) as run:
        pipeline.fit_days(run, days)
    say(f"{folder}: complete")


def _transform(values: Values) -> None:
    folder, output = _required(values, "model_folder"), _required(values, "output_folder")
    days = _days(values)
    facts = {f"--{name}": values[name] for name in ("mode", "half", "unlabeled")}
    facts["--model_folder"] = str(folder.resolve())
    if (fitted := facts_file(folder)).is_file():
        facts |= input_facts([fitted])
    with _opened(values, output, days, facts) as run:
        total = pipeline.transform_days(run, days, values["half"], folder, not values["unlabeled"])
    if (sizes := values["model_size_file"]) is not None:
        write_model_size(sizes.parent, Transform.load(folder).cardinalities, sizes.name)
    _warn_of_unknown(total)
    say(f"{output}: {total['rows']:,} rows, {total['clicks']:,} clicks; complete")


def _opened(
    values: Values, output: Path, files: list[Path], facts: dict[str, Any]
) -> AbstractContextManager[PreparationRun]:
    """Opens the work folder of an output, and starts the engine."""
    options = values.config(
        LogOptions,
        log_format=values.config(LogFormat),
        dictionary_days=_range("dictionary_days", values["dictionary_days"]),
        report=values["report"] and values["mode"] == "prepare",
        increment=values.config(IncrementConfig),
    )
    running = values.config(RunConfig)
    how = running.memory_bytes, values.config(SparkConfig), output, say
    return open_run(
        options,
        output,
        facts | input_facts(files),
        lambda spill: open_engine(values["engine"], running.num_cores, spill, *how),
        values["write_mode"] == "overwrite",
        values["restart"],
        say,
        hinted=EngineError | TaskError,
    )


_MODES = {
    "verify": _verify,
    "prepare": _prepare,
    "generate_models": _generate_models,
    "transform": _transform,
}


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
