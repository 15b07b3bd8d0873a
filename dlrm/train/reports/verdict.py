"""Verdict on the time of training steps since the last printed line: its parts and its bound."""

from collections.abc import Mapping

import torch

from dlrm.distributed import World, all_sum
from dlrm.step_clock import DATA, EXCHANGE, LOOKUP, PARTS, PRODUCTS, RECORDED, UPDATE

COMPUTE_BOUND = "compute-bound"
WAITS = {DATA: "input-bound", EXCHANGE: "communication-bound"}
LEAST_WAIT = 0.25  # a wait of this share of a step bounds the step
_SHOWN = 0.005


def shares_of_ranks(seconds: Mapping[str, float], world: World) -> dict[str, float]:
    """Returns the share of each part in the steps of all ranks; empty if no time was measured.

    Args:
        seconds: seconds of each of `PARTS`, on this rank.
        world: the ranks, all of which call it.
    """
    sums = all_sum(torch.tensor([seconds[name] for name in PARTS]), world).tolist()
    total = sum(sums)
    return {name: one / total for name, one in zip(PARTS, sums, strict=True)} if total else {}


def bound_by(shares: Mapping[str, float]) -> tuple[str, str]:
    """Returns the kind of bound of the steps, and the part of that kind that takes longest.

    Batches are read and vectors sent while a step computes; only the time spent waiting for them is
    measured. The longest wait bounds the steps if it takes a quarter of them or more.
    """
    wait = max(WAITS, key=lambda name: shares[name])
    if shares[wait] >= LEAST_WAIT:
        return WAITS[wait], wait
    return COMPUTE_BOUND, max((PRODUCTS, LOOKUP, UPDATE, RECORDED), key=lambda name: shares[name])


def verdict_line(shares: Mapping[str, float], advice: Mapping[str, str]) -> str:
    """Returns shares and verdict as a line for people.

    Args:
        shares: of the parts.
        advice: suggestion for each part.
    """
    verdict, longest = bound_by(shares)
    shown = sorted((share, name) for name, share in shares.items() if share >= _SHOWN)
    parts = ", ".join(f"{name} {share:.0%}" for share, name in reversed(shown))
    advised = f"; try {advice[longest]}" if longest in advice else ""
    return f"time: {parts}: {verdict}{advised}"
