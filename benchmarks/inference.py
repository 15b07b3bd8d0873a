"""Measures the latency of every runtime that serves a model, in process and by a Triton server.

    python benchmarks/inference.py [--workload kaggle] [--batch 1 64 4096] [--rounds 20]
    python benchmarks/inference.py --device cuda --workload terabyte --batch 32768
    python benchmarks/inference.py --served [--workload small]

In process: eager is plain torch, in the trained network's own layout; native has this package's
operators; onnx is the default runtime of the server. The limit is the time of the MLPs' matrix
products alone in torch. All take turns, a batch each, and medians are compared. On a GPU only eager
and native run, the batch is on the GPU beforehand, and the clock waits for each result. Weights and
ids are random: time does not depend on them.

Served: a model is trained for a step and exported; nvidia-pytriton's server gets gRPC requests of a
row from `triton/client.py`.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.serving.network.exportable import Exportable
from dlrm.serving.network.platforms import PLATFORMS, Score
from dlrm.serving.network.quantize import quantize_tables

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {  # one-hot uniform ids
    "small": DLRMConfig(
        (20_000,) * 26,
        embedding_dim=16,
        bottom_mlp_sizes=(128, 64, 16),
        top_mlp_sizes=(256, 128, 1),
    ),
    "kaggle": DLRMConfig(
        (100_000,) * 26,
        embedding_dim=16,
        bottom_mlp_sizes=(512, 256, 64, 16),
        top_mlp_sizes=(512, 256, 1),
    ),
    "terabyte": DLRMConfig((100_000,) * 26),
}
PEER = "eager"
Run = Callable[[], object]


@torch.inference_mode()
def in_process(arguments: argparse.Namespace) -> None:
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, load of the machine before:"
        f" {os.getloadavg()[0]:.1f}; milliseconds, and how many times as fast as eager\n"
    )
    others = ("torchscript", "onnx") if arguments.device == "cpu" else ()
    names = (PEER, "native", *others, "matrix products")
    print(f"| workload | batch | {' | '.join(names)} |")
    print("|---|---" + "|---" * len(names) + "|")
    for workload in arguments.workload:
        model = DLRM(WORKLOADS[workload], World(device=arguments.device)).eval()
        with tempfile.TemporaryDirectory() as directory, model.weights_unchanged():
            models = open_models(model, Path(directory), arguments.device)
            for batch in arguments.batch:
                runs = {name: model(batch) for name, model in models.items()}
                seconds = in_turn(runs, arguments.rounds, arguments.device)
                cells = [
                    f"{seconds[name] * 1e3:.3f} ({seconds[PEER] / seconds[name]:.2f})"
                    for name in names
                ]
                print(f"| {workload} | {batch} | {' | '.join(cells)} |", flush=True)


def open_models(model: DLRM, directory: Path, device: str) -> dict[str, Callable[[int], Run]]:
    """Name -> function from a batch size to a call that scores such a batch."""
    config, eager = model.config, eager_of(model, device)

    def of_tensors(network: Callable) -> Callable[[int], Run]:
        def make(batch: int) -> Run:
            arrays = inputs(config, batch)
            tensors = tuple(torch.from_numpy(array).to(device) for array in arrays)
            return lambda: network(*tensors)

        return make

    native = {
        PEER: of_tensors(eager),
        "native": of_tensors(model),
        "matrix products": lambda batch: matrix_products(model, batch),
    }
    if device != "cpu":
        return native
    example = torch.zeros(2, 13), torch.zeros(2, 26, dtype=torch.long)
    scores = {}
    for name, platform in (("onnx", "onnx"), ("torchscript", "ts-trace")):
        exported = Exportable(model, quantize_tables(model, "fp32")).eval()
        (directory / name).mkdir()
        PLATFORMS[platform].write(exported, example, directory / name)
        scores[name] = PLATFORMS[platform].open(directory / name)

    def of_arrays(score: Score) -> Callable[[int], Run]:
        def make(batch: int) -> Run:
            arrays = inputs(config, batch)
            return lambda: score(*arrays)

        return make

    return native | {name: of_arrays(score) for name, score in scores.items()}


def eager_of(model: DLRM, device: str) -> DLRM:
    """Returns the same network in plain torch."""
    plain_torch = dataclasses.replace(model.config, interaction_op="dot")
    eager = DLRM(plain_torch, World(device=device)).eval()
    eager.load_state_dict(model.state_dict())
    tables, begins = eager.embeddings, eager.embeddings.table_offsets[:-1]
    tables.forward = lambda ids, dtype: F.embedding(ids + begins, tables.weight).to(dtype)
    return eager


def inputs(config: DLRMConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    ids = np.stack([random.integers(0, size, batch) for size in config.table_sizes], 1)
    return random.random((batch, config.num_numerical_features), np.float32), ids


def matrix_products(model: DLRM, batch: int) -> Run:
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    pairs = [
        (torch.rand(batch, layer.in_features, device=layer.weight.device), layer.weight)
        for layer in layers
    ]
    return lambda: [F.linear(rows, weight) for rows, weight in pairs]


def in_turn(runs: dict[str, Run], rounds: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of each call; they take turns, and the first three of each do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(3 + rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if index >= 3:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def served(arguments: argparse.Namespace) -> None:
    for workload in arguments.workload:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            export(WORKLOADS[workload], directory)
            alone = alone_in_process(directory)
            with server(directory / "repository") as address:
                one = ask(directory, address)
                print(
                    f"{workload}, batch 1: p50 {alone:.3f} ms in process, {one['p50_ms']:.3f} ms "
                    f"through gRPC: {one['p50_ms'] - alone:+.3f} ms (p99 {one['p99_ms']:.3f} ms)",
                    flush=True,
                )


def export(config: DLRMConfig, directory: Path) -> None:
    """Writes a dataset, a checkpoint after one step, and the model into a repository."""
    sizes = {
        name: ",".join(map(str, getattr(config, name)))
        for name in ("table_sizes", "bottom_mlp_sizes", "top_mlp_sizes")
    }
    dataset, run = directory / "dataset", directory / "run"
    python(
        *("-m", "dlrm.scripts.prepare_synthetic_dataset", f"--synthetic_dataset_dir={dataset}"),
        f"--synthetic_dataset_table_sizes={sizes['table_sizes']}",
        "--synthetic_dataset_num_entries=40000",
    )
    python(
        *("-m", "dlrm.scripts.main", f"--dataset={dataset}", f"--save_checkpoint_path={run}"),
        *(f"--bottom_mlp_sizes={sizes['bottom_mlp_sizes']}", "--base_device=cpu", "--max_steps=1"),
        *(f"--top_mlp_sizes={sizes['top_mlp_sizes']}", "--lr=0.01", "--warmup_steps=0"),
        *(f"--embedding_dim={config.embedding_dim}", f"--log_path={directory / 'log.json'}"),
    )
    python(
        *(ROOT / "triton" / "export.py", f"--checkpoint={run}"),
        f"--save-dir={directory / 'repository'}",
    )


def alone_in_process(directory: Path) -> float:
    """Median milliseconds of the served model file at batch 1, without a server."""
    version = directory / "repository" / "model" / "1"
    facts = json.loads((version / "model.json").read_text())
    score = PLATFORMS["onnx"].open(version)
    one = np.zeros((1, facts["num_numerical"]), np.float32), np.zeros((1, 26), np.int64)
    return in_turn({"onnx": lambda: score(*one)}, 2000)["onnx"] * 1e3


@contextmanager
def server(repository: Path):
    """Yields the gRPC address of a server."""
    ports = free_ports(3)
    flags = [
        f"--{name}-port={port}"
        for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
    ]
    command = [sys.executable, ROOT / "triton" / "server.py", "--model-repository", repository]
    with open(repository.parent / "server.log", "w") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
    try:
        wait_until_ready(f"http://127.0.0.1:{ports[0]}/v2/health/ready", process, log.name)
        yield f"127.0.0.1:{ports[1]}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen, log: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"the server did not start:\n{Path(log).read_text()[-2000:]}")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for own in sockets:
        own.bind(("127.0.0.1", 0))
    ports = [own.getsockname()[1] for own in sockets]
    for own in sockets:
        own.close()
    return ports


def ask(directory: Path, address: str) -> dict[str, float]:
    """Returns the figures of the client for single rows."""
    report = directory / "report.json"
    python(
        *(ROOT / "triton" / "client.py", f"-u={address}", f"--input={directory / 'dataset'}"),
        *("--batch-size=1", "--test-batches=2000", f"--report={report}"),
    )
    return json.loads(report.read_text())


def python(*words: object) -> None:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=["small", "kaggle"], choices=WORKLOADS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--served", action="store_true", help="measure behind a Triton server")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    if options.served and options.device != "cpu":
        parser.error("--served: the exported model runs on the CPU")
    (served if options.served else in_process)(options)


if __name__ == "__main__":
    main()
