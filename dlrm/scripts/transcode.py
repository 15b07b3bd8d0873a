"""Turns the CSV files of a feature specification into a split-binary dataset, as NVIDIA's does.

    dlrm transcode --input DIR --output DATASET

DIR has the specification (chunk type csv) and its files, without headers. Ids are integers and stay
as they are, and so does the order of the rows. A cardinality "auto" is the greatest id of all
splits plus one, and a missing number is 0. `dlrm schema` and `dlrm prepare` read any other CSV.
`python -m dlrm.scripts.transcode` works alike.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from dlrm.data.names import FEATURE_SPEC
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.options import PreparationOptions
from dlrm.scripts.common.table_flags import NOT_OPTIONS, say_progress
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class TranscodeConfig:
    """The CSV files and the dataset; field names are those of the flags."""

    input: Path = setting(REQUIRED, "directory of the specification and its files", uri="read")
    output: Path = setting(
        Path("/data"), "directory to write the dataset to, new or empty", uri="write"
    )
    feature_spec_in: str = setting(FEATURE_SPEC, "specification in --input")
    feature_spec_out: str = setting(FEATURE_SPEC, "name of the specification to write")
    chunk_size: int = setting(65536, "number of rows read at a time", least=1)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    configs = [("Flags", TranscodeConfig), ("Preparation", PreparationOptions)]
    return run_command(ConfigFlags(configs, without=NOT_OPTIONS), _run, __doc__, arguments)


def _run(values: Values) -> None:
    from dlrm.data.tables.files import FRAME, TableFile
    from dlrm.preproc.tables.options import TableOptions
    from dlrm.preproc.tables.preset import prepare_preset
    from dlrm.preproc.tables.transcode_spec import read_csv_spec, read_rows

    own = values.config(TranscodeConfig)
    path = own.input / own.feature_spec_in
    schema, splits = read_csv_spec(path)
    columns = [schema.label.column, *schema.numerical_names, *schema.categorical_names]
    tables = {}
    for split, chunks in splits.items():
        rows = read_rows(path.parent, chunks, columns, own.chunk_size)
        tables[split] = [TableFile(Path(f"{path}, {split}"), FRAME, frame=rows)]
    options = values.config(TableOptions, schema=schema, output_ordering="input")
    prepare_preset(options, tables, own.output, say=say_progress)


if __name__ == "__main__":
    sys.exit(main())
