"""Where this process stands among those that train together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The processes of a run; the default is the only process of a run on one machine.

    Attributes:
        rank: this process, in [0, size).
        size: number of processes.
        device: where this process computes, "cpu" or "cuda" or "cuda:<index>".
    """

    rank: int = 0
    size: int = 1
    device: str = "cpu"
