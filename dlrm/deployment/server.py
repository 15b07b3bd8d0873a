"""Runs the Triton server of the pip package nvidia-pytriton, without docker.

    pip install --no-deps nvidia-pytriton
    dlrm serve --model-repository REPO

Other flags are passed to tritonserver unchanged. It has the python backend only, so it serves
models of `dlrm export --python` (the default).

This server is for trials and tests on one machine; triton/README.md describes its limits.
Functions that clients do not need are disabled: shared memory, loading and unloading of models, and
the settings of traces and logs. `--http-restricted-api` and `--grpc-restricted-protocol` replace
these restrictions.
"""

import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dlrm.command_line import fail
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.settings import REQUIRED, setting

NOT_FOR_CLIENTS = "shared-memory,model-repository,trace,logging"  # tritonserver's names


@dataclass(frozen=True)
class ServerConfig:
    """The models, and the addresses; field names are those of the flags."""

    model_repository: Path = setting(REQUIRED, "directory that export.py wrote", uri="read")
    address: str = setting("127.0.0.1", "address to listen on")
    http_port: int = setting(8000, "port of HTTP")
    grpc_port: int = setting(8001, "port of gRPC")
    metrics_port: int = setting(8002, "port of the metrics")
    others: tuple[str, ...] = setting((), "further flags of tritonserver", positional=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", ServerConfig)], pass_on=True)
    errors = (ValueError, OSError, ModuleNotFoundError)
    return run_command(line, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> int:
    options = values.config(ServerConfig)
    others = [*options.others]
    if not options.model_repository.is_dir():
        fail(f"{options.model_repository}: no such directory (--model-repository)")
    if problem := unserved(options.model_repository):
        fail(problem)
    explicit = "explicit" in others or "--model-control-mode=explicit" in others
    if explicit and restrictions(others) and not any("--load-model" in flag for flag in others):
        fail(
            "--model-control-mode=explicit: expected --load-model=NAME too, as clients may not "
            "load models; --model-control-mode=poll takes new versions by itself"
        )
    package = find_package()
    with tempfile.TemporaryDirectory(prefix="dlrm-triton-") as backends:
        link_python_backend(package, Path(backends))
        command = [
            package / "tritonserver" / "bin" / "tritonserver",
            f"--model-repository={options.model_repository}",
            f"--backend-directory={backends}",
            *(f"--{kind}-address={options.address}" for kind in ("http", "grpc", "metrics")),
            f"--http-port={options.http_port}",
            f"--grpc-port={options.grpc_port}",
            f"--metrics-port={options.metrics_port}",
            *restrictions(others),
            *others,
        ]
        return run(command, environment(package))


def unserved(repository: Path) -> str | None:
    """Returns a message on a model whose backend this server lacks, with a remedy; else None."""
    for path in sorted(repository.glob("*/config.pbtxt")):
        text = path.read_text(encoding="utf-8")
        named = re.search(r'^ *(?:backend|platform) *: *"([^"]*)"', text, re.MULTILINE)
        if named and named[1] not in ("python", "ensemble"):
            return (
                f"{path.parent}: needs Triton's {named[1]}, and this server has the python backend "
                "only: export.py --python writes a model for it; other servers serve this one"
            )
    return None


def find_package() -> Path:
    """Returns the directory of pytriton without importing it, as its dependencies may be missing.

    Raises:
        ModuleNotFoundError: it is not installed, or not for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "nvidia-pytriton is not installed; pip install --no-deps nvidia-pytriton"
        )
    package = Path(spec.origin).parent
    stub = _stub(package)
    if not stub.is_file():
        raise ModuleNotFoundError(f"nvidia-pytriton has no backend for this Python: {stub}")
    return package


def restrictions(flags: list[str]) -> list[str]:
    """Returns flags that disable what clients do not need, unless `flags` restrict access.

    A header with the key would still allow it; the key is random and never shown.
    """
    rule = f"{NOT_FOR_CLIENTS}:dlrm-admin={secrets.token_hex()}"
    names = ("--http-restricted-api", "--grpc-restricted-protocol")
    return [f"{name}={rule}" for name in names if not any(flag.startswith(name) for flag in flags)]


def link_python_backend(package: Path, directory: Path) -> None:
    """Assembles the python backend: the common files, and the stub of this Python."""
    target = directory / "python"
    target.mkdir()
    common = package / "tritonserver" / "backends" / "python"
    for source in [*(path for path in common.iterdir() if path.is_file()), _stub(package)]:
        (target / source.name).symlink_to(source)


def environment(package: Path) -> dict[str, str]:
    """Returns the server's environment: this interpreter, its libraries, and the server's."""
    libraries = [sysconfig.get_config_var("LIBDIR"), package.parent / "nvidia_pytriton.libs"]
    paths = {
        "LD_LIBRARY_PATH": libraries,
        "PATH": [Path(sys.executable).parent],
    }
    joined = {
        name: os.pathsep.join([*map(str, new), *filter(None, [os.environ.get(name)])])
        for name, new in paths.items()
    }
    return {**os.environ, **joined}


def run(command: list[object], env: dict[str, str]) -> int:
    """Runs a command until it ends, and forwards to it the signals that end this process."""
    process = subprocess.Popen([str(word) for word in command], env=env)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [
        signal.signal(number, lambda received, _: process.send_signal(received))
        for number in numbers
    ]
    try:
        return process.wait()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stub(package: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = package / "tritonserver" / "python_backend_stubs"
    return stubs / version / "triton_python_backend_stub"


if __name__ == "__main__":
    sys.exit(main())
