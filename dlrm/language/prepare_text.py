"""Turns raw text into a dataset for BERT's pre-training, in NVIDIA's HDF5.

    dlrm prepare-text --source TEXT --vocab_file vocab.txt --output DATASET

TEXT is one or more files, plain or .gz, or directories of files. Each line is a sentence, and blank
lines separate documents; --input_format wikitext reads WikiText's paragraphs and headings instead.
Rows are [CLS] A [SEP] B [SEP], where B follows A or, in half of them, is from another document. 15
% of the tokens are masked, differently in each of --dupe_factor repetitions.

Any number of --processes writes the same bytes. The dataset appears when it is complete; an earlier
one is replaced.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.language.config import PretrainingTextConfig
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class PlacesConfig:
    """The text, and the place of the dataset; field names are those of the flags."""

    source: tuple[Path, ...] = setting(
        REQUIRED, "files, or directories of files", repeated=True, uri="read"
    )
    output: Path = setting(REQUIRED, "directory to write the dataset to", uri="replace")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [("Flags", PlacesConfig), ("Flags", PretrainingTextConfig)],
        defaults={"vocab_file": REQUIRED, "processes": None},
        helps={"processes": "number of processes; default: all cores of this process"},
    )
    return run_command(line, _run, __doc__, arguments, usage=2)


def _run(values: Values) -> None:
    from dlrm.language.writer import write_dataset

    processes = values["processes"] or len(os.sched_getaffinity(0))
    started, config = time.monotonic(), values.config(PretrainingTextConfig, processes=processes)
    done = write_dataset(config, values["source"], values["output"])
    rate, padding = done.rows / (time.monotonic() - started), done.rows * config.max_seq_length
    print(
        f"read: {done.files:,} file{'s' * (done.files != 1)}, {done.documents:,} documents, "
        f"{done.sentences:,} sentences, {done.tokens:,} tokens\n"
        f"rows: {done.rows:,} in {done.shards:,} files, {rate:,.0f} a second; "
        f"{done.masked_tokens / done.rows:.1f} masked tokens a row, "
        f"{done.random_rows / done.rows:.1%} of the rows with B from elsewhere, "
        f"{1 - done.row_tokens / padding:.1%} padding\n{values['output']}: complete"
    )


if __name__ == "__main__":
    sys.exit(main())
