"""Where the time of training steps went since the last printed line, and what bounds it."""

from collections.abc import Mapping

import torch

from dlrm.distributed import World, all_sum
from dlrm.step_clock import DATA, EXCHANGE, LOOKUP, PARTS, PRODUCTS, RECORDED, STORE, UPDATE

COMPUTE_BOUND = "compute-bound"
WAITS = {DATA: "input-bound", EXCHANGE: "communication-bound", STORE: "store-bound"}
LEAST_WAIT = 0.1  # of a step, which it bounds then
_SHOWN = 0.005


def shares_of_ranks(seconds: Mapping[str, float], world: World) -> dict[str, float]:
    """Returns the share of each part in the steps of all ranks; nothing where no time was measured.

    Args:
        seconds: of each of `PARTS`, on this rank.
        world: the ranks, which all call it.
    """
    sums = all_sum(torch.tensor([seconds[name] for name in PARTS]), world).tolist()
    total = sum(sums)
    return {name: one / total for name, one in zip(PARTS, sums, strict=True)} if total else {}


def bound_by(shares: Mapping[str, float]) -> tuple[str, str]:
    """Returns what bounds the steps, and the part of them that takes longest of what does.

    Waits overlap with the rest of a step, as batches are read and vectors sent meanwhile: what is
    left of the longest one bounds the steps if it is a tenth of them.
    """
    wait = max(WAITS, key=lambda name: shares[name])
    if shares[wait] >= LEAST_WAIT:
        return WAITS[wait], wait
    return COMPUTE_BOUND, max((PRODUCTS, LOOKUP, UPDATE, RECORDED), key=lambda name: shares[name])


def verdict_line(shares: Mapping[str, float], advice: Mapping[str, str]) -> str:
    """Returns shares and verdict as a line for people.

    Args:
        shares: of the parts.
        advice: what to try, by part.
    """
    verdict, longest = bound_by(shares)
    shown = sorted((share, name) for name, share in shares.items() if share >= _SHOWN)
    parts = ", ".join(f"{name} {share:.0%}" for share, name in reversed(shown))
    advised = f"; try {advice[longest]}" if longest in advice else ""
    return f"time: {parts}: {verdict}{advised}"
