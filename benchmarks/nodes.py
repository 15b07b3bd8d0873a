"""Times checkpoints of a training on two nodes without a common folder.

    python benchmarks/nodes.py [--mib 256] [--steps 200] [--rounds 3]

Two agents of torchrun with two processes each train on synthetic rows, each agent in a directory
of its own. The run saves nothing, or eight checkpoints: into a directory that all see, gathered on
the node of the first process, or uploaded from there to an endpoint of S3 on 127.0.0.1. The time of
a checkpoint is an eighth of what a run takes longer than the one that saves nothing; the fastest
runs are compared. Its share of a run of ten minutes is that time over 600 s.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from s3_server import Endpoint

_TABLES, _DIM, _BATCH = 8, 64, 1024
_SAVES = 8


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def train(nodes: list[Path], words: list[str]) -> float:
    """Runs a training with an agent in each directory; returns its seconds."""
    launcher = ["torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port()}"]
    launcher += ["--local_addr=127.0.0.1", "-m", "dlrm.scripts.dist_main"]
    began = time.monotonic()
    agents = []
    for node in nodes:
        node.mkdir(parents=True)
        with open(node / "log", "w") as log:
            command = [sys.executable, "-m", *launcher, *words]
            agents.append(subprocess.Popen(command, cwd=node, stdout=log, stderr=log))
    for agent, node in zip(agents, nodes, strict=True):
        assert agent.wait() == 0, (node / "log").read_text()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of the tables")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    rows = options.mib * 2**20 // (4 * _DIM * _TABLES)
    words = ["--dataset_type=synthetic_gpu", "--base_device=cpu", "--backend=gloo"]
    words += [f"--synthetic_dataset_table_sizes={','.join([str(rows)] * _TABLES)}"]
    words += [f"--embedding_dim={_DIM}", f"--bottom_mlp_sizes=128,{_DIM}", "--top_mlp_sizes=128,1"]
    words += ["--num_numerical_features=8", f"--batch_size={_BATCH}"]
    words += [f"--max_steps={options.steps}"]
    words += [f"--synthetic_dataset_num_entries={_BATCH * options.steps}"]
    saving = [f"--checkpoint_freq={options.steps // _SAVES}", "--keep_checkpoints=2"]
    with tempfile.TemporaryDirectory(prefix="dlrm-nodes-") as name:
        folder = Path(name)
        with Endpoint(folder / "objects") as endpoint:
            os.environ.update(endpoint.environment)
            endpoint.make("bench")
            found: dict[str, list[float]] = {}
            for turn in range(options.rounds):
                places = {
                    "nothing": None,
                    "common folder": str(folder / f"common{turn}"),
                    "gathered": "run",
                    "URI": f"s3://bench/run{turn}",
                }
                for side, place in places.items():
                    nodes = [folder / f"{side}{turn}" / node for node in ("a", "b")]
                    own = [] if place is None else [f"--save_checkpoint_path={place}", *saving]
                    own += [f"--cache_dir={nodes[0]}/cache"] if side == "URI" else []
                    found.setdefault(side, []).append(train(nodes, [*words, *own]))
    nothing = min(found.pop("nothing"))
    print(f"{options.mib} MiB of tables; {nothing:.1f} s without checkpoints")
    for side, taken in found.items():
        each = (min(taken) - nothing) / _SAVES
        print(
            f"{side:<14}{each:6.2f} s a checkpoint, {options.mib / each:6.0f} MiB/s, "
            f"{each / 6:.2f} % of ten minutes"
        )


if __name__ == "__main__":
    main()
