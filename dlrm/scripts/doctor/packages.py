"""Checks of installed versions: Python, the packages, and the Java that Spark runs on."""

import contextlib
import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dlrm
from dlrm.preproc.execution.java import java_version
from dlrm.scripts.doctor.checks import ABSENT, BROKEN, OK, Result, first_line

PACKAGE = Path(dlrm.__file__).resolve().parent


@dataclass(frozen=True)
class Package:
    """A Python package: the name to install, and its purpose.

    Attributes:
        module: name to import.
        requirement: name and version for pip and pyproject.toml.
        purpose: features that need it.
    """

    module: str
    requirement: str
    purpose: str


REQUIRED = (
    Package("torch", "torch>=2.11", "nothing works"),
    Package("numpy", "numpy>=1.26", "nothing works"),
    Package("absl", "absl-py>=2.0", "the commands do not start"),
    Package("yaml", "PyYAML>=6.0", "no dataset can be read"),
    Package("jinja2", "Jinja2>=3.1.2", "no report of a preparation and no page can be written"),
    Package("safetensors", "safetensors>=0.4.5", "no checkpoint can be written or read"),
    Package("tqdm", "tqdm>=4.65", "training does not start"),
)
OPTIONAL = (
    Package("pyspark", "pyspark>=4,<5", "preprocessing of raw logs with Spark"),
    Package("pyarrow", "pyarrow>=25", "preprocessing of tables and .zst files"),
    Package("matplotlib", "matplotlib>=3.8", "curves.png after training"),
    Package("optuna", "optuna>=5", "dlrm tune"),
    Package("sklearn", "scikit-learn>=1.4", "dlrm.Classifier, evaluate --recalibrate"),
    Package("fbgemm_gpu", "fbgemm-gpu-cpu==1.8.0", "peers of benchmarks/; needs torch 2.13"),
)


def versions() -> Iterator[Result]:
    """Reports this package, Python, and the packages that training needs."""
    yield Result("dlrm", OK, f"{dlrm.__version__} in {PACKAGE}")
    python = ".".join(map(str, sys.version_info[:3]))
    yield Result("python", OK, f"{python}, {sys.executable}")
    for package in REQUIRED:
        version, problem = _version(package)
        if problem is None:
            yield Result(package.module, OK, str(version))
        else:
            install = f"{pip_install()} {shlex.quote(package.requirement)}"
            yield Result(package.module, BROKEN, problem, package.purpose, install)


def preprocessing() -> Iterator[Result]:
    """Reports Java and the optional packages."""
    version, problem = java_version()
    if problem is None:
        yield Result("java", OK, f"{version}, for Spark")
    else:
        yield Result(
            "java",
            ABSENT,
            problem,
            "no Spark: raw logs are preprocessed with ENGINE=local, on this machine alone",
            "sudo apt-get install -y openjdk-17-jre-headless    # Debian, Ubuntu",
        )
    for package in OPTIONAL:
        version, problem = _version(package)
        if problem is None:
            yield Result(package.module, OK, str(version))
        else:
            install = f"{pip_install()} {shlex.quote(package.requirement)}"
            install += " --no-deps" if package.module == "fbgemm_gpu" else ""
            yield Result(package.module, ABSENT, problem, f"no {package.purpose}", install)


def _version(package: Package) -> tuple[str | None, str | None]:
    """Returns the version of a package that can be imported and is new enough, or the problem."""
    try:
        with contextlib.redirect_stderr(None):  # its own output on failure is not useful
            module = importlib.import_module(package.module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package.module
        return None, "not installed" if missing else f"cannot be loaded: {first_line(error)}"
    except OSError as error:
        return None, f"cannot be loaded: {first_line(error)}"
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
    """Returns (1, 26, 4) for 1.26.4+cpu."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()


def pip_install() -> str:
    """Returns the command, without the names of packages."""
    return f"{shlex.quote(sys.executable)} -m pip install"


def rebuild() -> str:
    """Returns the command that builds the native operators."""
    root = PACKAGE.parent
    source = f"-e {shlex.quote(str(root))}" if (root / "setup.py").exists() else "<repository>"
    tools = f"{pip_install()} setuptools wheel ninja"
    build = f"{tools} && {pip_install()} --no-build-isolation {source}"
    compilers = ("g++", "c++", "clang++", shlex.split(os.environ.get("CXX", "g++"))[0])
    if not any(map(shutil.which, compilers)):
        return f"sudo apt-get install -y g++ && {build}"
    return build
