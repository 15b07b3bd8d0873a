"""Compares six steady ratios with those recorded for this processor: make bench-guard

    python benchmarks/guard.py [--record]

It takes half a minute. Each ratio is the processor time of a peer over ours, on one thread, in
turns. The run fails with exit code 1 if one is a quarter below the record of this processor in
`guard.json`. A processor without a record gets one, and passes. If other programs take more than a
tenth of the machine's cores meanwhile, the run does not count: it neither fails nor records, and
ends with exit code 2.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

RECORDS = Path(__file__).with_name("guard.json")
LOSS = 0.25  # of a recorded ratio, at which a run fails
MOST_OF_OTHERS = 0.1  # of the machine's cores, that other programs may take
PASSED, FAILED, NO_COUNT = 0, 1, 2  # exit codes
_STEPS = 30
_ROWS = 1_000_000  # of the AUC


class Outcome(NamedTuple):
    """Verdict on a run.

    Attributes:
        code: exit code.
        lines: report.
        records: records to write; None leaves the file as it is.
    """

    code: int
    lines: list[str]
    records: dict[str, dict[str, float]] | None


def judged(
    ratios: Mapping[str, float],
    records: Mapping[str, Mapping[str, float]],
    processor: str,
    others: float | None,
    again: bool = False,
) -> Outcome:
    """Compares ratios with those recorded for a processor.

    Args:
        ratios: measured, by name.
        records: ratios by processor, and by name.
        processor: this one.
        others: share of the machine's cores that other programs took; None if unknown.
        again: record the ratios in place of those before.
    """
    known = records.get(processor, {})
    lines = [f"processor: {processor}"]
    for name, ratio in ratios.items():
        lines.append(f"{name}: {ratio:.2f}{_beside(ratio, known.get(name))}")
    if others is not None and others > MOST_OF_OTHERS:
        lines.append(
            f"this run does not count: other programs took {others:.0%} of the machine's cores, "
            f"expected {MOST_OF_OTHERS:.0%} at most; repeat it when the machine is idle"
        )
        return Outcome(NO_COUNT, lines, None)
    if others is None:
        lines.append("note: there is no /proc/stat, so it is unknown how busy the machine was")
    fallen = [name for name in ratios if name in known and _has_fallen(ratios[name], known[name])]
    if fallen and not again:
        lines.append(f"failed: {', '.join(fallen)}: a quarter or more below the record")
        return Outcome(FAILED, lines, None)
    new = ratios if again else {n: ratio for n, ratio in ratios.items() if n not in known}
    if not new:
        return Outcome(PASSED, lines, None)
    lines.append(f"recorded, with nothing to compare with: {', '.join(new)}")
    kept = {name: dict(own) for name, own in records.items()}
    kept[processor] = {**known, **{name: round(ratio, 3) for name, ratio in new.items()}}
    return Outcome(PASSED, lines, kept)


def _has_fallen(ratio: float, recorded: float) -> bool:
    return not ratio > (1 - LOSS) * recorded  # also if it is NaN


def _beside(ratio: float, recorded: float | None) -> str:
    if recorded is None:
        return ""
    return f", recorded {recorded:.2f} ({ratio / recorded - 1:+.0%})"


def read_records(path: Path) -> dict[str, dict[str, float]]:
    """Returns the recorded ratios by processor and name; none without a file.

    Raises:
        ValueError: the file has something else; the message names it.
    """
    if not path.exists():
        return {}
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return {
            processor: {name: float(ratio) for name, ratio in own.items()}
            for processor, own in records.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: expected ratios by processor and name, got {error}") from None


def busy_ticks(text: str) -> int:
    """Returns the ticks that all cores have been busy, of the text of `/proc/stat`."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = dict(zip(names, map(int, text.splitlines()[0].split()[1:]), strict=False))
    return sum(ticks.values()) - ticks["idle"] - ticks.get("iowait", 0)


class Machine:
    """The time of all cores, from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def others(self) -> float | None:
        """Returns the share of the machine's cores that other programs have taken."""
        now = self._now()
        if self._began is None or now is None:
            return None
        busy, own, wall = (after - before for after, before in zip(now, self._began, strict=True))
        return max(busy - own, 0.0) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            busy = busy_ticks(Path("/proc/stat").read_text()) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, KeyError, IndexError):
            return None
        return busy, sum(os.times()[:4]), time.perf_counter()


def ratio_of(peer: Callable[[], object], ours: Callable[[], object], steps: int = _STEPS) -> float:
    """Returns the median of the ratios of processor time, taken in turns."""
    found = []
    for step in range(steps + 2):
        times = []
        for run in (peer, ours):
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
        if step >= 2:  # the first ones warm up
            found.append(times[0] / times[1])
    return statistics.median(found)


def of_operators() -> dict[str, float]:
    """Interaction, look-up with update, and bags, each beside plain torch."""
    import ops as figures
    import torch

    shape = argparse.Namespace(
        **{"batch": 2048, "tables": 26, "dim": 64, "rows": 20_000, "hotness": 8, "device": "cpu"}
    )
    chosen = {"interaction forward+backward", "gather+SGD", "bags"}
    cases = figures.cases(shape, figures.Tables(shape), torch.float32)
    return {
        f"{name} x torch": ratio_of(sides["torch"], sides["ours"])
        for name, sides, *_ in islice(cases, 7)
        if name in chosen
    }


def of_a_step() -> float:
    """A training step of the small model, beside the faster of two plain ones of torch."""
    from train import measure

    options = argparse.Namespace(steps=20, rounds=7, batch=0, optimizer=None, device="cpu")
    return measure("small", "fp32", options, time.process_time)["ratio"]


def of_scoring() -> float:
    """Scores of 4096 rows by the small model, beside plain torch."""
    import torch
    from inference import WORKLOADS, eager_of, inputs

    from dlrm.distributed import World
    from dlrm.model.dlrm import DLRM

    model = DLRM(WORKLOADS["small"], World(device="cpu")).eval()
    eager = eager_of(model, "cpu")
    rows = tuple(map(torch.from_numpy, inputs(model.config, 4096)))
    with torch.inference_mode(), model.weights_unchanged():
        return ratio_of(lambda: eager(*rows), lambda: model(*rows))


def of_auc() -> float:
    """ROC AUC beside scikit-learn's."""
    import torch
    from auc import rows
    from sklearn.metrics import roc_auc_score

    from dlrm.metrics.clicks import roc_auc

    scores, labels = rows(_ROWS, 0)
    tensors = torch.from_numpy(scores), torch.from_numpy(labels).float()
    return ratio_of(lambda: roc_auc_score(labels, scores), lambda: roc_auc(*tensors), 9)


def measured() -> dict[str, float]:
    """Returns the six ratios by name."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {
        **of_operators(),
        "small model's step x the faster torch": of_a_step(),
        "scoring x torch": of_scoring(),
        "ROC AUC x scikit-learn": of_auc(),
    }


def this_processor() -> str:
    """Returns the model name of the processor and the instruction set of our kernels."""
    from dlrm.machine import processor
    from dlrm.ops import instruction_set

    return f"{processor()}, {instruction_set()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="replace this processor's record")
    again = parser.parse_args().record
    records, machine = read_records(RECORDS), Machine()
    ratios = measured()
    outcome = judged(ratios, records, this_processor(), machine.others(), again)
    print("\n".join(outcome.lines))
    if outcome.records is not None:
        text = json.dumps(outcome.records, indent=1, sort_keys=True)
        RECORDS.write_text(text + "\n", encoding="utf-8")
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
