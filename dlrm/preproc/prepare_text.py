"""Turns raw text into a dataset for BERT's pre-training, which training maps into memory.

    python -m dlrm.preproc.prepare_text --source TEXT --vocab_file vocab.txt --output DATASET

TEXT is one or more files, plain or .gz, or directories of files. Each line is a sentence, and blank
lines separate documents; --input_format wikitext reads WikiText's paragraphs and headings instead.
Rows are [CLS] A [SEP] B [SEP], where B follows A or, in half of them, is from another document. 15
% of the tokens are masked, differently in each of --dupe_factor repetitions.

--input_format hdf5 and popart convert rows prepared by NVIDIA's, Habana's or Graphcore's programs.

Any number of --processes writes the same bytes. The dataset appears when it is complete; an earlier
one is replaced.
"""

import argparse
import os
import sys
import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from dlrm.command_line import Parser, exit_code_of
from dlrm.data.text.pretraining.report import Bars, summary_text
from dlrm.data.text.pretraining.writer import (
    INPUT_FORMATS,
    OUTPUT_FORMATS,
    PretrainingTextConfig,
    write_shards,
)

_HELP = {
    "vocab_file": "WordPiece vocabulary, one token per line",
    "lower_case": "convert text to lower case and strip accents",
    "max_seq_length": "tokens per row",
    "max_predictions_per_seq": "maximum masked tokens per row; usual: 20 of 128, 80 of 512",
    "masked_lm_prob": "share of the tokens to mask",
    "short_seq_prob": "probability of cutting a document into shorter rows than would fit",
    "dupe_factor": "number of times that each document is cut and masked",
    "seed": "random seed",
    "input_format": "format of the source",
    "output_format": "shards: for this program; hdf5: for NVIDIA's",
    "num_shards": "number of files to write; default: one per 262,144 rows",
    "processes": "number of processes",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_code_of(lambda: _run(**vars(_parse(arguments))))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        __doc__, "python -m dlrm.preproc.prepare_text" if __name__ == "__main__" else None
    )
    parser.add_argument(
        "--source", type=Path, nargs="+", required=True, help="files, or directories of files"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory to write the dataset to"
    )
    choices = {"input_format": INPUT_FORMATS, "output_format": OUTPUT_FORMATS}
    for field in fields(PretrainingTextConfig):
        default = field.default
        if field.name == "processes":
            default = len(os.sched_getaffinity(0))
        text = _HELP[field.name] + ("" if default in (None, "") else f" ({default})")
        name = f"--{field.name}"
        if isinstance(default, bool):
            parser.add_argument(
                name, action=argparse.BooleanOptionalAction, default=default, help=text
            )
            continue
        kind = int if default is None else type(default)
        parser.add_argument(
            name,
            type=kind,
            default=default,
            help=text,
            choices=choices.get(field.name),
            required=default == "",
        )
    return parser.parse_args(arguments)


def _run(source: list[str | Path], output: Path, **options: Any) -> None:
    started, config = time.monotonic(), PretrainingTextConfig(**options)
    if config.processes > 1:  # each process uses one core
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with closing(Bars()) as bars:
        summary = write_shards(config, source, output, bars)
    print(summary_text(summary, time.monotonic() - started))
    print(f"{output}: complete")


if __name__ == "__main__":
    sys.exit(main())
