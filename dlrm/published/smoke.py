"""The flags that reduce a row to a size for tests.

Few blocks, pixels and words, and two steps or two passes; precision, norms, the transfer
of data, the cuts of the pipeline and the schedule are those of the row.
"""

import re
from collections.abc import Callable, Mapping

from dlrm.published.rows import BenchmarkRow

_COMMON = ("--base_device=cpu", "--print_freq=1", "--benchmark_warmup_steps=0")
_BATCH = 2


def smoke_flags(row: BenchmarkRow) -> tuple[str, ...]:
    """Returns flags to append to those of a row, for two steps or passes of seconds on a CPU.

    Batches have two samples, the accumulation two micro-batches and the world two replicas at
    most.
    """
    if row.command not in SMOKE:
        raise ValueError(f"{row.id}: no sizes for {row.command}, only for {', '.join(SMOKE)}")
    return SMOKE[row.command](row, row.given)


def _cnn(row: BenchmarkRow, given: Mapping[str, str]) -> tuple[str, ...]:
    entries = ("--synthetic_dataset_num_entries=64", "--test_batch_size=8")
    if given["mode"] == "validate":  # the checkpoints determine the sizes of the network
        return (*_COMMON, *entries)
    if given["model"].startswith("efficientnet"):
        sizes = ("--image_size=64", "--width=0.25")
    else:
        sizes = ("--image_size=32", f"--depths={_depths(given.get('pipeline_splits', ''))}")
    if given["mode"] == "benchmark_inference":
        return (*_COMMON, *sizes, *_two_passes(given), "--synthetic_dataset_num_entries=4")
    rate = "--base_lr_exp=-25" if "base_lr_exp" in given else "--lr=1e-6"
    start = ("--start_epoch=0",) if "start_epoch" in given else ()
    return (*_COMMON, *entries, *sizes, *_two_steps(row, given), rate, *start)


def _bert(row: BenchmarkRow, given: Mapping[str, str]) -> tuple[str, ...]:
    parts = len(given["layers_per_stage"].split(",")) if "layers_per_stage" in given else 0
    sizes = (
        *("--hidden_size=32", "--num_heads=2", "--intermediate_size=64", "--vocab_size=120"),
        *("--max_seq_length=64", f"--num_layers={parts or 3}"),
        *((f"--layers_per_stage={','.join('1' * parts)}",) if parts else ()),
    )
    if given["mode"] == "inference_benchmark":
        return (*_COMMON, *sizes, *_two_passes(given), "--batches_per_step=2")
    return (
        *(*_COMMON, *sizes, *_two_steps(row, given), "--synthetic_dataset_num_entries=64"),
        *("--max_predictions_per_seq=4", "--max_query_length=8", "--doc_stride=16"),
    )


def _dlrm(row: BenchmarkRow, given: Mapping[str, str]) -> tuple[str, ...]:
    sizes = ("--bottom_mlp_sizes=32,16", "--embedding_dim=16", "--top_mlp_sizes=32,1")
    data: tuple[str, ...] = (f"--synthetic_dataset_table_sizes={','.join(['50'] * 26)}",)
    if "synthetic_dataset_hotness" in given:
        data = ("--synthetic_dataset_table_sizes=1000", "--num_numerical_features=32")
    if given["mode"] == "inference_benchmark":
        data = (
            *(*data, "--inference_benchmark_batch_sizes=1,4", "--inference_benchmark_steps=12"),
            "--inference_benchmark_runtimes=native",
        )
    return (
        *(*_COMMON, *sizes, *data, "--batch_size=32", "--test_batch_size=32", "--max_steps=2"),
        "--synthetic_dataset_num_entries=1024",
    )


SMOKE: dict[str, Callable[[BenchmarkRow, Mapping[str, str]], tuple[str, ...]]] = {
    "cnn": _cnn,
    "bert": _bert,
    "main": _dlrm,
    "dist_main": _dlrm,
}


def _two_passes(given: Mapping[str, str]) -> tuple[str, ...]:
    return (f"--batch_size={min(int(given['batch_size']), _BATCH)}", "--repeat=2")


def _two_steps(row: BenchmarkRow, given: Mapping[str, str]) -> tuple[str, ...]:
    accumulation = min(int(given.get("gradient_accumulation_steps", "1")), 2)
    eager = ("--execution=eager",) if given.get("execution") == "graph" else ()
    return (
        *(f"--batch_size={_BATCH}", f"--gradient_accumulation_steps={accumulation}"),
        *(f"--replicas={min(row.processes, 2)}", "--max_steps=2"),
        *eager,  # a compilation takes a minute
    )


def _depths(splits: str) -> str:
    """Returns the fewest blocks of a ResNet's stages with all cuts, such as b1/2/relu."""
    depths = [1, 1, 1, 1]
    for stage, block in re.findall(r"b(\d)/(\d+)", splits):
        depths[int(stage) - 1] = max(depths[int(stage) - 1], int(block) + 1)
    return ",".join(map(str, depths))
