"""Prepares tables for commands whose flags determine the schema.

`prepare_preset` is `prepare_tables` on this machine, with few messages. Input that cannot be used
leaves nothing; a run that was killed resumes.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dlrm.data.tables.kinds.kind import TableFile
from dlrm.limits import check_processes
from dlrm.preproc.execution.choice import open_engine
from dlrm.preproc.execution.engines import EngineError, InlineEngine, TaskError
from dlrm.preproc.prepare_tables import prepare_tables
from dlrm.preproc.tables.options import TableOptions

_INLINE_BYTES = 64 << 20  # bytes of input below which starting processes does not pay off


def prepare_preset(
    options: TableOptions,
    tables: Mapping[str, Sequence[TableFile]],
    output: Path,
    cores: int | None = None,
    replace: bool = False,
    restart: bool = False,
) -> dict[str, Any]:
    """Writes a dataset; see `prepare_tables`.

    Args:
        cores: number of processes for large inputs; None is all cores of this machine.

    Raises:
        ValueError: the input is bad, or a file cannot be written; the message names it.
        FileExistsError: the output may not be replaced.
    """
    cores = cores or os.cpu_count() or 1
    check_processes("--cores", cores)
    paths = [path for files in tables.values() for file in files for path in file.paths]
    size = sum(path.stat().st_size for path in paths)
    inline = size <= _INLINE_BYTES or cores == 1
    log = output.resolve().parent / "spark.log"
    try:
        return prepare_tables(
            options,
            tables,
            output,
            lambda: nullcontext(InlineEngine()) if inline else open_engine("local", cores, log),
            replace,
            restart,
            say=_say,
            keep_failed=False,
        )
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error


def _say(line: str) -> None:
    """Prints the lines that the commands do not print themselves."""
    if line.startswith(("resuming", "quarantined")):
        print(line)
