"""The first-hour GPU script records each step's outcome and resumes where it stopped."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import forked
import pytest
import torch

pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_first.py"
spec = importlib.util.spec_from_file_location("gpu_first", SCRIPT)
gpu_first = importlib.util.module_from_spec(spec)
sys.modules["gpu_first"] = gpu_first
spec.loader.exec_module(gpu_first)
Step = gpu_first.Step


def options(folder, **changes):
    usual = {"output": folder, "minutes": None, "only": None, "retry": False}
    of_steps = {"patience": 1, "device": "cuda", "tiny": False, "architecture": "90"}
    return Namespace(**{**usual, **of_steps, **changes})


def python(code):
    return ["-c", code]


def states(folder):
    return {name: step["state"] for name, step in gpu_first.read(folder).items()}


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_failure_is_kept_before_the_next_step_begins(tmp_path):
    look = f"import json; print(json.load(open({str(tmp_path / 'steps.json')!r}))['bad']['state'])"
    todo = [
        Step("bad", 60, [python("print('| 1 |'); raise SystemExit('no such kernel')")]),
        Step("next", 60, [python(look), python("print('| figure |')")]),
        Step("without", 60, [python("")], needs=("no-such-program",)),
    ]
    assert gpu_first.run(todo, options(tmp_path)) == 1
    assert states(tmp_path) == {"bad": "failed", "next": "done", "without": "absent"}
    outcomes = gpu_first.read(tmp_path)
    assert outcomes["bad"]["output"] == "| 1 |\nno such kernel"
    assert outcomes["next"]["output"] == "failed\n| figure |"
    assert outcomes["without"]["output"] == "there is no no-such-program"
    report = (tmp_path / "results.md").read_text()
    assert re.search(r"^\| bad \| failed \| \d+ \|$", report, re.M)
    assert "### Bad\n\n```\n| 1 |\nno such kernel\n```" in report
    assert report.endswith("### Without\n\n```\nthere is no no-such-program\n```\n")
    assert "### Next\n\n| figure |\n" in report


def test_a_step_beyond_its_limit_ends_with_all_its_processes(tmp_path):
    child = f"import os, signal; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
    child += "signal.pause()"
    waiting = "import subprocess, sys; print('begun', flush=True); "
    waiting += f"subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    todo = [
        Step("long", 5, [["-S", *python(waiting)], python("print('never')")]),
        Step("next", 60, [python("")]),
    ]
    assert gpu_first.run(todo, options(tmp_path)) == 1
    assert states(tmp_path) == {"long": "timed out", "next": "done"}
    assert gpu_first.read(tmp_path)["long"]["output"] == "begun"
    assert gone(int((tmp_path / "pid").read_text()))


def test_commands_of_a_step_may_run_together(tmp_path):
    """Each command waits for a file that another one creates."""
    places = [tmp_path / name for name in "abc"]

    def waiting(own, other):
        code = f"from pathlib import Path; import time; Path({str(own)!r}).touch()\n"
        code += f"while not Path({str(other)!r}).exists(): time.sleep(0.01)\n"
        return python(f"{code}print({own.name!r})")

    commands = [waiting(place, places[i - 1]) for i, place in enumerate(places)]
    todo = [
        Step("met", 60, commands, together=True),
        Step("one", 60, [python("print(1)"), python("exit('2')")], together=True),
        Step("long", 2, [python(""), python("import signal; signal.pause()")], together=True),
    ]
    assert gpu_first.run(todo, options(tmp_path / "output")) == 1
    assert states(tmp_path / "output") == {"met": "done", "one": "failed", "long": "timed out"}
    outcomes = gpu_first.read(tmp_path / "output")
    assert outcomes["met"]["output"] == "a\nb\nc"
    assert outcomes["one"]["output"] == "1\n2"


def gone(pid):
    """Returns True if a process ends or becomes a zombie within a minute."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_later_call_runs_what_is_not_recorded(tmp_path):
    trace, made = tmp_path / "trace", tmp_path / "made"

    def noted(name, rest=""):
        return python(f"open({str(trace)!r}, 'a').write({name!r}); {rest}")

    making = f"open({str(made)!r}, 'w')"
    todo = [
        Step("a", 60, [noted("a", making)], makes=made),
        Step("b", 60, [noted("b", "raise SystemExit(1)")]),
        Step("c", 400, [noted("c")]),
    ]

    def call(**changes):
        code = gpu_first.run(todo, options(tmp_path, **changes))
        written = trace.read_text() if trace.exists() else ""
        trace.unlink(missing_ok=True)
        return code, written

    assert call(minutes=2) == (1, "ab")  # c's limit exceeds the time left
    assert call() == (1, "c")
    assert call() == (1, "")
    made.unlink()
    assert call() == (1, "a")
    assert call(retry=True) == (1, "b")
    assert call(only=["c"]) == (0, "c")
    (tmp_path / "steps.json").unlink()
    assert gpu_first.run(todo[::2], options(tmp_path, minutes=2)) == 3


def test_a_call_that_is_cut_leaves_no_process_and_its_step_is_run_again(tmp_path):
    pid = tmp_path / "pid"
    waiting = f"import os, signal; open({str(pid)!r}, 'w').write(str(os.getpid())); signal.pause()"
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
from argparse import Namespace; from pathlib import Path; from gpu_first import Step, run
todo = [Step("a", 60, [["-c", ""]]), Step("b", 200, [["-c", {waiting!r}]])]
run(todo, Namespace(output=Path({str(tmp_path)!r}), minutes=None, only=None, retry=False))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(120) != 0
    process.stderr.close()
    assert gone(int(pid.read_text()))
    assert states(tmp_path) == {"a": "done"}
    todo = [Step("a", 60, [python("raise SystemExit(1)")]), Step("b", 60, [python("")])]
    assert gpu_first.run(todo, options(tmp_path)) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_why(tmp_path):
    done = forked.run(SCRIPT, f"--output={tmp_path / 'none'}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    start = "gpu_first.py: torch finds no GPU here ("
    assert line.startswith(start)
    assert re.match(r"AssertionError: Torch not|RuntimeError: .*NVIDIA", line[len(start) :])
    assert line.endswith("); --device cpu --tiny tries the steps")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("home", [None, "cuda"])
def test_without_nvcc_one_line_says_so_before_the_hour_begins(home, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_first, "LIBRARY", tmp_path / "_ops_cuda.so")
    words = ["gpu_first.py", f"--output={tmp_path / 'none'}", "--architecture=90"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if home:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    where = f"in CUDA_HOME, {tmp_path / home}," if home else "on the path"
    assert gpu_first.main() == (
        f"gpu_first.py: there is no nvcc {where} to build dlrm/_ops_cuda.so; "
        "install NVIDIA's CUDA toolkit, or set CUDA_HOME to its folder"
    )
    assert not (tmp_path / "none").exists()
    (tmp_path / "_ops_cuda.so").touch()
    assert gpu_first.why_not_built() is None


def test_what_records_a_graph_runs_where_freed_memory_is_kept(tmp_path, root):
    todo = {step.name: step.commands for step in gpu_first.steps(options(tmp_path))}
    kept, *unkept = todo["memcheck"]
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" not in kept
    for command in unkept:
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in command
        assert "not captures" in command[-1]
    assert all("--report-api-errors no" in " ".join(command) for command in todo["memcheck"])
    words = {word for commands in todo.values() for command in commands for word in command}
    found = [word.partition("::") for word in words if word.startswith("tests/")]
    assert all(name in (root / path).read_text() for path, _, name in found if name)
    assert all((root / path).exists() for path, *_ in found)
    functions = (root / "tests/ops/test_cuda.py").read_text().split("\n\n\n")
    recording = [function for function in functions if "torch.cuda.graph(" in function]
    assert len(recording) >= 2
    assert all("@pytest.mark.captures" in function for function in recording)
    usual, failing = todo["graphs"]  # a recording that fails has a process of its own
    assert usual[usual.index("--deselect") + 1] in failing


@pytest.mark.parametrize(
    ("words", "python"),
    [
        (["NO_INSTALL=1", "PYTHON=python3.12"], "python3.12"),
        (["NO_INSTALL=1", "VENV=/opt/env"], "/opt/env/bin/python"),
    ],
)
@pytest.mark.parametrize("target", ["gpu-first", "gpu-test", "gpu-sanitize", "gpu-bench"])
def test_make_installs_nothing_where_it_is_told_so(target, words, python, root, tmp_path):
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text())  # no .git, no .venv
    of_make = ("VENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # the tests' own make
    variables = {name: value for name, value in os.environ.items() if name not in of_make}
    done = subprocess.run(
        ["make", "-n", target, *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.split()[:2] == [python, "benchmarks/gpu_first.py"]
    if "--only" in line:
        names = {step.name for step in gpu_first.steps(options(tmp_path))}
        assert set(line.partition("--only")[2].split()) <= names


@pytest.mark.slow
def test_all_steps_run_on_a_cpu(root, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device=cpu", "--tiny", f"--output={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()
    found = states(tmp_path)
    assert found.pop("sass") in ("absent", "done")  # needs cuobjdump
    assert set(found.values()) == {"done"}
    sizes = json.loads((tmp_path / "gather.json").read_text())["sizes"]
    assert [size["gigabytes"] for size in sizes] == [0.001, 0.01]
    assert len(list(tmp_path.iterdir())) <= 8
