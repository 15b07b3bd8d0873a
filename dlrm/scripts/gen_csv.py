"""Writes random CSV files by a feature specification, for trying `dlrm transcode`.

    dlrm gen-csv --feature_spec_in feature_spec.yaml --output DIR --size 1000

DIR gets the specification and the files that it names, without headers: labels 0 and 1, numbers
from 0 to 1, and ids below their cardinality, or below 10 if that is "auto". `python -m
dlrm.scripts.gen_csv` works alike.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from dlrm.data.names import FEATURE_SPEC
from dlrm.files import atomic_directory
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_disk
from dlrm.settings import setting

_AUTO = 10  # ids of a table with the cardinality "auto"
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class GenerateConfig:
    """The random rows, and their place; field names are those of the flags."""

    feature_spec_in: Path = setting(
        Path(FEATURE_SPEC), "specification with chunks of type csv", uri="read"
    )
    output: Path = setting(
        Path("/data"), "directory to write the files to, new or empty", uri="write"
    )
    size: int = setting(1000, "number of rows of each split", least=1)
    seed: int = setting(12345, "seed of the random values", least=0)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", GenerateConfig)]), _generate, __doc__, arguments)


def _generate(values: Values) -> None:
    import numpy as np

    from dlrm.preproc.tables.transcode_spec import read_csv_spec

    own = values.config(GenerateConfig)
    schema, splits = read_csv_spec(own.feature_spec_in)
    chunks = [chunk for split in splits.values() for chunk in split]
    cells = sum(len(chunk["features"]) for chunk in chunks)
    check_disk(own.output, 2 * cells * own.size, f"--size {own.size}")
    random = np.random.default_rng(own.seed)
    limits = {field.column: field.cardinality or _AUTO for field in schema.categorical}
    limits[schema.label.column] = 2

    def column(name: str, rows: int) -> list[str]:
        if name in limits:
            return random.integers(0, limits[name], rows).astype(str).tolist()
        numerical = name in schema.numerical_names
        return [f"{x:.6f}" for x in random.random(rows)] if numerical else ["x"] * rows

    with atomic_directory(own.output) as staging:
        for chunk in chunks:
            count = len(chunk["files"])
            for number, name in enumerate(chunk["files"]):
                rows = own.size // count + (number < own.size % count)
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                with open(staging / name, "w", encoding="utf-8") as file:
                    for begin in range(0, rows, _ROWS_AT_ONCE):
                        some = min(_ROWS_AT_ONCE, rows - begin)
                        columns = (column(feature, some) for feature in chunk["features"])
                        file.writelines(f"{','.join(row)}\n" for row in zip(*columns, strict=True))
        shutil.copyfile(own.feature_spec_in, staging / FEATURE_SPEC)
    print(f"{own.output}: {own.size:,} rows of each split; complete")


if __name__ == "__main__":
    sys.exit(main())
