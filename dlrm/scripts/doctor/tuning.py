"""Times the matrix products of MLPs, and prints whose are faster on this processor."""

import statistics
import time
from collections.abc import Callable, Sequence

from dlrm.flags import UsageError

# The MLPs of benchmarks/train.py, each from its inputs to its last hidden layer.
LAYERS = (
    *("13-512-256-128", "480-1024-1024-512-256"),  # Terabyte
    *("13-512-256-64-16", "368-512-256"),  # Kaggle
    *("13-128-64-16", "368-256-128"),  # small
)
_ROUNDS, _SECONDS = 9, 0.02  # of a round: calls are repeated to last as long


def tune(layers: Sequence[str], batch_size: int) -> int:
    """Prints a table, and for each dtype the flag of the faster; returns the exit code."""
    from dlrm.ops import PRODUCTS, instruction_set, native_available

    sizes = [_sizes(text) for text in layers]
    if not native_available():
        raise UsageError(
            "--tune: the native operators are not loaded, so there is nothing to choose"
        )
    print(f"{instruction_set()}, batch {batch_size}: milliseconds forward and backward, medians\n")
    print(f"{'layers':<24} {'dtype':<9} {'native':>8} {'torch':>8}  faster")
    totals = {name: dict.fromkeys(PRODUCTS, 0.0) for name in ("float32", "bfloat16")}
    for own in sizes:
        for name, total in totals.items():
            times = _times(own, batch_size, name)
            milliseconds = " ".join(f"{1e3 * times[one]:8.3f}" for one in PRODUCTS)
            line = f"{'-'.join(map(str, own)):<24} {name:<9} {milliseconds}  {_faster(times)}"
            print(line, flush=True)
            for one in PRODUCTS:
                total[one] += times[one]
    print()
    for name, total in totals.items():
        print(_advice(name, total))
    return 0


def _faster(times: dict[str, float]) -> str:
    return min(times, key=times.__getitem__)


def _advice(name: str, total: dict[str, float]) -> str:
    """Returns the flag of the products that are faster in total."""
    import torch

    from dlrm.ops import choose_products

    faster = _faster(total)
    ratio = max(total.values()) / total[faster]
    start = f"{name}: those of {faster} are {ratio:.2f} times as fast in total: "
    if faster == choose_products(getattr(torch, name)):
        return f"{start}--mlp_products auto, the default, takes them"
    return f"{start}pass --mlp_products {faster}"


def _sizes(text: str) -> list[int]:
    sizes = text.split("-")
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(f"--layers {text}: expected inputs and outputs of layers, as 368-256-128")
    return [int(size) for size in sizes]


def _times(layers: list[int], batch_size: int, name: str) -> dict[str, float]:
    """Returns the seconds of a call by each products; they take turns."""
    import torch

    from dlrm.model.layers.mlp import mlp

    dtype = getattr(torch, name)
    network = mlp(layers[0], layers[1:], 0, "tuned", dtype)
    inputs = torch.randn(batch_size, layers[0], dtype=dtype, requires_grad=True)
    grad = torch.randn(batch_size, layers[-1], dtype=dtype)

    def step(products: str) -> None:
        network.products = products
        network(inputs).backward(grad)

    times: dict[str, list[float]] = {"native": [], "torch": []}
    counts = {products: _repeats(step, products) for products in times}
    for _ in range(_ROUNDS):
        for products, seconds in times.items():
            began = time.perf_counter()
            for _ in range(counts[products]):
                step(products)
            seconds.append((time.perf_counter() - began) / counts[products])
    return {products: statistics.median(seconds) for products, seconds in times.items()}


def _repeats(step: Callable[[str], None], products: str) -> int:
    step(products)
    began = time.perf_counter()
    step(products)
    return max(1, int(_SECONDS / (time.perf_counter() - began)))
