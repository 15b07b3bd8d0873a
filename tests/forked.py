"""Runs processes as forks of one with torch imported: each starts in 0.1 s instead of 3.

A command runs as under `python -m module`, with its own arguments, environment, folder, standard
streams and exit code. Only settings that torch reads on import have no effect. What it draws
without a seed differs between two commands of a test, and is the same whenever that test runs.
"""

import atexit
import contextlib
import importlib
import io
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "dlrm.environment",  # first, as in the commands
        "torch._dynamo",  # torch's optimizers import it at their first step
        "dlrm.data.clicks.datasets",
        "dlrm.serving.predictor",
        "dlrm.tasks.recommendation",
        "dlrm.train.trainer",
    ]
)


def is_running(pid):
    """Returns whether a process has not ended, even if nobody waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(
    module, *arguments, stdout, stderr=None, stdin=os.devnull, cwd=None, env=None, curves=False
):
    """Starts a command that appends its output to files.

    Args:
        module: module name or path of a script that ends in .py.
        stderr: file; None means `stdout`.
        env: all its variables; None means this process's.
        curves: whether it may draw curves, which takes seconds.

    Returns:
        The `multiprocessing` process.
    """
    words = [str(module), *map(str, arguments)]
    streams = [os.fspath(path) for path in (stdin, stdout, stderr or stdout)]
    env = dict(os.environ if env is None else env)
    given = (words, streams, os.fspath(cwd or os.getcwd()), env, curves, random.getrandbits(32))
    for path in streams[1:]:  # readers need not wait for the files
        Path(path).touch()
    process = CONTEXT.Process(target=_run, args=given)
    process.start()
    return process


def run(module, *arguments, input="", timeout=300, **options):
    """Runs a command to its end and returns what `subprocess.run` would; options are `start`'s."""
    with tempfile.TemporaryDirectory() as folder:
        stdin, stdout, stderr = (Path(folder, name) for name in ("stdin", "stdout", "stderr"))
        stdin.write_text(input)
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        process = start(module, *arguments, **streams, **options)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired([module, *arguments], timeout)
        texts = stdout.read_text(), stderr.read_text()
        return subprocess.CompletedProcess([module, *arguments], process.exitcode, *texts)


def succeed(module, *arguments, **options):
    """Runs a command that must not fail; returns what `run` does."""
    done = run(module, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def call(module, *arguments, code=None):
    """Runs a command in this process; returns what `run` does.

    Args:
        code: the exit code that it must have.
    """
    found = importlib.import_module(module)
    found = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
    words, texts = [*map(str, arguments)], (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        ended = found.main(words)
    output, errors = (text.getvalue() for text in texts)
    assert code in (None, ended), errors
    return subprocess.CompletedProcess([module, *words], ended, output, errors)


def _run(words, streams, cwd, env, curves, seed):
    import seeding

    seeding.seed(seed)
    modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
    for target, path, mode in zip(range(3), streams, modes, strict=True):
        os.dup2(os.open(path, mode, 0o644), target)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in env:
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    if not curves:
        sys.modules["matplotlib"] = None
    module, sys.argv = words[0], words
    try:
        if module.endswith(".py"):
            sys.path.insert(0, os.path.dirname(module))
            runpy.run_path(module, run_name="__main__")
        else:
            sys.path.insert(0, cwd)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
