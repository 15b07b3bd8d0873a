"""Times a DLRM's inference: every runtime, and every batch size."""

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch

from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.metrics.latency import Latency
from dlrm.serving.network.platforms import RUNTIMES
from dlrm.serving.network.runtimes import open_runtimes
from dlrm.tasks.click import ClickWork
from dlrm.tasks.recommendation import ClickLoader
from dlrm.train.cuda_graph import CALLS_BEFORE
from dlrm.train.log import RunLog

_HELD_ROWS = 1 << 18
_HEAD = f"{'batch':>6}  {'runtime':<12}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'samples/s':>12}"


def inference_benchmark(work: ClickWork, test: ClickDataset, log: RunLog) -> dict[str, float]:
    """Returns latencies and throughput; keys without a runtime are those of the native model.

    Each result is also printed when it is measured, as a row of a table. Batch sizes that the user
    did not choose are limited to the rows of the test set.
    """
    task, values = work.task, work.values
    sizes, most = values["inference_benchmark_batch_sizes"], test.num_samples
    if "inference_benchmark_batch_sizes" not in values.given and most < max(sizes):
        sizes = tuple(dict.fromkeys(min(size, most) for size in sizes))
        log.line(f"note: the largest batch size is {most}, as the test set has no more rows")
    if not sizes:
        raise ValueError("--inference_benchmark_batch_sizes: expected one or more")
    for size in sizes:
        if not 1 <= size <= most:
            raise ValueError(
                f"--inference_benchmark_batch_sizes {size}: expected 1 to {most}, the rows of the "
                "test set"
            )
    summary = {}
    names = _other_runtimes(work, log)
    others = open_runtimes(task.model, names, test.batch(0), log.line)
    with task.weights_unchanged(), others as runtimes:
        log.line(_HEAD)
        for size in sizes:
            for name, predict in {"native": task.infer, **runtimes}.items():
                latency = _latency(predict, size, work)
                end = f"batch_{size}" if name == "native" else f"batch_{size}_{name}"
                for which in ("mean", "p50", "p95", "p99"):
                    summary[f"{which}_inference_latency_{end}"] = getattr(latency, which)
                rate = summary[f"mean_inference_throughput_{end}"] = size / latency.mean
                times = (f"{1e3 * t:10.3f}" for t in (latency.p50, latency.p95, latency.p99))
                log.line(f"{size:>6}  {name:<12}{''.join(times)}{rate:12,.0f}")
    return summary


def _other_runtimes(work: ClickWork, log: RunLog) -> list[str]:
    names = [name for name in work.values["inference_benchmark_runtimes"] if name != "native"]
    if wrong := sorted(set(names) - set(RUNTIMES)):
        raise ValueError(
            f"--inference_benchmark_runtimes {wrong[0]}: expected native, {', '.join(RUNTIMES)}"
        )
    if names and work.world.device != "cpu":
        log.line(f"{', '.join(names)}: left out, measured on the CPU only")
        return []
    return names


def _latency(predict: Callable[[Batch], Any], size: int, work: ClickWork) -> Latency:
    values, device = work.values, work.world.device
    warmup = values["benchmark_warmup_steps"] if "benchmark_warmup_steps" in values.given else 10
    if values["cuda_graphs"]:
        warmup = max(warmup, CALLS_BEFORE + 1)  # recording is not measured
    steps = warmup + values["inference_benchmark_steps"]
    assert work.config.source is not None
    data = replace(work.config.data, test_batch_size=size)
    batches = ClickLoader(work.config.source.splits(data).test, device)
    # Batches are read before timing starts, since reading would use the same cores.
    with closing(batches.repeated(min(steps, -(-_HELD_ROWS // size)))) as repeated:
        held = list(repeated)
    return measure_inference(predict, islice(cycle(held), steps), warmup, device)


@torch.inference_mode()
def measure_inference(
    predict: Callable[[Any], Any],
    batches: Iterable[Any],
    warmup: int = 10,
    device: str = "cpu",
) -> Latency:
    """Times each call of `predict` until the device has finished.

    Args:
        batches: the batches; the first `warmup` of them are not counted.
        warmup: number of calls to discard.
        device: device to wait for after every call.

    Raises:
        ValueError: there are no batches after the warm-up.
    """
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        predict(batch)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if len(seconds) <= warmup:
        raise ValueError(f"expected more than {warmup} batches to measure, got {len(seconds)}")
    return Latency.of(seconds[warmup:])
