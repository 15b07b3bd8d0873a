"""Times grouped AUC beside our AUC in one process on the same rows.

    python benchmarks/grouped_auc.py [--rows 100000000] [--rounds 3]

Groups are users: a few have most of the rows. Both sides run in turn in every round, on one thread,
and the medians are compared. Memory is the peak of the process during grouped AUC, beyond scores,
labels and groups.
"""

import argparse
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import torch

from dlrm.metrics.auc import roc_auc
from dlrm.metrics.grouped import all_groups


def rows(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels and users; a tenth clicks, AUC about 0.8, twenty rows a user."""
    random = np.random.default_rng(0)
    labels = (random.random(count, np.float32) < 0.1).astype(np.float32)
    scores = random.standard_normal(count, np.float32) + np.float32(1.19) * labels
    users = np.empty(count, np.int64)
    for begin in range(0, count, 1 << 20):
        part = users[begin : begin + (1 << 20)]
        part[:] = (random.pareto(1.2, len(part)) * count / 100).astype(np.int64) % (count // 20)
    return scores, labels, users


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """Watches the memory of this process within a block, every 5 ms."""

    def __enter__(self) -> "Peak":
        self.most, self._done = resident(), threading.Event()
        self._before = self.most
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, resident())

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """The most beyond what there was before the block."""
        return self.most - self._before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scores, labels, users = rows(options.rows)
    tensors = torch.from_numpy(scores), torch.from_numpy(labels)
    seconds: dict[str, list[float]] = {"AUC": [], "grouped AUC": []}
    most = 0
    for _ in range(options.rounds):
        began = time.perf_counter()
        area = roc_auc(*tensors)
        seconds["AUC"].append(time.perf_counter() - began)
        with Peak() as peak:
            began = time.perf_counter()
            found = all_groups(scores, labels, users)
            by_rows, by_clicks = found.means(np.ones(len(found.group))).values()
            seconds["grouped AUC"].append(time.perf_counter() - began)
        most = max(most, peak.bytes)
    usual = statistics.median(seconds["AUC"])
    print(
        f"{options.rows:,} rows, {len(found.group):,} users of both classes; AUC {area:.6f}, by "
        f"impressions {by_rows:.6f}, by clicks {by_clicks:.6f}\n"
        f"medians of {options.rounds} rounds, one thread; memory beyond the rows "
        f"{most / 2**30:.2f} GiB\n"
    )
    print("| side | seconds | least | most | x AUC |\n|---|---|---|---|---|")
    for name, took in seconds.items():
        middle = statistics.median(took)
        print(
            f"| {name} | {middle:.2f} | {min(took):.2f} | {max(took):.2f} | {middle / usual:.2f} |"
        )
