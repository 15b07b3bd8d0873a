"""Measures the processor time of all threads that a tracker takes for each reported line.

    python benchmarks/trackers.py [--lines 2000] [--step_ms 10] [--print_freq 200]

A line has three scalars, like the line of every --print_freq training steps. The share is of the
time of the steps between two lines, of --step_ms each. Other programs affect processor time little.
"""

import argparse
import tempfile
import time
from pathlib import Path

from dlrm.train.log import RunLog
from dlrm.train.reports.trackers import open_trackers


def seconds(lines: int, tensorboard: str | None, mlflow: str | None) -> float:
    """Returns the processor time of a run of so many lines."""
    began = time.process_time()
    with RunLog(quiet=True) as log:
        log.trackers = [*open_trackers(tensorboard, mlflow, "run", print)]
        for line in range(lines):
            log.step(0, line, {"loss": 0.5, "step_time": 0.01, "lr": 0.1}, line)
            time.sleep(0.001)
    return time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--step_ms", type=float, default=10.0)
    parser.add_argument("--print_freq", type=int, default=200)
    parser.add_argument("--mlflow", help="URI of a server or store, to measure MLflow too")
    options = parser.parse_args()
    step = options.step_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        sides = {"tensorboard": (str(Path(folder, "events")), None)}
        if options.mlflow:
            sides["mlflow"] = (None, options.mlflow)
        without = seconds(options.lines, None, None)
        print(f"| tracker | us a line | % of {options.print_freq} steps | % of a step |")
        print("|---|---|---|---|")
        for name, asked in sides.items():
            seconds(1, *asked)  # imports
            line = (seconds(options.lines, *asked) - without) / options.lines
            shares = (100 * line / step / count for count in (options.print_freq, 1))
            print(f"| {name} | {1e6 * line:.0f} | " + " | ".join(f"{s:.4f}" for s in shares) + " |")
