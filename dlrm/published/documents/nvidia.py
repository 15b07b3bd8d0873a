"""The rows of source 001: NVIDIA's DLRM for PyTorch, of June 2020.

The small model has the tables that Criteo's logs give with a frequency limit of 15, the large one
those of a limit of 3. Each row of the document's tables has two precisions, so it is two rows here.
"""

from collections.abc import Iterator

from dlrm.published.documents.benchmark_row import BenchmarkRow, Figure, by_id

# Rows of each table, as the preprocessing gives them for the 24 days of Criteo's logs.
TABLE_SIZES = {
    "small": (
        *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11),
        *(2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
    ),
    "large": (
        *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
        *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
    ),
}
_LIMITS = {"small": 15, "large": 3}
_A100, _DGX1, _DGX2 = "A100 40GB", "V100 32GB, DGX-1", "V100 32GB, DGX-2"
_PRECISIONS = {
    "tf32": ("--noamp", "--tf32"),
    "fp32": ("--noamp", "--notf32"),
    "amp": ("--amp",),
}
_MULTI = "python -u -m torch.distributed.launch --use_env --nproc_per_node {gpus} -m"

# GPU, GPUs, model, then in single and in mixed precision the AUC and the minutes, and the speed-up.
_ACCURACY = (
    (_A100, "dgx-a100", 8, "large", (0.8027, 8.79), (0.8027, 6.16), 1.43),
    (_A100, "dgx-a100", 1, "small", (0.8036, 28.20), (0.8036, 17.45), 1.62),
    (_DGX1, "dgx-1", 8, "large", (0.8027, 46.29), (0.8027, 22.72), 2.04),
    (_DGX1, "dgx-1", 1, "small", (0.8035, 105.98), (0.8035, 31.12), 3.40),
)
# GPU, GPUs, model, then samples a second in single and in mixed precision, and the speed-up.
_THROUGHPUT = (
    (_A100, "dgx-a100", 8, "large", 8252438.74, 11771969.56, 1.43),
    (_A100, "dgx-a100", 1, "small", 2498002.39, 4081969.37, 1.63),
    (_DGX1, "dgx-1", 8, "large", 1538759.56, 3257414.75, 2.12),
    (_DGX1, "dgx-1", 1, "small", 670238.82, 2281278.45, 3.40),
    (_DGX2, "dgx-2", 16, "large", 4343127.59, 9454627.44, 2.18),
    (_DGX2, "dgx-2", 8, "large", 2948808.82, 7057842.56, 2.39),
    (_DGX2, "dgx-2", 1, "small", 706933.08, 2417584.57, 3.42),
)
_SEEDS = {  # AUC in mixed and in single precision
    8: (0.803696, 0.803669),
    9: (0.803617, 0.803574),
    10: (0.803672, 0.80367),
    11: (0.803699, 0.803683),
    12: (0.803659, 0.803724),
    13: (0.803578, 0.803565),
    14: (0.803609, 0.803613),
    15: (0.803585, 0.803615),
    16: (0.803553, 0.803583),
    17: (0.803644, 0.803688),
    18: (0.803656, 0.803609),
    19: (0.803589, 0.803635),
    20: (0.803567, 0.803611),
    21: (0.803548, 0.803487),
    22: (0.803532, 0.803591),
    23: (0.803625, 0.803601),
}
_MEANS = (0.803614, 0.803620)
_BATCH = (
    "the table has 64k a GPU; the printed command's default, 65,536, is the batch of all processes"
)


def _row(name: str, number: str, size: str, gpus: int, precision: str, **more) -> BenchmarkRow:
    command, several = ("main", "") if gpus == 1 else ("dist_main", _MULTI.format(gpus=gpus))
    launcher, data = several or "python -m", "/data/" if several else "/data"
    amp = " --amp" if precision == "amp" else ""
    return BenchmarkRow(
        **{
            "rule": "nvidia",
            "notes": _BATCH if gpus > 1 else "",
            "flags": ("--mode=train", *_PRECISIONS[precision]),
            "printed": f"{launcher} dlrm.scripts.{command} --mode train --dataset {data}{amp}",
        }
        | more
        | {
            "id": f"nvidia/dlrm-{size}/{name}",
            "source": f"001 {number}",
            "command": command,
            "processes": gpus,
            "data": f"criteo, frequency limit {_LIMITS[size]}",
            "data_flags": (
                "--dataset_type=synthetic_gpu",
                f"--synthetic_dataset_table_sizes={','.join(map(str, TABLE_SIZES[size]))}",
            ),
        }
    )


def _place(gpu: str, gpus: int) -> str:
    return f"{gpus} x {gpu}"


def _accuracy() -> Iterator[BenchmarkRow]:
    for number, row in enumerate(_ACCURACY, 1):
        gpu, machine, gpus, size, single, mixed, speedup = row
        for precision, (auc, minutes) in ((_single(gpu), single), ("amp", mixed)):
            figures = [Figure(auc, "AUC", "auc"), Figure(minutes, "minutes", "minutes")]
            if precision == "amp":
                figures.append(Figure(speedup, "x", "speedup"))
            yield _row(
                f"accuracy/{machine}-{gpus}gpu/{precision}",
                f"accuracy {number}",
                size,
                gpus,
                precision,
                printed=None,
                quotation=f"Training accuracy results: {gpus} GPUs, {size}: AUC {auc:.4f}, "
                f"{minutes:.2f} minutes",
                published=tuple(figures),
                hardware=_place(gpu, gpus),
                rule="result",
            )


def _throughput() -> Iterator[BenchmarkRow]:
    for number, row in enumerate(_THROUGHPUT, 1):
        gpu, machine, gpus, size, single, mixed, speedup = row
        for precision, value in ((_single(gpu), single), ("amp", mixed)):
            figures = [Figure(value, "items/images per second")]
            if precision == "amp":
                figures.append(Figure(speedup, "x", "speedup"))
            yield _row(
                f"throughput/{machine}-{gpus}gpu/{precision}",
                f"performance {number}",
                size,
                gpus,
                precision,
                quotation=f"Training performance results: {gpus} GPUs, {size}, {value:.2f}",
                published=tuple(figures),
                hardware=_place(gpu, gpus),
            )


def _single(gpu: str) -> str:
    return "tf32" if gpu == _A100 else "fp32"


def _seeds() -> Iterator[BenchmarkRow]:
    quotation = "Training stability test: complete convergence data for 16 different random seeds"
    for seed, values in _SEEDS.items():
        for precision, auc in zip(("amp", "fp32"), values, strict=True):
            yield _row(
                f"seed-{seed}/{precision}",
                f"stability, seed {seed}",
                "small",
                1,
                precision,
                flags=("--mode=train", *_PRECISIONS[precision], f"--seed={seed}"),
                printed=None,
                quotation=quotation,
                published=(Figure(auc, "AUC", "auc"),),
                hardware="not stated",
                rule="result",
            )
    yield _row(
        "seeds",
        "stability, mean",
        "small",
        1,
        "amp",
        printed=None,
        quotation=quotation,
        published=tuple(
            Figure(auc, "AUC", "auc", system=name)
            for name, auc in zip(("Mixed precision", "Single precision"), _MEANS, strict=True)
        ),
        hardware="not stated",
        rule="result",
        measure="seeds",
        of="nvidia/dlrm-small/seed-8/amp",
        against="nvidia/dlrm-small/seed-8/fp32",
    )


def _commands() -> Iterator[BenchmarkRow]:
    """The commands of the document's guides that no table has."""
    for gpus in (1, 8):
        launcher = "python -m" if gpus == 1 else _MULTI.format(gpus=gpus)
        name, end = ("main", "/") if gpus == 1 else ("dist_main", "")
        for mode in ("train", "test"):
            yield _row(
                f"quick-start/{mode}-{gpus}gpu",
                f"Quick Start Guide, {mode}",
                "small",
                gpus,
                "fp32",
                flags=(f"--mode={mode}",),
                printed=f"{launcher} dlrm.scripts.{name} --mode {mode} --dataset "
                f"/data/dlrm/binary_dataset{end}",
                quotation="Start training." if mode == "train" else "Start validation/evaluation.",
                rule="result" if mode == "train" else "checkpoint",
            )
    benchmark = "--max_steps 1000 --benchmark_warmup_steps 500"
    yield _row(
        "benchmark/train",
        "Training performance benchmark",
        "small",
        1,
        "fp32",
        flags=("--mode=train",),
        printed=f"python -m dlrm.scripts.main --mode train {benchmark} --dataset /data",
        quotation="To benchmark the training performance on a specific batch size",
    )
    yield _row(
        "benchmark/inference",
        "Inference performance benchmark",
        "small",
        1,
        "fp32",
        flags=("--mode=inference_benchmark",),
        printed="python -m dlrm.scripts.main --mode inference_benchmark --dataset /data",
        quotation="To benchmark the inference performance on a specific batch size",
        rule="nvidia_inference",
    )


ROWS = by_id([*_accuracy(), *_throughput(), *_seeds(), *_commands()])
