"""Runs the Triton server of the pip package nvidia-pytriton, without docker.

    pip install --no-deps nvidia-pytriton
    dlrm serve --model-repository REPO

Other flags, such as --http-port (8000), --grpc-port (8001) and --metrics-port (8002), are passed to
tritonserver unchanged. It has the python backend only, so it serves models of `dlrm export
--python` (the default).

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
from collections.abc import Sequence
from pathlib import Path

from dlrm.deployment.config import ServerConfig
from dlrm.flags import ConfigFlags, Values, run_command

NOT_FOR_CLIENTS = "shared-memory,model-repository,trace,logging"  # tritonserver's names


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", ServerConfig)], pass_on=True)
    errors = (ValueError, OSError, ModuleNotFoundError)
    return run_command(line, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> int:
    options = values.config(ServerConfig)
    _check(options)
    package, stub = _package()
    with tempfile.TemporaryDirectory(prefix="dlrm-triton-") as backends:
        backend = Path(backends, "python")  # common files, and the stub of this Python
        backend.mkdir()
        for source in (*(package / "tritonserver/backends/python").glob("*.*"), stub):
            (backend / source.name).symlink_to(source)
        command = [
            os.fspath(package / "tritonserver" / "bin" / "tritonserver"),
            f"--model-repository={options.model_repository}",
            f"--backend-directory={backends}",
            *(f"--{kind}-address={options.address}" for kind in ("http", "grpc", "metrics")),
            *restrictions(options.others),
            *options.others,
        ]
        process = subprocess.Popen(command, env=_environment(package))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: process.send_signal(received))
        return process.wait()


def _check(options: ServerConfig) -> None:
    """Raises ValueError or OSError for what this server cannot serve, with a remedy."""
    repository, others = options.model_repository, options.others
    if not repository.is_dir():
        raise NotADirectoryError(f"{repository}: no such directory (--model-repository)")
    for path in sorted(repository.glob("*/config.pbtxt")):
        text = path.read_text(encoding="utf-8")
        named = re.search(r'^ *(?:backend|platform) *: *"([^"]*)"', text, re.MULTILINE)
        if named and named[1] not in ("python", "ensemble"):
            raise ValueError(
                f"{path.parent}: needs Triton's {named[1]}, and this server has the python backend "
                "only: export.py --python writes a model for it; other servers serve this one"
            )
    explicit = "explicit" in others or "--model-control-mode=explicit" in others
    if explicit and restrictions(others) and not any("--load-model" in flag for flag in others):
        raise ValueError(
            "--model-control-mode=explicit: expected --load-model=NAME too, as clients may not "
            "load models; --model-control-mode=poll takes new versions by itself"
        )


def _package() -> tuple[Path, Path]:
    """Returns the directory of pytriton and its python backend's stub for this Python.

    It is not imported, as its dependencies may be missing.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "nvidia-pytriton is not installed; pip install --no-deps nvidia-pytriton"
        )
    package, (major, minor, *_) = Path(spec.origin).parent, sys.version_info
    stubs = package / "tritonserver" / "python_backend_stubs"
    stub = stubs / f"{major}.{minor}" / "triton_python_backend_stub"
    if not stub.is_file():
        raise ModuleNotFoundError(f"nvidia-pytriton has no backend for this Python: {stub}")
    return package, stub


def restrictions(flags: Sequence[str]) -> list[str]:
    """Returns flags that disable what clients do not need, unless `flags` restrict access.

    A header with the key would still allow it; the key is random and never shown.
    """
    rule = f"{NOT_FOR_CLIENTS}:dlrm-admin={secrets.token_hex()}"
    names = ("--http-restricted-api", "--grpc-restricted-protocol")
    return [f"{name}={rule}" for name in names if not any(flag.startswith(name) for flag in flags)]


def _environment(package: Path) -> dict[str, str]:
    """Returns the server's environment: this interpreter, its libraries, and the server's."""
    libraries = sysconfig.get_config_var("LIBDIR"), f"{package}/../nvidia_pytriton.libs"
    first = {"LD_LIBRARY_PATH": libraries, "PATH": (os.path.dirname(sys.executable),)}
    paths = {name: [*new, *filter(None, [os.environ.get(name)])] for name, new in first.items()}
    return {**os.environ, **{name: os.pathsep.join(parts) for name, parts in paths.items()}}


if __name__ == "__main__":
    sys.exit(main())
