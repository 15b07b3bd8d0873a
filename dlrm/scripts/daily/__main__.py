"""Follows a log day by day; each day is judged before it is learned: dlrm daily

    dlrm daily --days logs --schema schema.yaml --output chain

The directory --days, or a URI, gets a file or a folder of rows each day. The command learns those
that are new, in the order of their names: it evaluates the model of the day before on the day,
prepares the day with the dictionaries of the day before, to which new values are added, and trains
on with its rows alone. It prints a line for each day, and chain/daily.html has one for all days.

The same command may run at any time, such as every hour: it learns no day twice, and resumes what
was stopped or killed. The model of a day is chain/days/NAME/run.
"""

import sys

from dlrm.command_line import later
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.remote.uri import is_uri
from dlrm.scripts.common.table_flags import FilesConfig
from dlrm.scripts.daily.flags import DailyConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Days", DailyConfig), ("Files", FilesConfig), ("Files", TextFormat)])
    run, hint = later("dlrm.scripts.daily.command"), "the same command resumes the day"
    return run_command(line, run, __doc__, arguments, usage=2, at_store=_at_store, hint=hint)


def _at_store(values: Values) -> tuple[str, ...]:
    return ("days",) if is_uri(values["days"]) else ()


if __name__ == "__main__":
    sys.exit(main())
