"""Raw text to pre-training rows: what --mode prepare_data of `dlrm.scripts.bert` does."""

import os
import time

from dlrm.data.text.pretraining.report import Bars, summary_text
from dlrm.data.text.pretraining.writer import PretrainingTextConfig, TextSummary, write_shards
from dlrm.scripts.common.config_flags import Values


def prepare(values: Values) -> TextSummary:
    """Writes the dataset that the flags describe, as `preproc/prepare_text.py` does.

    Raises:
        ValueError, OSError: a flag is missing, or a file is not what it should be.
    """
    for flag in ("source", "output", "vocab_file"):
        if not values[flag]:
            raise ValueError(f"--mode prepare_data needs --{flag}")
    values = values.filled({"processes": len(os.sched_getaffinity(0))})
    config = values.config(PretrainingTextConfig)
    if config.processes > 1:  # which tokenize a part each, and not each on all cores
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began, bars = time.monotonic(), Bars()
    try:
        summary = write_shards(config, list(values["source"]), values["output"], bars)
    finally:
        bars.close()
    print(summary_text(summary, time.monotonic() - began))
    print(f"{values['output']}: complete")
    return summary
