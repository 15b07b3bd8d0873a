"""Says what of this installation is live, what is absent, what that costs and how to mend it.

    python -m dlrm.scripts.doctor          a report to read
    python -m dlrm.scripts.doctor --json   the same for programs

The exit code is 0 if training works, which is tried on a small model, and 1 if it does not.
"""

import dlrm.scripts.environment as environment  # first: torch reads it when it is loaded

# isort: split
import argparse
import contextlib
import importlib
import importlib.metadata
import json
import logging
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import dlrm

OK, NOTE, ABSENT, SLOW, BROKEN = "ok", "note", "absent", "slow", "broken"
MEANINGS = {
    OK: "as it should be",
    NOTE: "worth knowing",
    ABSENT: "not here; only what is named needs it",
    SLOW: "works, but costs time",
    BROKEN: "training cannot run",
}
GIB = 2**30
PACKAGE = Path(dlrm.__file__).resolve().parent


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing.

    Attributes:
        name: the thing.
        state: a key of `MEANINGS`.
        value: what it is here.
        cost: what is lost by it, if anything.
        mend: the command that changes that, if there is one.
    """

    name: str
    state: str
    value: str
    cost: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Package:
    """A Python package: what to install, and what it is for.

    Attributes:
        module: what is imported.
        requirement: as pip and pyproject.toml name it.
        purpose: what does not work without it.
    """

    module: str
    requirement: str
    purpose: str


REQUIRED = (
    Package("torch", "torch>=2.11", "nothing works"),
    Package("numpy", "numpy>=1.26", "nothing works"),
    Package("absl", "absl-py>=2.0", "the commands do not start"),
    Package("yaml", "PyYAML>=6.0", "no dataset can be read"),
    Package("safetensors", "safetensors>=0.4.5", "no checkpoint can be written or read"),
    Package("tqdm", "tqdm>=4.65", "training does not start"),
)
OPTIONAL = (
    Package("pyspark", "pyspark>=4,<5", "preprocessing of raw logs with Spark"),
    Package("pyarrow", "pyarrow>=16", "preprocessing of .zst files and Parquet"),
    Package("matplotlib", "matplotlib>=3.8", "curves.png after training"),
    Package("fbgemm_gpu", "fbgemm-gpu-cpu==1.8.0", "peers of benchmarks/; needs torch 2.13"),
)


def main() -> int:
    """Prints the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrm.scripts.doctor", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    options = parser.parse_args()
    findings = examine()
    works = all(finding.state != BROKEN for finding in findings)
    if options.json:
        print(json.dumps({"works": works, "findings": [asdict(found) for found in findings]}))
    else:
        print(report(findings, works))
    return 0 if works else 1


def examine() -> list[Finding]:
    """Everything there is to say. What goes wrong in an examination is a finding too."""
    logging.getLogger("dlrm.ops.library").setLevel(logging.ERROR)  # it is said below
    warnings.simplefilter("ignore")
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # whatever it is, the report goes on and names it
            state = BROKEN if check is training else NOTE
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, state, f"{type(error).__name__}: {_first_line(error)}"))
    return findings


def report(findings: list[Finding], works: bool) -> str:
    """The findings as text."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120), 60)
    lines = []
    for found in findings:
        lines += _wrapped(f"{found.state:<7} {found.name:<17} ", found.value, width)
        if found.cost:
            lines += _wrapped(f"{'':<25} costs: ", found.cost, width)
        if found.mend:
            lines.append(f"{'':<25} mend:  {found.mend}")  # unbroken, to be copied
    used = [state for state in MEANINGS if any(found.state == state for found in findings)]
    lines += ["", *(f"{state:<7} {MEANINGS[state]}" for state in used), ""]
    if works:
        lines.append("Training works here.")
    else:
        lines.append('Training does NOT work here: mend what is marked "broken" first.')
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]


def versions() -> Iterator[Finding]:
    """This package, Python, and the packages that training needs."""
    yield Finding("dlrm", OK, f"{dlrm.__version__} in {PACKAGE}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", OK, f"{python}, {sys.executable}")
    for package in REQUIRED:
        version, problem = _version(package)
        if problem is None:
            yield Finding(package.module, OK, str(version))
        else:
            install = f"{_pip()} {shlex.quote(package.requirement)}"
            yield Finding(package.module, BROKEN, problem, package.purpose, install)


def native_operators() -> Iterator[Finding]:
    """The compiled CPU operators and their instruction set."""
    from dlrm import ops
    from dlrm.ops.library import why_not_native

    offered = _offered_instructions()
    processor = f"; the processor offers {', '.join(offered) or 'none of AVX2 and AVX-512'}"
    if ops.native_available():
        yield Finding("native operators", OK, f"{ops.instruction_set()} kernels{processor}")
        return
    yield Finding(
        "native operators",
        SLOW,
        f"not loaded: {why_not_native()}{processor}",
        "plain-torch operators run instead: the same results, interaction and row update 3 to 7 "
        "times slower",
        _rebuild(),
    )


def linear_layers() -> Iterator[Finding]:
    """Which linear layers the MLPs run on a CPU."""
    import torch

    from dlrm import ops

    fused = ops.fused_linear_dtypes()
    lacking = [name for name in ("float32", "bfloat16") if getattr(torch, name) not in fused]
    value = "oneDNN's, with the bias in the product"
    if not lacking:
        yield Finding("linear layers", OK, value)
        return
    value = f"torch's own in {' and '.join(lacking)}" + ("; oneDNN's in float32" if fused else "")
    cost = "MLPs in float32 take about a ninth longer"
    if fused:
        cost = "--amp gains little: oneDNN has no bfloat16 products for this processor"
    yield Finding("linear layers", NOTE if fused else SLOW, value, cost)


def cuda() -> Iterator[Finding]:
    """GPUs, and the CUDA operators."""
    import torch

    available = torch.cuda.is_available()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    if available:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("CUDA devices", OK, f"{', '.join(names)}; torch is {built}")
    elif Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        yield Finding(
            "CUDA devices",
            ABSENT,
            f"there is an NVIDIA driver, but torch, {built}, finds no device",
            "training runs on the CPU",
            "" if torch.version.cuda else f"{_pip()} --force-reinstall torch",
        )
    else:
        value = f"no NVIDIA GPU or driver; torch is {built}"
        yield Finding("CUDA devices", ABSENT, value, "training runs on the CPU")
    from dlrm.ops.library import why_not_cuda_kernels

    reason = why_not_cuda_kernels()
    if reason is None:
        yield Finding("CUDA operators", OK, "loaded" if available else "loaded; there is no GPU")
    else:
        yield Finding(
            "CUDA operators",
            SLOW if available else ABSENT,
            f"not loaded: {reason}",
            "on a GPU plain-torch operators run: the same results, without the fused kernels"
            + ("" if available else "; here, without a GPU, nothing"),
            f"DLRM_CUDA=1 {_rebuild()}    # needs nvcc" if available else "",
        )


def threads() -> Iterator[Finding]:
    """The cores that this process may use, and the threads that torch takes."""
    import torch

    cores, why = available_cores()
    count = torch.get_num_threads()
    chosen = os.environ.get("OMP_NUM_THREADS")
    value = f"torch uses {count}; {cores:g} cores are available ({why}); OMP_NUM_THREADS "
    value += f"is {chosen}" if chosen else "is not set"
    whole = max(1, int(cores))
    mend = f"export OMP_NUM_THREADS={whole}"
    if count > max(cores, 1):
        cost = "threads wait for each other's turn on a core: steps can take many times as long"
        yield Finding("threads", SLOW, value, cost, mend)
    elif count < whole:
        yield Finding("threads", SLOW, value, f"{whole - count} cores stay idle", mend)
    else:
        yield Finding("threads", OK, value)
    spins = os.environ.get("GOMP_SPINCOUNT")
    if spins:
        yield Finding("waiting threads", OK, f"spin {spins} times, then sleep (GOMP_SPINCOUNT)")
    else:
        yield Finding(
            "waiting threads",
            NOTE,
            "spin as OpenMP's default says: the commands' own setting is off (DLRM_TUNE=0)",
            "much time where other programs want the cores",
            "unset DLRM_TUNE",
        )
    load = os.getloadavg()[0]
    if load > cores:
        yield Finding(
            "load",
            NOTE,
            f"{load:.1f} threads of this machine want to run on {os.cpu_count()} cores",
            "training gets a part of the cores only; figures of benchmarks mean little",
        )


def available_cores() -> tuple[float, str]:
    """The cores that this process may use, and what sets the limit."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores, why = float(allowed), "all" if allowed == total else f"affinity, of {total}"
    quota = _cgroup_cpus()
    if quota is not None and quota < cores:
        cores, why = quota, f"control group's limit, of {total}"
    return cores, why


def memory_set_up() -> Iterator[Finding]:
    """Huge pages, and whether freed memory is kept."""
    import torch

    kernel = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", kernel)
    mode = chosen.group(1) if chosen else "unknown"
    setting = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
    megabytes = 64
    first = _faults_of_touching(torch, megabytes << 20)
    # A small block may have taken the head of the freed one, so one try does not tell.
    again = min(_faults_of_touching(torch, megabytes << 20) for _ in range(5))
    value = (
        f"kernel: {mode}; THP_MEM_ALLOC_ENABLE {setting}; touching {megabytes} MB takes {first} "
        f"page faults (about {megabytes << 20 >> 21} with huge pages, "
        f"{(megabytes << 20) // resource.getpagesize()} without)"
    )
    cost = "up to a fifth of the time of a training step, where fresh memory is touched"
    if first <= (megabytes << 20) // resource.getpagesize() // 8:
        yield Finding("huge pages", OK, value)
    elif mode == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", SLOW, value, cost, f"echo madvise | sudo tee {path}")
    elif setting != "1":
        yield Finding(
            "huge pages", SLOW, value, cost, "unset DLRM_TUNE; export THP_MEM_ALLOC_ENABLE=1"
        )
    else:
        yield Finding("huge pages", SLOW, value, cost)
    value = f"touching {megabytes} MB that were just freed takes {again} page faults"
    if again < 100:
        yield Finding("freed memory", OK, f"is kept for the next step: {value}")
    else:
        mend = "" if environment.tuned() else "unset DLRM_TUNE"
        yield Finding("freed memory", SLOW, f"goes back to the kernel: {value}", cost, mend)


def preprocessing() -> Iterator[Finding]:
    """Java, and the optional packages."""
    version, problem = java_version()
    if problem is None:
        yield Finding("java", OK, f"{version}, for Spark")
    else:
        yield Finding(
            "java",
            ABSENT,
            problem,
            "no Spark: raw logs are preprocessed with ENGINE=local, on this machine alone",
            "sudo apt-get install -y openjdk-17-jre-headless    # Debian, Ubuntu",
        )
    for package in OPTIONAL:
        version, problem = _version(package)
        if problem is None:
            yield Finding(package.module, OK, str(version))
        else:
            install = f"{_pip()} {shlex.quote(package.requirement)}"
            install += " --no-deps" if package.module == "fbgemm_gpu" else ""
            yield Finding(package.module, ABSENT, problem, f"no {package.purpose}", install)


def java_version() -> tuple[str | None, str | None]:
    """The version of the Java that Spark would run on, or what is wrong with it."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    if shutil.which(java) is None:
        return None, f"there is no {java}" + (" (JAVA_HOME)" if home else "")
    done = subprocess.run(
        [java, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', done.stderr + done.stdout)
    if found is None:
        return None, f"{java} does not say its version"
    if int(found.group(2)) < 17:
        return None, f"{java} is Java {found.group(1)}; Spark needs 17 or newer"
    return found.group(1), None


def room() -> Iterator[Finding]:
    """Memory and disk."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    if fields:
        total, free = (int(fields[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
        value = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
        limit = _cgroup_memory()
        if limit is not None and limit < total:
            value += f"; the control group allows {limit / GIB:.1f}"
            free = min(free, limit)
        cost = "models above that do not fit: 26 tables of 100,000 rows of 128 floats take 1.3 GiB"
        low = free < 4 * GIB
        yield Finding("memory", NOTE if low else OK, value, cost if low else "")
    usage = shutil.disk_usage(Path.cwd())
    low = usage.free < 10 * GIB
    yield Finding(
        "disk",
        NOTE if low else OK,
        f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} in {Path.cwd()}",
        "preprocessing and checkpoints need room: 1.3 GiB for the tables above" if low else "",
    )


def training() -> Iterator[Finding]:
    """Trains a small model and looks at its loss."""
    import torch

    from dlrm.distributed import World
    from dlrm.model.dlrm import DLRMConfig
    from dlrm.tasks.recommendation import Batch, Recommendation
    from dlrm.train.optim import OptimizerConfig, set_learning_rate

    config = DLRMConfig((50, 60), 4, 8, (16, 8), (16, 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (256, 2), generator=random)
    numerical = torch.rand(256, 4, generator=random)
    batch = Batch(numerical, ids, (ids[:, 0] < 25).float()).map(lambda t: t.to(device))
    task = Recommendation(config, World(device=device))
    optimizers = task.optimizers(OptimizerConfig("adam", "adam"))
    set_learning_rate(optimizers, 0.01)
    losses = []
    for _ in range(50):
        loss = task.loss(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    value = f"50 steps of a small model on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    learnt = math.isfinite(losses[-1]) and losses[-1] < 0.7 * losses[0]
    if learnt:
        yield Finding("training", OK, value)
    else:
        yield Finding("training", BROKEN, f"{value}: it does not learn", "", _rebuild())


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(
        versions,
        native_operators,
        linear_layers,
        cuda,
        threads,
        memory_set_up,
        preprocessing,
        room,
        training,
    ),
)


def _version(package: Package) -> tuple[str | None, str | None]:
    """The version of a package that can be imported and is new enough, or what is wrong."""
    try:
        with contextlib.redirect_stderr(None):  # what it prints when it fails is not for readers
            module = importlib.import_module(package.module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package.module
        return None, "not installed" if missing else f"cannot be loaded: {_first_line(error)}"
    except OSError as error:
        return None, f"cannot be loaded: {_first_line(error)}"
    distribution = re.match(r"[\w-]+", package.requirement)
    assert distribution is not None
    try:
        version = importlib.metadata.version(distribution.group())
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    for relation, bound in re.findall(r"(>=|<|==)([\d.]+)", package.requirement):
        have, want = _numbers(version), _numbers(bound)
        if have and not {">=": have >= want, "<": have < want, "==": have == want}[relation]:
            return None, f"{version} is installed, {package.requirement} is needed"
    return version, None


def _numbers(version: str) -> tuple[int, ...]:
    """1.26.4+cpu -> (1, 26, 4)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install"


def _rebuild() -> str:
    """The command that builds the native operators."""
    root = PACKAGE.parent
    source = f"-e {shlex.quote(str(root))}" if (root / "setup.py").exists() else "<repository>"
    build = f"{_pip()} setuptools wheel && {_pip()} --no-build-isolation {source}"
    compilers = ("g++", "c++", "clang++", shlex.split(os.environ.get("CXX", "g++"))[0])
    if not any(map(shutil.which, compilers)):
        return f"sudo apt-get install -y g++ && {build}"
    return build


def _offered_instructions() -> list[str]:
    """Those of the processor's instruction sets that matter here."""
    flags = set(_read("/proc/cpuinfo").partition("flags")[2].partition("\n")[0].split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
    return [name for name in wanted if name in flags]


def _faults_of_touching(torch, size: int) -> int:
    """Page faults of this process while a tensor is allocated and written, and freed after."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor = torch.empty(size, dtype=torch.uint8)
    tensor.zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _cgroup_cpus() -> float | None:
    """Cores that the control group allows, version 2 or 1; None where it sets no limit."""
    for path in _cgroup_files("cpu.max"):
        quota, _, period = _read(path).partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            return int(quota) / int(period)
    quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if quota.isdecimal() and period.isdecimal():
        return int(quota) / int(period)
    return None


def _cgroup_memory() -> int | None:
    """Bytes that the control group allows; None where it sets no limit."""
    v1 = "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    for path in (*_cgroup_files("memory.max"), v1):
        if (limit := _read(path).strip()).isdecimal():
            return int(limit)
    return None


def _cgroup_files(name: str) -> Iterator[str]:
    """A file of this process's control group (version 2) and of those above it."""
    own = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    directory = Path("/sys/fs/cgroup", own.group(1) if own else "")
    for candidate in (directory, *directory.parents):
        if candidate.is_relative_to("/sys/fs/cgroup"):
            yield str(candidate / name)


def _read(path: str) -> str:
    """A file of the kernel's, or nothing where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


if __name__ == "__main__":
    sys.exit(main())
