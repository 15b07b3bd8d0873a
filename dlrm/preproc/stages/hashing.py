"""A counter-based hash: random numbers that depend only on a counter, not on caller or time."""

import numpy as np

FOLD = 0x5EED_0003  # added to the seed of a dataset to draw folds
_STEP = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(seed: int, counters: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of each counter: output `counter` of the splitmix64 generator.

    With one seed, different counters have different hashes (Steele, Lea and Flood, 2014, with the
    constants of Vigna's splitmix64.c).
    """
    state = counters.astype(np.uint64)
    state += np.uint64(1)
    state *= _STEP
    state += np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state
