"""Drafts a schema from tables: dlrm schema --input FILES --label COLUMN

    dlrm schema --input sales.parquet --label bought --output schema.yaml
    dlrm prepare --schema schema.yaml --input sales.parquet --output dataset

Input is files of tables, or directories of them, of the kinds that `--input_format` lists; the
first rows are read. The schema has a comment with observations for every column; edit it where it
is wrong. `dlrm.data.tables.draft.draft` documents the rules.
"""

import sys

from dlrm.command_line import later
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags, run_command
from dlrm.scripts.common.table_flags import FilesConfig
from dlrm.scripts.schema.flags import DraftConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Schema", DraftConfig), ("Files", FilesConfig), ("Files", TextFormat)])
    return run_command(line, later("dlrm.scripts.schema.command"), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
