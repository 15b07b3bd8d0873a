"""Turns tables of named columns into a dataset, in one call; used by `dlrm.scripts.prepare`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.tables.files import FRAME, TableFile
from dlrm.data.tables.kinds.kind import Kind
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.parent import open_parent
from dlrm.preproc.prepare import input_facts, summary
from dlrm.preproc.spark.query import SparkQuery
from dlrm.preproc.stage import PreparationRun
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.pipeline import InputFiles, prepare
from dlrm.preproc.work_folder import open_work_folder


def prepare_tables(
    options: TableOptions,
    tables: Mapping[str, Sequence[TableFile]],
    output: Path,
    engine: Callable[[Path], AbstractContextManager[Engine]],
    replace: bool = False,
    restart: bool = False,
    say: Callable[[str], None] = print,
    query: SparkQuery | None = None,
    keep_failed: bool = True,
) -> dict[str, Any]:
    """Writes a dataset, which appears when it is complete; resumes an unfinished run.

    Args:
        options: the schema, and the division of rows.
        tables: "train" -> files, which the division splits; or splits -> files, if files determine
            the split of their rows. A run of tables in memory, or of a data frame of Spark, neither
            resumes an unfinished run nor leaves one.
        output: the directory of the dataset.
        engine: starts the engine, which may use a directory.
        replace: whether to replace an earlier dataset.
        restart: whether to discard an unfinished run.
        say: called with lines about the stages and the result.
        query: query that Spark, then the engine, reads instead of `tables`.
        keep_failed: whether a run that ends with a TaskError or ValueError can be resumed.

    Returns:
        `totals` of each split, and `cardinalities`.

    Raises:
        ValueError, FileExistsError: the options, the tables or the output cannot be used together.
        TaskError: a value does not match the schema, or a file cannot be written.
        EngineError: tasks could not be run.
    """
    began = time.perf_counter()
    inputs = _inputs(options, tables) if query is None else InputFiles([], query=query)
    parent = open_parent(options.increment, options.schema)
    in_memory = any(file.kind == FRAME for file in inputs.files)
    in_memory |= query is not None and query.frame is not None
    on_disk = [] if in_memory else [path for file in inputs.files for path in file.paths]
    facts = options.facts() | input_facts(on_disk)
    facts |= {} if parent is None else parent.facts()
    for split, files in tables.items():
        named = [f"{file.path.resolve()} ({file.kind})" for file in files]
        facts[f"--{split}_input"] = len(files) if in_memory else named
    facts |= {} if query is None else query.facts()
    kind = layout.KIND if replace else False
    with open_work_folder(output, facts, kind, restart or in_memory) as work:
        if work.resumed:
            say(f"resuming the run in {work.shown}")
        try:
            with engine(work.folder("spill")) as running:
                result = prepare(PreparationRun(running, work, options, say, parent), inputs)
                work.publish()
        except EngineError as error:
            if in_memory:
                raise
            hint = f"what is done is kept in {work.shown}: the same command resumes it"
            raise EngineError(f"{error} ({hint})") from error
        except (TaskError, ValueError):
            in_memory |= not keep_failed
            raise
        finally:
            if in_memory:
                work.discard()
    for line in summary(result):
        say(line)
    if (kept := options.division.keep_negatives) < 1:
        say(
            f"note: {kept:g} of the training rows with label 0 were kept, so a model's "
            "probabilities will be too high; `dlrm evaluate --sampling_rate "
            f"{kept:g}` corrects them"
        )
    say(f"{output}: complete, in {time.perf_counter() - began:.1f} s")
    return result


def _inputs(options: TableOptions, tables: Mapping[str, Sequence[TableFile]]) -> InputFiles:
    files = [file for split in layout.SPLITS for file in tables.get(split, ())]
    given: set[tuple[Path, Kind]] = set()
    for file in files:
        if (key := (file.path.resolve(), file.kind)) in given:
            raise ValueError(f"{file.path}: given twice (--input, --test_input, ...)")
        given.add(key)
    kinds = {file.kind.name: file.path for file in files}
    if len(kinds) > 1:
        shown = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
        raise ValueError(f"--input: expected files of one kind, got {shown}")
    if set(tables) <= {"train"}:
        return InputFiles(files)
    division = options.division
    for name in ("test_fraction", "validation_fraction", "test_from", "split_column"):
        if getattr(division, name):
            raise ValueError(
                f"--{name}: expected no --test_input and --validation_input beside it, got both"
            )
    splits = [place for place, name in enumerate(layout.SPLITS) for _ in tables.get(name, ())]
    return InputFiles(files, tuple(splits))
