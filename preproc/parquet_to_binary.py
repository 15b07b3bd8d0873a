#!/usr/bin/env python3
"""Converts Parquet to NVIDIA's binary rows; NVIDIA's name for `convert_to_binary.py`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.command_line import end_while_imported

end_while_imported(__name__)

from dlrm.command_line import Parser, exit_code_of, fail
from dlrm.preproc.convert_to_binary import main
from dlrm.preproc.prepare_logs import DATASET


def _run() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--src_dir", type=Path, required=True, help="has train/ and test/")
    parser.add_argument("--dst_dir", type=Path, required=True, help="gets train_data.bin, ...")
    parser.add_argument("--intermediate_dir", help="unused: nothing is written on the way")
    parser.add_argument("--parallel_jobs", type=int, help="number of processes, up to all cores")
    flags = parser.parse_args()
    if (flags.src_dir / DATASET).is_dir():
        fail(f"{flags.src_dir}: run_spark.sh wrote no Parquet but {flags.src_dir / DATASET} itself")
    paths = [f"--source={flags.src_dir}", f"--output={flags.dst_dir}"]
    cores = os.cpu_count() or 1
    jobs = min(cores if flags.parallel_jobs is None else flags.parallel_jobs, cores)
    return main([*paths, "--output_format=binary", f"--cores={jobs}"])


if __name__ == "__main__":
    sys.exit(exit_code_of(_run))
