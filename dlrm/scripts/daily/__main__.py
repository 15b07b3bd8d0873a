"""Follows a log day by day; each day is scored before it is learned: dlrm daily

    dlrm daily --days logs --schema schema.yaml --output chain

The directory --days, or a URI, gets a file or a folder of rows each day. The command learns those
that are new, in the order of their names: it scores a day with the model of the day before,
prepares it with the dictionaries of the day before, to which new values are added, and trains on
with its rows alone. The directory --output gets the metrics of all days, as the page
daily.html and the record daily.json, and in days/ datasets, runs and evaluations, of which old ones
are removed.

The same command may run at any time, such as every hour: it learns nothing twice, resumes what was
stopped or killed, and catches up on days that came late. Its exit code is 3 if a new day, which has
been learned all the same, raised an alarm, and 1 if a day was refused, of which nothing is learned.
"""

import sys

from dlrm.command_line import later
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.remote.uri import is_uri
from dlrm.scripts.common.table_flags import FilesConfig
from dlrm.scripts.daily.flags import AlarmConfig, DailyConfig
from dlrm.scripts.prepare.flags import CriteoConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [("Days", DailyConfig), ("Alarms", AlarmConfig), ("Files", FilesConfig)]
        + [("Files", TextFormat), ("For --schema criteo", CriteoConfig)],
        without=("num_days", "dictionary_days", "hold_out", "output_format"),
    )
    hint = "the same command resumes the day"
    return run_command(
        line,
        later("dlrm.scripts.daily.command"),
        __doc__,
        arguments,
        usage=2,
        at_store=_at_store,
        hint=hint,
    )


def _at_store(values: Values) -> tuple[str, ...]:
    """Returns the flag of the days, which are fetched one by one."""
    return ("days",) if is_uri(values["days"]) else ()


if __name__ == "__main__":
    sys.exit(main())
