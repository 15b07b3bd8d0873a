"""Times data by URI beside the same data on the disk and a bare client of the store.

    python benchmarks/remote.py             all measures, with 4 M rows
    python benchmarks/remote.py --quick     the same at reduced size, in 3 minutes
    python benchmarks/remote.py --what small --rounds 5

`s3_server.py` is the store, on the same machine and its cores; its processor time is printed beside
each measure. The *bare client* is obstore alone, which fetches the same objects with as many
requests in flight and discards them. Sides take turns, and figures are medians over rounds. Every
round by URI begins with an empty cache.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store
from s3_server import Endpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.remote.cache import Cache
from dlrm.remote.localize import localize
from dlrm.remote.objects import IN_FLIGHT, PART_BYTES
from dlrm.remote.uri import Uri
from dlrm.scripts.simulate_logs.command import Simulation, simulate

ROOT = Path(__file__).resolve().parent.parent
FAULTS = {"latency": 0.02, "failing": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default=",".join(WHAT), help="comma-separated; default: all")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the logs (default 4 M)")
    parser.add_argument("--objects", type=int, default=10_000, help="small ones (default 10,000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="400,000 rows, 2 rounds")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds = 400_000, 2
    print(f"{os.cpu_count()} cores, {options.rows:,} rows, {options.rounds} rounds", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Endpoint(Path(folder, "store")) as endpoint,
    ):
        os.environ.update(endpoint.environment)
        for what in options.what.split(","):
            bench = Bench(Path(folder, what), options, endpoint)
            WHAT[what](bench)
            shutil.rmtree(bench.folder)


class Bench:
    """A folder, an endpoint and what both have.

    Args:
        folder: a new folder.
        options: of the command.
        endpoint: the store.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, endpoint: Endpoint) -> None:
        self.folder, self.options, self.endpoint = folder, options, endpoint
        folder.mkdir()
        self.rounds, self._counter = options.rounds, 0

    @property
    def client(self) -> S3Store:
        """The bare client of the bucket."""
        allowed = {"client_options": {"allow_http": True}}
        return S3Store("bench", endpoint=self.endpoint.url, **allowed)

    def new(self, name: str) -> Path:
        """Returns a path that does not exist."""
        self._counter += 1
        return self.folder / f"{name}-{self._counter}"

    def fetch(self, prefix: str) -> int:
        """Fetches all objects below a prefix as a bare client, and returns their bytes."""
        client = self.client
        listed = [one for chunk in obstore.list(client, prefix) for one in chunk]
        parts = [
            (one["path"], begin, min(begin + PART_BYTES, one["size"]))
            for one in listed
            for begin in range(0, one["size"], PART_BYTES)
        ]

        def get(part: tuple[str, int, int]) -> int:
            key, begin, end = part
            if begin == 0 and end < PART_BYTES:
                return len(obstore.get(client, key).bytes())
            return len(obstore.get_range(client, key, start=begin, end=end))

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return sum(pool.map(get, parts))

    def put(self, folder: Path, prefix: str) -> None:
        """Writes all files of a folder as objects, as a bare client."""
        client, files = self.client, [path for path in folder.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(
                lambda path: obstore.put(client, f"{prefix}/{path.relative_to(folder)}", path),
                files,
            ):
                pass

    def run(self, *words: Any, **flags: Any) -> None:
        """Runs a command, with an empty cache."""
        cache = self.new("cache")
        given = [f"--{name}={value}" for name, value in flags.items()]
        command = [sys.executable, "-m", "dlrm", *map(str, words), *given]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        shutil.rmtree(cache, ignore_errors=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Lets requests wait and fail within the block."""
        self.endpoint.set(**FAULTS)
        yield
        self.endpoint.set(**dict.fromkeys(FAULTS, 0))

    def measured(self, sides: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Runs sides in turn; returns and prints their medians.

        Returns:
            Seconds by the clock, of the server's processor, and of this process and its children.
        """
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
        for _ in range(self.rounds):
            for name, act in sides.items():
                began, server = time.perf_counter(), self.endpoint.facts()["processor_seconds"]
                own = _processor_seconds()
                act()
                seconds = time.perf_counter() - began
                server = self.endpoint.facts()["processor_seconds"] - server
                found[name].append((seconds, server, _processor_seconds() - own))
        print("\n| side | s | server's processor, s | own processor, s |\n|---|---|---|---|")
        medians = {}
        for name, rows in found.items():
            medians[name] = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(f"| {name} | {' | '.join(f'{one:.2f}' for one in medians[name])} |", flush=True)
        return medians


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def told(what: str, ratio: float, sign: str, target: float) -> None:
    print(f"{what}: {ratio:.2f} (target {sign} {target})", flush=True)


def content(folder: Path) -> dict[str, str]:
    """Returns the digests of files, without reports, which state times."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".bin", ".yaml", ".npy", ".safetensors")
    }


def prepare(bench: Bench) -> None:
    """Preparing logs by URI, beside from the disk."""
    raw, outputs = bench.folder / "raw", {}
    simulate(Simulation(rows=bench.options.rows, days=8), raw)
    for path in raw.glob("*.json"):
        path.unlink()
    bench.put(raw, "raw")
    size = sum(path.stat().st_size for path in raw.iterdir())
    print(f"\n### Preparing, {bench.options.rows:,} rows, {size / 1e9:.2f} GB of logs")

    def by(side: str, source: Any) -> Callable[[], None]:
        def act() -> None:
            shutil.rmtree(outputs.pop(side, bench.folder / "none"), ignore_errors=True)
            outputs[side] = bench.new("dataset")
            bench.run("prepare", schema="criteo", input=source, output=outputs[side])

        return act

    def published() -> None:
        logs, output = "s3://bench/raw", "s3://bench/dataset"
        bench.run("prepare", "--overwrite", schema="criteo", input=logs, output=output)

    sides = {
        "from disk": by("disk", raw),
        "bare client": lambda: bench.fetch("raw"),
        "by URI": by("uri", "s3://bench/raw"),
        "by URI to URI": published,
    }
    found = bench.measured(sides)
    least = found["from disk"][0] + found["bare client"][0]
    told("by URI / (from disk + bare client)", found["by URI"][0] / least, "<=", 1.3)
    print(f"to URI / the same: {found['by URI to URI'][0] / least:.2f} (its upload is in neither)")
    with bench.faults():
        print(f"\nwith {FAULTS}:")
        bad = bench.measured({"by URI, faults": by("faults", "s3://bench/raw")})["by URI, faults"]
    told("rate, faults / none", found["by URI"][0] / bad[0], ">=", 0.7)
    assert content(outputs["disk"]) == content(outputs["uri"]) == content(outputs["faults"])
    print("same bytes from the disk, by URI, and with faults")


def small(bench: Bench) -> None:
    """Small objects fetched into the cache, beside a client that discards them."""
    count = bench.options.objects
    print(f"\n### {count:,} objects of 4 KiB, {IN_FLIGHT} in flight")
    client, block = bench.client, os.urandom(4096)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        keys = (f"small/{i % 100:02}/{i:06}" for i in range(count))
        for _ in pool.map(lambda key: obstore.put(client, key, block), keys):
            pass
    made = []

    def ours() -> None:
        made.append(bench.new("cache"))
        localize(Uri.parse("s3://bench/small"), Cache.open(made[-1]))

    def again() -> None:
        localize(Uri.parse("s3://bench/small"), Cache.open(made[-1]))

    def files() -> None:
        folder = bench.new("files")
        folder.mkdir()
        for i in range(count):
            (folder / f"{i}").write_bytes(block)

    sides = {
        "bare client": lambda: bench.fetch("small"),
        "as many files written to the disk": files,
        "into the cache": ours,
        "from the cache": again,
    }
    found = bench.measured(sides)
    ours_, bare = found["into the cache"], found["bare client"]
    told("into the cache / bare client", ours_[0] / bare[0], "<=", 1.3)
    disk = found["as many files written to the disk"]
    print(f"into the cache / (bare client + files): {ours_[0] / (bare[0] + disk[0]):.2f}")
    print(f"the same in processor time: {ours_[2] / bare[2]:.2f}")


WHAT = {"prepare": prepare, "small": small}

if __name__ == "__main__":
    main()
