"""Follows a log day by day; each day is judged before it is learned: dlrm daily

    dlrm daily --days logs --schema schema.yaml --output chain

The directory --days, or a URI, gets a file or a folder of rows each day. The command learns those
that are new, in the order of their names: it evaluates the model of the day before on the day,
prepares the day with the dictionaries of the day before, to which new values are added, and trains
on with its rows alone. It prints a line for each day, and chain/daily.html has one for all days.

The same command may run at any time, such as every hour: it learns no day twice, and resumes what
was stopped or killed. The model of a day is chain/days/NAME/run.
"""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dlrm.command_line import say, say_error
from dlrm.data.sources.row_error import LEAVES_OUT
from dlrm.data.sources.text_format import TextFormat
from dlrm.documents import read_json
from dlrm.files import MANIFEST, make_directories, tidy_leftovers, write_atomically
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.locks import lock, remove_unused
from dlrm.manifest import read_sealed, sealed_json
from dlrm.metrics.table import title
from dlrm.remote.uri import Local, Uri, is_uri
from dlrm.scripts.common.steps import StepError, run_step
from dlrm.scripts.common.table_flags import FilesConfig
from dlrm.settings import REQUIRED, check_settings, setting, settings_of

DAYS, LOG, PAGE = "days", "daily.log", "daily.html"
# In the folder of a day: what it was begun with, its stages in their order, and the last mark.
BEGUN, JUDGED, DATASET, RUN, LEARNED = "begun.json", "judged", "dataset", "run", "day.json"
_METRICS = ("auc", "log_loss", "calibration", "gauc_by_impressions")
_HEADS = ["day", "rows", "clicks", *map(title, _METRICS)]
# Files that programs are writing, or keep as copies.
_INCOMPLETE = re.compile(r"(~|\.(part|partial|download|crdownload|te?mp|swp|bak|old|orig))$")


@dataclass(frozen=True)
class DailyConfig:
    """The days, and how each is learned; field names are those of the flags."""

    days: Path = setting(
        REQUIRED,
        "directory with a file or a folder for each day, named so that the names sort in the order "
        "of time, such as 2026-11-20.csv, 2026-11-20T13.csv or day_3",
        uri="own",
    )
    schema: Path = setting(REQUIRED, "schema.yaml", uri="read")
    output: Path = setting(REQUIRED, "directory for the models, datasets and metrics of the days")
    train_flags: Path | None = setting(
        None,
        "file of flags of dlrm train for the first day, such as best.flags of dlrm tune; later "
        "days have its settings; default: --recipe auto",
        uri="read",
    )
    epochs: int = setting(1, "number of passes over the rows of a day after the first", least=1)
    keep: int = setting(3, "number of days whose datasets and models are kept", least=1)
    cores: int | None = setting(None, "number of cores; default: all of this machine", least=1)

    def __post_init__(self) -> None:
        check_settings(self)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Days", DailyConfig), ("Files", FilesConfig), ("Files", TextFormat)])
    hint = "the same command resumes the day"
    return run_command(
        line, _run, __doc__, arguments, usage=2, at_store=lambda values: ("days",), hint=hint
    )


def _run(values: Values) -> int:
    from dlrm.remote.cache import Cache
    from dlrm.remote.localize import localized, show_uris

    own, cache = values.config(DailyConfig), None
    if is_uri(own.days):
        show_uris()
        cache = Cache.of_flags(values)
    output = own.output.absolute()
    make_directories(output / DAYS)
    busy = f"{own.output}: another dlrm daily, or a step of it, is at work here"
    with (
        lock(output / ".lock", busy) as held_lock,
        open(output / LOG, "a", buffering=1, encoding="utf-8") as log,
    ):
        for folder in (output / DAYS, *(output / DAYS).iterdir()):
            tidy_leftovers(folder)  # of a step that was killed, also after its last change
        learner = _Learner(own, values, log, held_lock)
        new = learner.new_days()
        learner.finish()
        width = max(map(len, ["day", *new]))
        say(_line(_HEADS, width) if new else f"nothing new since {learner.days[-1]['name']}")
        for name, place in new.items():
            try:
                held: list[Local] = []  # keeps the copy until the day is learned
                (path,) = localized([str(place)], cache, held) if cache else [str(place)]
                learner.learn(name, Path(path).absolute())
            except StepError as failed:
                why = f"{failed}; its lines are in {own.output / LOG}; the same command tries again"
                return say_error(f"{place}: {why}", failed.code)
            learner.finish()
            say(_line(_cells(learner.days[-1]), width))
    say(f"page: {own.output / PAGE}")
    return 0


def find_days(folder: Path) -> dict[str, Path | Uri]:
    """Returns the days of a directory or a URI: name -> place, in the order of the names.

    Entries without a digit in their names, such as README.md, and incomplete files, such as
    2026-11-20.csv.part, are no days; hidden ones and those that begin with "_" are ignored.

    Raises:
        FileNotFoundError: there is no such directory, or no day in it.
        ValueError: two entries are the same day.
    """
    if is_uri(folder):
        from dlrm.remote.objects import find_entries

        root = Uri.parse(folder).below("")
        keys = {entry.key[len(root.key) :].partition("/")[0] for entry in find_entries(root)}
        places: list[Path | Uri] = [root.below(name) for name in keys - {""}]
    else:
        places = [*folder.iterdir()]
    days: dict[str, Path | Uri] = {}
    for place in sorted((place for place in places if place.name[0] not in "._"), key=str):
        name = re.sub(r"(\.[A-Za-z]\w*)+$", "", place.name)
        if _INCOMPLETE.search(place.name) or not re.search(r"\d", name):
            say(f"note: {place}: no day")
        elif days.setdefault(name, place) is not place:
            raise ValueError(f"{place}: expected one entry for a day, got {days[name]} as well")
    if not days:
        raise FileNotFoundError(f"{folder}: no rows with a number in their name (--days)")
    return {name: days[name] for name in sorted(days, key=order_of)}


def order_of(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Returns a key that sorts names by the values of their numbers: day_9 is before day_10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


class _Learner:
    """Learns days, one at a time; `days` are the records of those that are learned, in order."""

    def __init__(self, own: DailyConfig, values: Values, log: TextIO, lock: int | None) -> None:
        from dlrm.data.schema.schema import Schema

        self._own, self._log, self._lock = own, log, lock
        self._folder = own.output.absolute() / DAYS
        records = [read_sealed(path, required=True) for path in self._folder.glob(f"*/{LEARNED}")]
        self.days = sorted(records, key=lambda day: order_of(day["name"]))
        self._schema, groups = own.schema.absolute(), Schema.load(own.schema).groups
        names = ("input_format", *settings_of(TextFormat))
        self._format = {name: values[name] for name in names if name in values.given}
        self._judging = self._format | {"groups": groups[0] if groups else None, "bootstrap": 0}

    def new_days(self) -> dict[str, Path | Uri]:
        """Returns the days that are not learned; raises ValueError if one is before the last."""
        names = [day["name"] for day in self.days]
        new = {n: place for n, place in find_days(self._own.days).items() if n not in names}
        for name, place in new.items():
            if names and order_of(name) < order_of(names[-1]):
                raise ValueError(f"{place}: is before {names[-1]}, which is learned; remove it")
        return new

    def learn(self, name: str, path: Path) -> None:
        """Judges a day and learns it, without the stages that an earlier run has completed.

        Raises:
            ValueError, FileExistsError: the day is refused.
            StepError: a command failed.
        """
        from dlrm.data.clicks.feature_spec import FeatureSpec

        folder = self._folder / name
        before = self._folder / self.days[-1]["name"] if self.days else None
        self._begin(folder, path)
        if before is not None and not (folder / JUDGED).exists():
            flags = {"checkpoint": before / RUN, "input": path, "output": folder / JUDGED}
            self._step("evaluate", flags | self._judging)
        if not (folder / DATASET / MANIFEST).exists():
            flags = {"schema": self._schema, "input": path, "output": folder / DATASET}
            flags |= {"extend": before and before / DATASET, "test_fraction": 0}
            self._step("prepare", flags | self._format | {"cores": self._own.cores})
        spec = FeatureSpec.load(folder / DATASET)
        rows, clicks = spec.num_rows("train"), spec.metadata["clicks"]["train"]
        if not 0 < clicks < rows:
            raise ValueError(f"{path}: expected rows with and without a click, got {clicks} clicks")
        self._train(folder, before, rows)
        judged = read_json(folder / JUDGED / "evaluation.json")["models"][0] if before else {}
        metrics = {name: judged.get(name, {}).get("value") for name in _METRICS}
        record = {"name": name, "rows": rows, "clicks": clicks, "judged": metrics}
        write_atomically(folder / LEARNED, sealed_json(record))
        self.days.append(record)

    def _begin(self, folder: Path, path: Path) -> None:
        """Makes the folder of a day, without stages of other rows, settings or days before."""
        files = sorted(file for file in [path, *path.rglob("*")] if file.is_file())
        stats = [(str(file.relative_to(path)), file.stat()) for file in files]
        facts: dict[str, Any] = {
            "after": [day["name"] for day in self.days[-1:]],
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
            "format": self._format,
            "epochs": self._own.epochs,
        }
        for name, file in (("schema", self._schema), ("train_flags", self._own.train_flags)):
            facts[name] = file and file.read_text(encoding="utf-8")
        begun = folder / BEGUN
        if begun.exists():
            if {name: read_sealed(begun).get(name) for name in facts} == facts:
                return
            remove_unused(folder)
        elif folder.exists() and any(entry.name[0] != "." for entry in folder.iterdir()):
            raise FileExistsError(f"{folder}: exists and has no {BEGUN}; name another --output")
        make_directories(folder)
        write_atomically(begun, sealed_json(facts))

    def _train(self, folder: Path, before: Path | None, rows: int) -> None:
        flags = {"dataset": folder / DATASET, "save_checkpoint_path": folder / RUN, "resume": True}
        if before is not None:
            flags |= {"continue_from": before / RUN, "epochs": self._own.epochs}
            if self._own.train_flags is None:  # the recipe's falls as rows grow
                from dlrm.tasks.recipe import embedding_l2
                from dlrm.train.checkpoints.checkpoint import Checkpoint

                saved = Checkpoint.open(before / RUN).config["flags"]["embedding_l2"]
                total = rows + sum(day["rows"] for day in self.days)
                flags["embedding_l2"] = embedding_l2(total) if saved else None
            self._step("train", flags)
        elif (file := self._own.train_flags) is not None:
            self._step("train", flags | {"set_aside": 0}, [f"--flagfile={file.absolute()}"])
        else:
            self._step("train", flags | {"set_aside": 0, "recipe": "auto"})

    def _step(self, name: str, flags: Mapping[str, Any], words: Sequence[str] = ()) -> None:
        held = [] if self._lock is None else [self._lock]
        run_step(name, flags, self._log, "^warning:", words, held=held, unsaid=LEAVES_OUT)

    def finish(self) -> None:
        """Writes the page, and removes datasets and models of more than `--keep` days ago."""
        if self.days:
            write_atomically(self._folder.parent / PAGE, _page(self.days))
        for day in self.days[: -self._own.keep]:
            for name in (DATASET, RUN):
                shutil.rmtree(self._folder / day["name"] / name, ignore_errors=True)


def _cells(day: Mapping[str, Any]) -> list[str]:
    metrics = (day["judged"][name] for name in _METRICS)
    shown = ["-" if value is None else f"{value:.4f}" for value in metrics]
    return [day["name"], f"{day['rows']:,}", f"{day['clicks']:,}", *shown]


def _line(cells: Sequence[str], width: int) -> str:
    day, *others = cells
    aligned = (t.rjust(max(len(h), 10)) for h, t in zip(_HEADS[1:], others, strict=True))
    return " ".join([day.ljust(width), *aligned])


def _page(days: Sequence[Mapping[str, Any]]) -> str:
    from dlrm.pages import Section, document, table

    lead = ["Each day was judged by the model of the day before, which had not learned its rows."]
    caption = "Metrics of each day before it was learned"
    metrics = table([("", _HEADS)], [_cells(day) for day in days], caption, full=True)
    return document("Learned day by day", lead, [], [Section("Metrics by day", [metrics])])


if __name__ == "__main__":
    sys.exit(main())
