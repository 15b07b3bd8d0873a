"""Writes raw click logs in Criteo's format whose best reachable AUC is known.

    dlrm simulate --output /tmp/raw --rows 700000 --days 8

Each of `day_0`, `day_1`, ... is a text file of lines `label <tab> integers <tab> hashes`. Ids
follow power laws, a share of them is new each day, and some fields are missing; those at the end of
a line are left out. Labels are drawn from a planted logistic model:

    logit = bias + drift(day) + effects of each feature's value + products of pairs of features

The effect of a value is a hash of it and is smaller for rarer values, so that some hundred thousand
rows suffice to learn the effects. Missing fields, and ids too rare to be distinguished after
preprocessing, have the effect of their preprocessed value. `planted.json` has the AUC and log loss
of the true probabilities on each day and on the halves of the last, which no model can surpass.
With --drift and --new_ids, days differ, as `dlrm daily` follows them.

Every chunk of rows is a function of (seed, day, chunk), so memory does not grow with the rows.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.scripts.simulate_logs import Simulation
from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class OutputConfig:
    """The place of the logs."""

    output: Path = setting(REQUIRED, "directory to write to", uri="replace, plain")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", OutputConfig), ("Flags", Simulation)])
    return run_command(line, _run, __doc__, arguments, usage=2)


def _run(values: Values) -> None:
    from dlrm.scripts.simulate_logs.command import simulate

    output: Path = values["output"]
    planted = simulate(values.config(Simulation), output)
    aucs = {name: planted[name]["auc"] for name in ("test", "validation")}
    best = [f"{name} {'undefined' if auc is None else f'{auc:.4f}'}" for name, auc in aucs.items()]
    print(f"{output}: best reachable AUC: {', '.join(best)}")


if __name__ == "__main__":
    sys.exit(main())
