"""Runs the first hour on a GPU: build, tests, checks and figures, and keeps each step's outcome.

    make gpu-first PYTHON=python3.12 NO_INSTALL=1            all steps, 25 minutes at most
    python benchmarks/gpu_first.py --output gpu --minutes 9.5      as much as fits; call it again
    python benchmarks/gpu_first.py --output try --device cpu --tiny    tries the steps; no figures

The steps and their limits are in `steps`. Each is a few commands in processes of their own. A step
that fails or exceeds its limit is recorded, and the next one begins. A later call with the same
folder skips recorded steps and repeats an interrupted one. The folder then has:

    steps.json     the outcome of each step, its seconds and the end of its output
    log.txt        all output
    results.md     the outcomes and the tables, for benchmarks/RESULTS.md
    gather.json    gather by the size of the tables
    timeline.json.gz    a trace of training steps, for a browser's trace viewer

The exit code is 0 if every step ran and none failed, 1 if one failed, 3 if some did not fit into
--minutes. The script itself needs the standard library only.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "dlrm" / "_ops_cuda.so"
DONE, FAILED, TIMED_OUT, ABSENT = "done", "failed", "timed out", "absent"
KEPT_LINES = 80
GRACE = 10  # seconds from the request to end a process to its end by force
LIVE = """
from dlrm.ops import library
problem = library.why_not_native() or (library.why_not_cuda_kernels() if {cuda} else None)
raise SystemExit(problem and f"no kernels: {{problem}}")
"""


@dataclass(frozen=True)
class Step:
    """A few commands that are run one after the other, or all together.

    Attributes:
        limit: seconds that all of them may take.
        commands: words of each, without the interpreter where the first is an option or a script.
        environment: variables of all of them, beside ours.
        needs: programs and files without which the step is left out, as "absent".
        makes: a file without which the step counts as not run.
    """

    name: str
    limit: float
    commands: list[list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    makes: Path | None = None
    together: bool = False


def main() -> int | str:
    args = arguments()
    if args.device == "cuda":
        if problem := find_architecture(args):
            return f"gpu_first.py: {problem}; --device cpu --tiny tries the steps"
        if problem := why_not_built():
            return f"gpu_first.py: {problem}"
    return run(steps(args), args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", help="the folder")
    parser.add_argument("--minutes", type=float, help="begin no step whose limit exceeds them")
    parser.add_argument("--only", nargs="+", help="run these steps, also if they are recorded")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument("--patience", type=float, default=1, help="multiplies the limits")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="a few tests and sizes for a try")
    parser.add_argument("--architecture", help="such as 90; default: that of the first GPU")
    args = parser.parse_args()
    args.output = args.output.resolve()
    known = steps(args)
    if unknown := set(args.only or ()) - {step.name for step in known}:
        parser.error(f"--only: expected {', '.join(s.name for s in known)}, got {unknown.pop()}")
    longest = max(step.limit for step in known) / 60
    if args.minutes is not None and args.minutes < longest:
        parser.error(f"--minutes: expected at least {longest:g}, the longest step, got too few")
    return args


def find_architecture(args: argparse.Namespace) -> str | None:
    """Sets the architecture of torch's first GPU; returns why there is none."""
    if args.architecture:
        return None
    code = "import torch; print('%d%d' % torch.cuda.get_device_capability())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    args.architecture = said.stdout.strip()
    if args.architecture:
        return None
    reason = [line for line in said.stderr.splitlines() if line and not line.startswith(" ")][-1:]
    return f"torch finds no GPU here ({''.join(reason)})"


def why_not_built() -> str | None:
    """Returns why there are no kernels and can be none; None where there are or can be."""
    home = os.environ.get("CUDA_HOME")
    if LIBRARY.exists() or shutil.which(str(Path(home, "bin", "nvcc")) if home else "nvcc"):
        return None
    return (
        f"there is no nvcc {f'in CUDA_HOME, {home},' if home else 'on the path'} to build "
        "dlrm/_ops_cuda.so; install NVIDIA's CUDA toolkit, or set CUDA_HOME to its folder"
    )


def steps(args: argparse.Namespace) -> list[Step]:
    """All steps in their order; the limits add up to 25 minutes, with --patience 1."""
    cuda = args.device == "cuda"
    device = [f"--device={args.device}"]
    workload = ["--workload=terabyte"] if not args.tiny else ["--workload=kaggle"]
    training = [*device, *workload, "--dtype=fp16" if cuda else "--dtype=fp32"]
    training += ["--batch=65536"] if not args.tiny else ["--batch=64"]
    few, tiny = (["--steps=4"], ["--tiny"]) if args.tiny else (["--steps=20"], [])
    op_sizes = ["--batch=64", "--rows=50", "--steps=1"] if args.tiny else ["--batch=65536"]
    built = {"DLRM_CUDA": "1" if cuda else "0", "DLRM_CUDA_ARCHS": args.architecture or ""}
    found = [
        Step(
            "build",
            100,
            [["setup.py", "-q", "build_ext", "--inplace"]],
            built,
            makes=LIBRARY if cuda else LIBRARY.with_name("_ops_cpu.so"),
        ),
        Step("kernels", 60, [["-m", "dlrm.scripts.doctor"], ["-c", LIVE.format(cuda=cuda)]]),
        *tests(args),
        Step(
            "sass",
            30,
            [["benchmarks/cuda_resources.py", "--access", "--archs", args.architecture or "90"]],
            needs=("cuobjdump", str(LIBRARY)),
        ),
        Step("figures", 150, [["benchmarks/gpu.py", *device, *tiny]]),
        Step("peers", 60, [["benchmarks/train.py", *training, "--rounds=3", *few]]),
        Step("operators", 60, [["benchmarks/ops.py", *device, *op_sizes]]),
        Step(
            "gather",
            30,
            [["benchmarks/gpu_gather.py", *device, *tiny, f"--json={args.output}/gather.json"]],
        ),
        Step(
            "timeline",
            60,
            [
                ["benchmarks/breakdown.py", *training, *few]
                + [f"--trace={args.output}/timeline.json.gz"]
            ],
        ),
    ]
    return [Step(**{**vars(step), "limit": step.limit * args.patience}) for step in found]


def tests(args: argparse.Namespace) -> list[Step]:
    """Tests, and the kernels' under compute-sanitizer; on a CPU a few, without it.

    memcheck sees the ends of single tensors where torch keeps no freed memory; a graph needs it
    kept. Errors that tests provoke on purpose are those of the runtime's calls, and not reported.
    A failed recording may leave its process unable to record: that test has one of its own. The
    sanitizers make a test take about ten times as long, so their parts run together.
    """
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
    graphs = "tests/train/test_cuda_graph.py"
    fails = f"{graphs}::test_recording_what_waits_for_the_device_fails"
    if args.device == "cpu":
        test = "test_atomic_additions_reach_each_sector_once"
        sector = [*pytest, f"tests/ops/test_cuda.py::{test}"]
        return [
            Step("ops", 100, [[*pytest, "tests/ops/test_library.py"]]),
            Step("graphs", 60, [[*pytest, fails]]),
            Step("rest", 180, [[*pytest, "tests/model/test_embedding.py"]]),
            Step("memcheck", 300, [sector], together=True),
            Step("racecheck", 300, [sector], together=True),
        ]
    usual, capturing = "gpu and not captures and not slow", ["-m", "gpu and captures"]
    recorded = [graphs, "tests/ops", *capturing, "--deselect", fails]
    ours = [[*place, "-m", f"{usual} and not unwatched{half}"] for *place, half in WATCHED]
    rest = ["tests", "--ignore=tests/ops", f"--ignore={graphs}", "-m", "gpu and not slow"]
    memcheck = [*SANITIZER, "memcheck", "--report-api-errors", "no", sys.executable, *pytest]
    racecheck = [*SANITIZER, "racecheck", sys.executable, *pytest]
    keep_none = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    checked = [[*memcheck, *recorded], *([*keep_none, *memcheck, *part] for part in ours)]
    tool = ("compute-sanitizer",)
    return [
        Step("ops", 100, [[*pytest, "tests/ops", "-m", usual]]),
        Step("graphs", 60, [[*pytest, *recorded], [*pytest, fails, *capturing]]),
        Step("rest", 180, [[*pytest, *rest]]),
        Step("memcheck", 300, checked, needs=tool, together=True),
        Step("racecheck", 300, [[*racecheck, *part] for part in ours], needs=tool, together=True),
    ]


WATCHED = [  # files, and which of their tests
    ("tests/ops/test_cuda.py", " and first_half"),
    ("tests/ops/test_cuda.py", " and not first_half"),
    ("tests/ops/test_row_update.py", " and first_half"),
    ("tests/ops/test_row_update.py", " and not first_half"),
    (
        "tests/ops/test_dot_interaction.py",
        "tests/ops/test_joint_embedding.py",
        "",
    ),
]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--tool"]


def run(todo: list[Step], args: argparse.Namespace) -> int:
    """Runs the chosen steps in order, and returns the exit code."""
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_first.py: ended from outside"))
    outcomes = read(args.output)
    begun, left = time.monotonic(), []
    for step in todo:
        if not wanted(step, outcomes.get(step.name), args):
            continue
        spent = time.monotonic() - begun
        if args.minutes is not None and spent + step.limit > 60 * args.minutes:
            left.append(step.name)
            continue
        print(f"== {step.name} (up to {step.limit:.0f} s) ==", flush=True)
        outcomes[step.name] = outcome = perform(step, args.output / "log.txt")
        print(f"== {step.name}: {outcome['state']}, {outcome['seconds']:.1f} s ==", flush=True)
        write(args.output, outcomes, todo)
    asked = [step.name for step in todo if not args.only or step.name in args.only]
    states = [outcomes[name]["state"] for name in asked if name in outcomes]
    print(f"{args.output}/results.md; left for the next call: {', '.join(left) or 'nothing'}")
    if any(state in (FAILED, TIMED_OUT) for state in states):
        return 1
    return 3 if left else 0


def wanted(step: Step, outcome: dict | None, args: argparse.Namespace) -> bool:
    """Returns True for a step that is to run in this call."""
    if args.only:
        return step.name in args.only
    if outcome is None or (step.makes is not None and not step.makes.exists()):
        return True
    return args.retry and outcome["state"] != DONE


def perform(step: Step, log: Path) -> dict:
    """Runs a step's commands; returns its outcome. All output goes to the log as it comes."""
    for need in step.needs:
        if shutil.which(need) is None and not Path(need).is_file():
            return {"state": ABSENT, "seconds": 0.0, "output": f"there is no {need}"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **step.environment}
    begun, state = time.monotonic(), DONE
    with log.open("a+", encoding="utf-8", errors="replace") as stream:
        stream.write(f"\n== {step.name} ==\n")
        stream.flush()
        start = stream.tell()
        for commands in [step.commands] if step.together else [[one] for one in step.commands]:
            left = step.limit - (time.monotonic() - begun)
            codes = execute(commands, environment, stream, left)
            if None in codes:
                state = TIMED_OUT
                break
            if any(codes):
                state = FAILED
        stream.seek(start)
        output = stream.read()
    seconds = time.monotonic() - begun
    return {"state": state, "seconds": round(seconds, 1), "output": shortened(output)}


def execute(commands: list[list[str]], environment: dict, stream, limit: float) -> list[int | None]:
    """Runs commands at once; returns their exit codes, None where the limit was exceeded.

    Their outputs follow each other in the stream, and no process of theirs remains.
    """
    until, running = time.monotonic() + limit, []
    with contextlib.ExitStack() as files:
        more = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands[1:]]
        try:
            for words, output in zip(commands, [stream, *more], strict=True):
                running.append(start(words, environment, output))
            return [wait(process, until - time.monotonic()) for process in running]
        finally:
            for process in filter(None, running):
                end(process)
            for output in more:
                output.seek(0)
                stream.write(output.read())


def start(words: list[str], environment: dict, stream) -> subprocess.Popen | None:
    """Starts a command in a session of its own; None where that fails, and the stream says why."""
    script = words[0].startswith("-") or words[0].endswith(".py")
    try:
        return subprocess.Popen(
            [sys.executable, *words] if script else words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        stream.write(f"{words[0]}: {error}\n")
        return None


def wait(process: subprocess.Popen | None, limit: float) -> int | None:
    try:
        return 127 if process is None else process.wait(max(limit, 0))
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen) -> None:
    """Ends a process and those that it has started."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:  # no process of the group is left
            return
        except subprocess.TimeoutExpired:
            continue


def shortened(output: str) -> str:
    """The tables of an output, and its last lines."""
    lines = [line.rstrip() for line in output.splitlines()]
    first = max(len(lines) - KEPT_LINES, 0)
    return "\n".join(line for i, line in enumerate(lines) if i >= first or line.startswith("|"))


def read(folder: Path) -> dict[str, dict]:
    """The outcomes that earlier calls have left, by name of the step."""
    path = folder / "steps.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(folder: Path, outcomes: dict[str, dict], todo: list[Step]) -> None:
    replace(folder / "steps.json", json.dumps(outcomes, indent=1))
    replace(folder / "results.md", report(outcomes, todo))


def replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def report(outcomes: dict[str, dict], todo: list[Step]) -> str:
    """The outcomes as Markdown: a table of the steps, then each one's tables or last lines."""
    names = [step.name for step in todo if step.name in outcomes]
    lines = ["## First run on a GPU", "", "| step | outcome | seconds |", "|---|---|---|"]
    for name in names:
        lines.append(f"| {name} | {outcomes[name]['state']} | {outcomes[name]['seconds']:.0f} |")
    for name in names:
        output = outcomes[name]["output"].splitlines()
        found = tables(output)
        shown = found if found and outcomes[name]["state"] == DONE else ["```", *output, "```"]
        lines += ["", f"### {name[0].upper()}{name[1:]}", "", *shown]
    return "\n".join(lines) + "\n"


def tables(output: list[str]) -> list[str]:
    """The lines of an output that are rows of tables, with an empty line between two tables."""
    rows = [line for line in output if line.startswith("|")]
    found: list[str] = []
    for i, line in enumerate(rows):
        if i and "".join(rows[i + 1 : i + 2]).startswith("|---"):
            found.append("")
        found.append(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
