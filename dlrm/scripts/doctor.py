"""Reports the working and missing parts of this installation, their cost and their fixes.

    dlrm doctor         one page
    dlrm doctor --env   the same, and what torch.utils.collect_env finds, for a bug report

The exit code is 0 if training a small model works, and 1 otherwise.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import importlib
import importlib.metadata
import logging
import platform
import re
import shlex
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import dlrm
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.host_cores import available_cores, idle_cores
from dlrm.host_memory import host_memory
from dlrm.scripts.common.java import java_version
from dlrm.settings import setting

OK, ABSENT, SLOW, BROKEN = "ok", "absent", "slow", "broken"
MEANINGS = {OK: "as it should be", ABSENT: "only the parts that it names need it"}
MEANINGS |= {SLOW: "works, but costs time", BROKEN: "training cannot run"}
REQUIRED = (
    *("torch>=2.11", "numpy>=1.26", "absl-py>=2.0", "PyYAML>=6.0", "Jinja2>=3.1.2"),
    *("safetensors>=0.4.5", "tqdm>=4.65"),
)
OPTIONAL = {  # and what lacks without it
    "pyspark>=4,<5": "no preprocessing of raw logs with Spark",
    "pyarrow>=25": "no preprocessing of tables and .zst files",
    "matplotlib>=3.8": "no curves.png after training",
    "optuna>=5": "no dlrm tune",
    "scikit-learn>=1.4": "no dlrm.Classifier, no evaluate --recalibrate",
}
_MODULES = {"absl-py": "absl", "PyYAML": "yaml", "Jinja2": "jinja2", "scikit-learn": "sklearn"}
_PACKAGE, _GIB = Path(dlrm.__file__).resolve().parent, 2**30


@dataclass(frozen=True)
class DoctorConfig:
    """The content of the report; field names are those of the flags."""

    env: bool = setting(False, "also print what torch.utils.collect_env finds, for a bug report")


class Result(NamedTuple):
    """Finding about one part: its name, a state of `MEANINGS`, its value, cost and fix."""

    name: str
    state: str
    value: str
    cost: str = ""
    fix: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", DoctorConfig)]), _run, __doc__, arguments, usage=2)


def _run(values: Values) -> int:
    logging.getLogger("dlrm.ops.library").setLevel(logging.ERROR)  # reported below
    results: list[Result] = []
    for check in (packages, operators, room, training):
        try:
            results += check()
        except Exception as error:  # any error is named, and the report continues
            state = BROKEN if check is training else ABSENT
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            results.append(Result(check.__name__, state, text))
    print(_page(results))
    if values["env"]:
        from torch.utils.collect_env import get_pretty_env_info

        print(f"\n{get_pretty_env_info()}")
    return int(any(result.state == BROKEN for result in results))


def _page(results: list[Result]) -> str:
    width, lines = max(min(shutil.get_terminal_size((100, 24)).columns, 120), 60), []
    for one in results:
        starts = f"{one.state:<7} {one.name:<17} ", f"{'':<25} costs: "
        for start, text in zip(starts, (one.value, one.cost), strict=True):
            rest = " " * len(start)
            lines += textwrap.wrap(
                text, width, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False
            )
        lines += [f"{'':<25} fix:   {one.fix}"] * bool(one.fix)  # not wrapped, for copying
    used = [state for state in MEANINGS if any(one.state == state for one in results)]
    lines += ["", *(f"{state:<7} {MEANINGS[state]}" for state in used), ""]
    broken = 'Training does NOT work here: fix what is marked "broken" first.'
    return "\n".join([*lines, broken if BROKEN in used else "Training works here."])


def packages() -> Iterator[Result]:
    """This package, Python, the packages that it needs or may use, and the Java of Spark."""
    yield Result("dlrm", OK, f"{dlrm.__version__} in {_PACKAGE}")
    yield Result("python", OK, f"{platform.python_version()}, {sys.executable}")
    for requirement in (*REQUIRED, *OPTIONAL):
        name, version, problem = _version(requirement)
        if problem is None:
            yield Result(name, OK, version)
            continue
        state = BROKEN if requirement in REQUIRED else ABSENT
        fix = f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(requirement)}"
        yield Result(name, state, problem, OPTIONAL.get(requirement, ""), fix)
    java, problem = java_version()
    if problem is None:
        yield Result("java", OK, f"{java}, for Spark")
    else:
        fix = "sudo apt-get install -y openjdk-17-jre-headless    # Debian, Ubuntu"
        yield Result("java", ABSENT, problem, "no Spark; ENGINE=local preprocesses raw logs", fix)


def _version(requirement: str) -> tuple[str, str, str | None]:
    """Returns a package's name and version, and what keeps it from being used."""
    name, _ = re.split("(?=[<>])", requirement, maxsplit=1)
    module = _MODULES.get(name, name)
    try:
        importlib.import_module(module)
        version = importlib.metadata.version(name)
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        return name, "", "not installed" if missing else f"cannot be loaded: {error}"
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    for relation, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        if (numbers >= [int(part) for part in bound.split(".")]) != (relation == ">="):
            return name, version, f"{version} is installed, {requirement} is needed"
    return name, version, None


def operators() -> Iterator[Result]:
    """The compiled operators, and the GPUs."""
    import torch

    from dlrm import ops
    from dlrm.ops.library import why_not_cuda_kernels, why_not_native

    slower = "plain torch computes the same, several times more slowly"
    fix = f"make -C {shlex.quote(str(_PACKAGE.parent))} venv    # needs g++"
    if problem := why_not_native():
        yield Result("native operators", SLOW, f"not loaded: {problem}", slower, fix)
    else:
        yield Result("native operators", OK, f"{ops.instruction_set()} kernels")
    with warnings.catch_warnings(record=True) as said:
        if not torch.cuda.is_available():
            why = "; ".join(str(one.message).partition("\n")[0] for one in said)
            value = f"torch {torch.__version__} finds none" + (f": {why}" if why else "")
            yield Result("CUDA devices", ABSENT, value, "training runs on the CPU")
            return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        value = f"{torch.cuda.get_device_name(index)}, {free / _GIB:.1f} GiB free of"
        yield Result(f"cuda:{index}", OK, f"{value} {total / _GIB:.1f}")
    if problem := why_not_cuda_kernels():
        fix = f"DLRM_CUDA=1 {fix} and nvcc"
        yield Result("CUDA operators", SLOW, f"not loaded: {problem}", slower, fix)
    else:
        yield Result("CUDA operators", OK, "loaded")


def room() -> Iterator[Result]:
    """Threads, free memory and disk space."""
    import torch

    count, (cores, why), idle = torch.get_num_threads(), available_cores(), idle_cores()
    value = f"torch uses {count}; {cores:g} cores are available ({why})"
    value += "" if idle is None else f", {idle:.1f} of the machine's are idle"
    cost, fix = "threads wait for a core: steps can take many times as long", "OMP_NUM_THREADS="
    if count > max(cores, 1):
        yield Result("threads", SLOW, value, cost, f"export {fix}{max(1, int(cores))}")
    else:
        yield Result("threads", OK, value)
    memory, disk = host_memory(), shutil.disk_usage(".")
    for name, found in (("memory", memory), ("disk", (disk.free, disk.total))):
        if found is not None:
            yield Result(name, OK, f"{found[0] / _GIB:.1f} GiB free of {found[1] / _GIB:.1f}")


def training() -> Iterator[Result]:
    """Trains a small model, and checks its loss."""
    import torch

    from dlrm.distributed import World
    from dlrm.model.config import DLRMConfig
    from dlrm.tasks.recommendation import Batch, Recommendation
    from dlrm.train.optim.base import set_learning_rate
    from dlrm.train.optim.config import OptimizerConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (256, 2), generator=random)
    batch = Batch(torch.rand(256, 4, generator=random), ids, (ids[:, 0] < 25).float())
    batch = batch.map(lambda tensor: tensor.to(device))
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
    value = f"50 steps of a small model on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    state = OK if losses[-1] < 0.7 * losses[0] else BROKEN  # a loss that is NaN, too
    yield Result("training", state, f"{value}, {ms:.2f} ms a step")


if __name__ == "__main__":
    sys.exit(main())
