"""Says on one page what of this installation works, what does not, and how to fix it.

    dlrm doctor         one page
    dlrm doctor --env   the same, and what torch.utils.collect_env finds, for a bug report

The exit code is 0 if training a small model works, and 1 otherwise.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import importlib.metadata
import logging
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.machine import available_cores, host_memory, idle_cores
from dlrm.scripts.common.java import java_version
from dlrm.settings import setting
from dlrm.version import __version__

OK, ABSENT, SLOW, BROKEN = "ok", "absent", "slow", "broken"  # broken: training cannot run
Finding = tuple[str, str, str]  # on a part: its state, its name, and its value or problem
REQUIREMENTS = {  # and what needs them
    **dict.fromkeys(("torch>=2.11", "numpy>=1.26", "absl-py>=2.0", "PyYAML>=6.0"), "training"),
    **dict.fromkeys(("Jinja2>=3.1.2", "safetensors>=0.4.5", "tqdm>=4.65"), "training"),
    "pyarrow>=25": "preprocessing of tables and .zst files",
    "pyspark>=4,<5": "preprocessing of raw logs with Spark",
    "matplotlib>=3.8": "curves.png after training",
    "optuna>=5": "dlrm tune",
    "scikit-learn>=1.6": "dlrm.Classifier, evaluate --recalibrate",
}
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class DoctorConfig:
    """The content of the report; field names are those of the flags."""

    env: bool = setting(False, "also print what torch.utils.collect_env finds, for a bug report")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", DoctorConfig)]), _run, __doc__, arguments, usage=2)


def _run(values: Values) -> int:
    logging.getLogger("dlrm.ops.library").setLevel(logging.ERROR)  # reported below
    states = set()
    for check in (packages, operators, room, training):
        try:
            for state, name, text in check():
                print(f"{state:<7} {name:<17} {text}")
                states.add(state)
        except Exception as error:  # any error is named, and the report continues
            state = BROKEN if check is training else ABSENT
            print(f"{state:<7} {check.__name__:<17} {type(error).__name__}: {error}")
            states.add(state)
    failed = 'Training does NOT work here: fix what is marked "broken" first.'
    print("", failed if BROKEN in states else "Training works here.", sep="\n")
    if values["env"]:
        from torch.utils.collect_env import get_pretty_env_info

        print(f"\n{get_pretty_env_info()}")
    return int(BROKEN in states)


def packages() -> Iterator[Finding]:
    """This package, Python, the packages that it needs or may use, and the Java of Spark."""
    yield OK, "dlrm", f"{__version__} in {_PACKAGE}"
    yield OK, "python", f"{sys.version.split()[0]}, {sys.executable}"
    for requirement, use in REQUIREMENTS.items():
        name, least, below, *_ = *re.split(">=|,<", requirement), "9999"
        try:
            version = importlib.metadata.version(name)
            fits = _numbers(least) <= _numbers(version) < _numbers(below)
            problem = None if fits else f"{version} is installed: no {use}"
        except importlib.metadata.PackageNotFoundError:
            version, problem = "", f"not installed: no {use}"
        state = BROKEN if use == "training" else ABSENT
        fix = f"{quote(sys.executable)} -m pip install {quote(requirement)}"
        yield _finding(name, version, problem, state, fix)
    java, problem = java_version()
    fix = "sudo apt-get install -y openjdk-17-jre-headless, or ENGINE=local for raw logs"
    yield _finding("java", f"{java}, for Spark", problem, ABSENT, fix)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _finding(name: str, value: str, problem: str | None, state: str, fix: str) -> Finding:
    if problem is None:
        return OK, name, value
    return state, name, f"{problem}\n{'':<25} fix: {fix}"


def operators() -> Iterator[Finding]:
    """The compiled operators, for the CPU and for GPUs."""
    import torch

    from dlrm import ops
    from dlrm.data.sources import native
    from dlrm.ops.library import why_not_cuda_kernels, why_not_native

    fix = f"make -C {quote(str(_PACKAGE.parent))} venv    # needs g++"
    kernels = f"{ops.instruction_set()} kernels"
    yield _finding("native operators", kernels, why_not_native(), SLOW, fix)
    why = None if native.host else f"logs, CSV and JSON lines: {native.why_no_host}"
    yield _finding("readers of text", "loaded", why, ABSENT, fix)
    with warnings.catch_warnings(record=True) as said:
        available = torch.cuda.is_available()
    if available:
        fix = f"DLRM_CUDA=1 {fix} and nvcc"
        yield _finding("CUDA operators", "loaded", why_not_cuda_kernels(), SLOW, fix)
    else:
        why = "".join(f"; {one.message}".partition("\n")[0] for one in said)
        yield ABSENT, "CUDA devices", f"torch {torch.__version__} finds none{why}"


def room() -> Iterator[Finding]:
    """Threads, and free memory and disk space."""
    import torch

    count, (cores, why), idle = torch.get_num_threads(), available_cores(), idle_cores()
    value = f"torch uses {count}; {cores:g} cores are available ({why})"
    value += "" if idle is None else f", {idle:.1f} of the machine's are idle"
    problem = value if count > max(cores, 1) else None
    yield _finding("threads", value, problem, SLOW, f"export OMP_NUM_THREADS={max(1, int(cores))}")
    disk = shutil.disk_usage(".")
    free = {"memory": host_memory(), "disk": (disk.free, disk.total)}
    for index in range(torch.cuda.device_count()):
        name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
        free[name] = torch.cuda.mem_get_info(index)
    for name, found in free.items():
        if found is not None:
            yield OK, name, f"{found[0] / 2**30:.1f} GiB free of {found[1] / 2**30:.1f}"


def training() -> Iterator[Finding]:
    """Trains a small model, and checks its loss."""
    import torch

    from dlrm.distributed import World
    from dlrm.model.config import DLRMConfig
    from dlrm.tasks.recommendation import Batch, Recommendation
    from dlrm.train.optim.base import set_learning_rate
    from dlrm.train.optim.config import OptimizerConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    ids = torch.randint(50, (256, 2), device=device)
    batch = Batch(torch.rand(256, 4, device=device), ids, (ids[:, 0] < 25).float())
    task = Recommendation(DLRMConfig((50, 60), 4, 8, (16, 8), (16, 1)), World(device=device))
    optimizers = task.optimizers(OptimizerConfig("adam", "adam"))
    set_learning_rate(optimizers, 0.01)
    losses, began = [], time.perf_counter()
    for _ in range(50):
        loss = task.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    ms = 20 * (time.perf_counter() - began)
    value = f"50 steps on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {ms:.2f} ms a step"
    yield OK if losses[-1] < 0.7 * losses[0] else BROKEN, "training", value  # or NaN


if __name__ == "__main__":
    sys.exit(main())
