"""The catalog's command: list, show, run, compare and tabulate."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from dlrm.published import results, tables
from dlrm.published.command import main
from dlrm.published.jobs import RunOptions, plan_jobs
from dlrm.published.rows import BenchmarkRow, catalog

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]
CATALOG = catalog()
TRAINING = "gaudi/rn50/eager-fp32-b128"
MEDIUM = "gaudi/dlrm-medium"
ONE, EIGHT = "dlperf/rn50/fp32-b128/1n1d", "dlperf/rn50/fp32-b128/1n8d"
FAST = (  # one a family; other tests run ResNet-50 and DLRM
    "ipu/effb0/infer-generated-x4/b1",
    *("dlperf/bert-base/fp32-b32/2n16d", "ipu/bert-3layer/squad-infer-128/mb4"),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def records(path="systems.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_list_names_each_row_once(capsys):
    sizes = Counter(row.source for row in CATALOG.values())
    assert sizes == {"000": 35, "001": 61, "002": 36, "003": 57, "004": 23}
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(CATALOG)
    assert lines[-1] == f"{len(CATALOG)} rows"
    assert main(["list", "--source=003", "--model=efficientnet_b0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 + 1
    assert all(line.startswith("ipu/effb0/infer-") for line in lines[:-1])


SHOWN = {
    "dlperf/rn50/fp32-b128/4n32d": (
        'quotation "ResNet50-V1.5 Training Performance images/sec, FP32, bsz=128"',
        "published OneFlow 11711.2 images/sec, TensorFlow 1.x 9496.91 images/sec, PaddlePaddle ",
        "command torchrun --nnodes 4 --nproc_per_node 8 -m dlrm.scripts.cnn --recipe=dlperf ",
        "--mode=benchmark_training --model=resnet50 --noamp --batch_size=128 --dataset=DIR ",
    ),
    "ipu/effb0/infer-generated-x4/b1": (
        'quotation "Change the --batch-size argument to be one of 1, 8, 16, 32"',
        "printed poprun --num-replicas 4 --ipus-per-replica 1 --num-instances 4 --numa-aware 1 ",
        "command torchrun --nproc_per_node 4 -m dlrm.scripts.cnn --recipe=graphcore ",
        " --mode=benchmark_inference --data=generated --repeat=10 ",
        " --io=uint8 ",
    ),
    "gaudi/rn50/eager-fp32-b128": ("command dlrm cnn --mode=train --model=resnet50 ",),
}


def test_show_has_the_command_and_what_was_published(capsys):
    for name, parts in SHOWN.items():
        assert main(["show", name]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert [part for part in parts if part not in words] == []
    assert {main(["show", name]) for name in CATALOG} == {0}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["show", "gaudi/rn50/graph-bf16-b265"], "gaudi/rn50/graph-bf16-b256"),
        (["run", "dlperf/rn50/fp32-b128/4n32d"], "--emulate"),
        (["run", TRAINING, "--grid=1n999d"], "999 devices"),
        (["run", TRAINING, "--grid=3"], "--grid 3"),
        (["run", TRAINING, "--dataset=nowhere"], "--dataset nowhere: there is no such directory"),
        (["run", "nvidia/dlrm-small/seed-8/amp"], "on criteo, frequency limit 15: pass --dataset"),
        (["run", "ipu/rn50/infer-synthetic/b1", "--dataset=."], "makes its own data"),
        (["run", "nothing/*"], "nothing/*: no such row"),
        (["run", TRAINING, "--", "--no_such_flag=1"], "no_such_flag"),
        (["table", "005"], "expected a document of 000"),
        (["run", TRAINING, "--results=/dev/null/results"], "/dev/null/results: cannot be written"),
        (["run", TRAINING, "--threads=99999"], "--threads 99999"),
        (["run", TRAINING, "--", "--help"], "--help: see dlrm cnn --help"),
        (["run", TRAINING, "--", "--log_path=x"], "--keep DIR"),
        (["run", "ipu/cnn/validate-checkpoints", "--smoke"], "--restore_path="),
        (["run", "nvidia/dlrm-small/quick-start/test-1gpu", "--dataset=."], "load_checkpoint_path"),
        (["run", "gaudi/dlrm-medium/trend", "--smoke", "--grid=1n1d,1n2d"], "expected one place"),
        (["run", MEDIUM + "/eager-fp32", "--", "--no_such_flag=1"], "no_such_flag"),
        (["list", "--", "--smoke"], "only `run` takes flags"),
        (["list", "--model=vgg"], "--model vgg: expected one of"),
        (["list", "--source=005"], "--source 005: expected one of 000"),
        (["run", MEDIUM + "/eager-fp32", "--pipeline"], "eager-fp32 is not divided into parts"),
        (["run", "ipu/rn50/train-m2000", "--pipeline", "--grid=1n999d"], "of 4 processes each on"),
    ],
)
def test_mistakes_are_named(arguments, error, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert error in message
    assert not Path("systems.jsonl").exists() or not Path("systems.jsonl").read_text()


def test_every_row_has_a_plan_of_small_batches_on_the_cpu():
    for row in (row for row in CATALOG.values() if row.measure == "run"):
        mode = row.given["mode"]
        trained = ("--restore_path=run",) if mode == "validate" else ()
        (job,) = plan_jobs(row, RunOptions(smoke=True, emulate=True, threads=1, flags=trained))
        given = dict(flag.partition("=")[::2] for flag in job.setting["arguments"])
        assert given["--base_device"] == "cpu"
        assert given.get("--execution") != "graph"  # a compilation takes a minute
        assert "inference" in mode or trained or given["--max_steps"] == "2"
        assert trained or job.setting["batch_per_device"] <= (32 if "main" in row.command else 2)
        assert int(given.get("--gradient_accumulation_steps", 1)) <= 2
        assert int(given.get("--replicas", 1)) <= max(2, row.processes)


def smoke(row: str, *more: str) -> int:
    return main(["run", row, "--smoke", "--emulate", "--threads=1", *more])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, row in CATALOG.items()
        if row.measure == "run" and "--mode=validate" not in row.flags
    ],
)
def test_a_row_runs_at_reduced_size(row: BenchmarkRow, capsys):
    assert smoke(row.id) == 0
    (record,) = records()
    assert record["exit_code"] == 0
    assert record["values"][0] > 0
    assert record["emulated"] == (row.processes > (os.cpu_count() or 1))
    assert record["threads"] == 1
    assert all(math.isfinite(loss) for loss in record["losses"])
    assert record["losses"] or "/train" not in row.id
    assert all(record[name] for name in ("torch", "processor", "started"))
    out = capsys.readouterr().out
    assert "a smoke run at reduced sizes: nothing to compare" in out
    assert " times it" not in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ipu/rn50/train-m2000", "ipu/bert-base/pretrain-128-pod16"])
def test_four_parts_run_as_a_pipeline(name):
    assert smoke(name, "--pipeline") == 0
    (record,) = records()
    assert record["pipeline"] == 4
    assert record["losses"]


@pytest.mark.slow
def test_checkpoints_of_a_training_are_validated(tmp_path):
    assert smoke("ipu/rn50/train-m2000/full", "--keep=kept") == 0
    (run,) = Path("kept").glob("ipu/rn50/train-m2000/full/1n1d/run-*")
    assert (
        smoke("ipu/cnn/validate-checkpoints", "--", f"--restore_path={run.absolute()}/checkpoints")
        == 0
    )
    assert records()[-1]["unit"] == "best_top1, %"


def test_a_failing_command_is_quoted(capsys):
    assert smoke(TRAINING, "--", "--load_checkpoint_path=/nowhere") == 1
    (record,) = records()
    assert "/nowhere" in record["error"]
    assert record["exit_code"] == 1
    assert "/nowhere" in capsys.readouterr().out


PYTHON = """#!{python} -SE
import json, os, sys
with open({folder!r} + "/started", "a") as file:
    print(*sys.argv, os.environ["OMP_NUM_THREADS"], file=file)
said = json.load(open({folder!r} + "/said.json"))
found = [run for word, run in said.items() if word in sys.argv][0]
entries = [("PARAMETER", {{"batch_size": found.get("batch_size", "8"), "seed": 1}})]
entries += [([step], data) for step, data in enumerate(found["steps"], 1)]
entries += [([], found["summary"])] if "summary" in found else []
with open(sys.argv[-1].partition("=")[2], "w") as log:
    for step, data in entries:
        log.write("DLLL " + json.dumps({{"type": "LOG", "step": step, "data": data}}) + "\\n")
if found.get("dies"):
    os.kill(os.getpid(), 9)
sys.exit(found.get("error"))
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Replaces Python by a program that logs what the test says, by a word of the command."""
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable, folder=str(tmp_path)))
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return lambda by_word: (tmp_path / "said.json").write_text(json.dumps(by_word))


def losses(*values, **summary):
    return {"steps": [{"loss": value, "step_time": 0.5} for value in values], "summary": summary}


def rate(value):
    return losses(average_train_throughput=value)


def test_each_seed_counts_in_its_precision(said, capsys):
    numbers = {f"--seed={seed}": seed / 100 for seed in range(8, 24)}
    said({name: losses(auc=value) for name, value in numbers.items()})
    assert main(["run", "nvidia/dlrm-small/seeds", "--dataset=."]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ": run 1/1: " not in line]
    deviation = f"standard deviation {statistics.stdev(numbers.values()):.6f}"
    of_all = f"16 seeds: mean 0.155000, smallest 0.080000, largest 0.230000, {deviation}"
    of_all += f" ({tables.where(records()[0])})"
    assert lines[:2] == [f"{name} precision auc, {of_all}" for name in ("Mixed", "Single")]
    assert lines[2].startswith("published: Mixed precision 0.803614 AUC, Single precision 0.80362")
    assert [record["values"][0] for record in records()] == [*numbers.values()] * 2
    ran = [f"seed-{seed}/{kind}" for kind in ("amp", "fp32") for seed in range(8, 24)]
    assert [record["row"] for record in records()] == [f"nvidia/dlrm-small/{name}" for name in ran]


@pytest.mark.parametrize(
    ("row", "run", "error"),
    [
        ("nvidia/dlrm-small/seed-8/amp", losses(1.0), "the run tested nothing, so it has no metr"),
        ("ipu/rn50/train-m2000", {"steps": []}, "log.json has no summary"),
        (TRAINING, losses(1.0), "no throughput: it ended within --benchmark_warmup_steps"),
        ("ipu/rn50/train-m2000", rate(9.0), "the run logged 0 steps, of which the first 1 do not"),
    ],
)
def test_a_log_without_figures_is_no_result(row, run, error, said):
    said({"-m": run})
    assert main(["run", row, "--dataset=.", "--threads=1"]) == 1
    (record,) = records()
    assert record["exit_code"] == 1
    assert record["error"].startswith("no figures: ")
    assert error in record["error"]


TWOS = [2.0] * 10


@pytest.mark.parametrize(
    ("amp", "code", "verdict"),
    [
        ([*TWOS, 2.0, *TWOS], 0, "eager-fp32 match: largest gap 0.00e+00"),
        ([*TWOS, 3.0, *TWOS], 1, "eager-fp32 do not match: largest gap 5.00e-02"),
        ([2.08, *TWOS, *TWOS], 0, "eager-fp32 match: largest gap 2.62e-02"),  # 4 steps later
        ([*TWOS, *TWOS], 2, "expected as many losses as the reference has, 21, got 20"),
        ([*TWOS, math.nan, *TWOS], 2, "expected finite losses, got NaN"),
    ],
)
def test_losses_of_two_rows_decide_a_trend(amp, code, verdict, said, capsys):
    by_flag = {"--amp": amp, "--noamp": [*TWOS, 2.0, *TWOS]}
    said({flag: losses(*own, average_train_throughput=9.0) for flag, own in by_flag.items()})
    for _ in range(2):
        assert main(["run", f"{MEDIUM}/trend", "--smoke", "--threads=1"]) == code
    captured = capsys.readouterr()
    assert verdict in captured.out + captured.err
    assert code == 2 or f"bound 0.03 ({records()[0]['processor']}, 1 thread)" in captured.out
    assert len(records()) == 2  # nothing is run again


def test_a_failed_run_ends_a_comparison(said, capsys):
    said({"-m": {"steps": [], "error": "error: no room"}})
    assert main(["run", f"{MEDIUM}/trend", "--smoke"]) == 1
    assert "no room; the same command runs what is missing" in capsys.readouterr().err


def test_a_run_that_dies_is_kept_and_only_what_is_missing_is_run_again(said, capsys):
    for runs, code in ((rate(8.0) | {"dies": True}, 1), (rate(9.0), 0), (rate(7.0), 0)):
        said({"-m": runs})
        assert smoke(TRAINING, f"--repeats={2 - code}") == code
    captured = capsys.readouterr()
    assert "run 1/1 failed with exit code -9" in captured.out
    assert "1 run failed" in captured.err
    assert "2 of 2 runs are done" in captured.out
    assert "measured   9 images/s, mean of 2 runs" in captured.out
    assert [record["exit_code"] for record in records()] == [-9, 0, 0]


SERIES = [1024, 32768, 65536]  # of 16384 samples a step


@pytest.mark.parametrize(
    ("arguments", "devices", "values"),
    [
        (["ipu/rn50/train-m2000", "--keep=kept"], 1, SERIES),
        (["ipu/rn50/train-m2000", "--pipeline"], 4, SERIES),
        (["ipu/bert-base/pretrain-128-pod16", "--pipeline", "--grid=1n1d"], 4, SERIES),
        (["gaudi/rn50/top1-from-epoch80", "--dataset=."], 1, [75.0]),
        (["dlperf/bert-base/fp32-b32/1n1d", "--repeats=1"], 1, [3.5]),
    ],
)
def test_each_rule_takes_its_values_from_the_log(arguments, devices, values, said, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    summary = {"average_train_throughput": 3.5, "best_top1": 0.75}
    steps = [{"step_time": seconds} for seconds in (16.0, 0.5, 0.25)]
    said({"-m": {"steps": steps, "summary": summary}})
    assert main(["run", *arguments]) == 0
    (record,) = records()
    assert (record["values"], record["processes"]) == (values, devices)
    assert record["step_time"] == {"p50": 0.5, "p90": 16.0, "p99": 16.0}
    launched = f"-m torch.distributed.run --standalone --nproc_per_node {devices} -m dlrm.scripts"
    (started,) = Path("started").read_text().splitlines()
    assert (launched in started) == (devices > 1)
    assert started.endswith(f" {4 // devices}")  # threads
    kept = [*Path().glob("kept/ipu/rn50/train-m2000/1n1d/run-1-*/log.json")]
    assert len(kept) == ("--keep=kept" in arguments)


def test_a_scaling_has_the_published_efficiency_beside_it(said, capsys, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    said({"torch.distributed.run": rate(70.0), "-m": rate(10.0)})
    assert main(["run", "gaudi/scale8/rn50-graph-bf16-b256"]) == 0
    out = capsys.readouterr().out
    assert "  published  679 images/sec" in out
    assert "; ours is 0.0147 times it\n" in out
    assert "  speed-up   7.00, efficiency 87.5%\n" in out
    assert out.endswith("published: scaling efficiency 88.5 % (8 Gaudis (one HLS))\n")


def test_a_run_on_gpus_is_planned_for_them_and_names_them(said, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said({"-m": rate(10.0) | {"batch_size": "48"}})
    assert main(["run", ONE, "--grid=1n4d"]) == 2
    assert "4 devices on 1 machine(s), and this one has 3 (GPUs)" in capsys.readouterr().err
    assert main(["run", ONE, "--grid=1n3d", "--repeats=1"]) == 0
    assert "hardware: 3 x Some GPU, not" in capsys.readouterr().out
    assert main(["run", "dlperf/bert-base/fp32-bmax/1n1d", "--repeats=1"]) == 0
    on_cpu = ("--repeats=1", "--", "--base_device=cpu")
    assert main(["run", ONE, "--grid=1n3d", *on_cpu]) == 2
    assert "and this one has 2 (CPU cores)" in capsys.readouterr().err
    assert main(["run", ONE, *on_cpu]) == 0
    one, two, three = records()
    assert one["gpu"] == one["processor"] == "Some GPU"
    assert (two["batch_per_device"], two["global_batch_found"]) == ("max", 48)
    assert three["gpu"] is None
    assert three["processor"] not in ("Some GPU", "")
    assert f"hardware: {three['processor']}, 2 threads, not " in capsys.readouterr().out


def test_what_differs_from_the_document_is_listed(capsys):
    name = "nvidia/dlrm-small/throughput/dgx-a100-1gpu/amp"
    assert table("001", capsys)[name]["ours"] == ""
    made_up("no/row", [1.0])
    made_up(name, [10.0], "1n2d", emulated=True, processes=1, changed=["--lr=1"])
    found = table("001", capsys)[name]["comparison"]
    assert "; precision: bf16 on a CPU, not fp16; 2 devices emulated by 1 processes; " in found
    assert "; flags: --lr=1; place: 1n2d, not 1n1d" in found
    made_up(name, [10.0, 12.0], changed=["--lr=1"])
    shown = tables.summary(*tables.results(records()[2:]))
    assert "the 2 runs differ by 18.2%" in shown
    assert " times it" not in shown  # with another rate


def made_up(row: str, values, label="1n1d", **more):
    """Appends results like `run`, one per value or series."""
    nodes, devices = (int(number) for number in label.removesuffix("d").split("n"))
    setting = {
        "row": row,
        "label": label,
        "arguments": [],
        "processes": devices,
        "threads": 1,
        "smoke": False,
        "emulated": False,
        "data": "generated",
        "changed": [],
        "torch": "2.13.0",
        "batch_per_device": 128,
        "nodes": nodes,
        "devices": devices,
        "exit_code": 0,
        "quantity": "throughput",
        "unit": "images/s",
        "processor": "Some CPU",
        "gpu": None,
        **more,
    }
    with Path("systems.jsonl").open("a") as file:
        for value in values:
            values = value if isinstance(value, list) else [value]
            file.write(json.dumps({**setting, "values": values}) + "\n")


def table(document, capsys):
    """Returns the cells of each row of a document's table."""
    assert main(["table", document]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, *lines)]
    empty = dict.fromkeys(tables.COLUMNS, "")
    return {row[0]: empty | dict(zip(rows[0], row, strict=True)) for row in rows[1:]}


def test_tables_have_the_published_and_the_measured(capsys):
    made_up(ONE, [10.0, 11.0, 10.5])
    made_up(EIGHT, [70.0, 77.0, 84.0], "1n8d")
    rows = table("002", capsys)
    assert len(rows) == 36
    one, eight = rows[ONE], rows[EIGHT]
    assert (one["ours"], one["runs"], one["spread"]) == ("10.5", "3", "9.5%")
    assert (eight["ours"], eight["speedup"], eight["efficiency"]) == ("77", "7.33", "91.7%")
    assert "OneFlow 2969.5 images/sec" in eight["published"]
    assert eight["comparison"].startswith("differs in hardware: Some CPU, 8 threads, not 8 V100")
    assert rows["dlperf/rn50/fp32-b128/4n32d"]["ours"] == ""
    assert main(["table", "002", "--output=page.md"]) == 0
    assert f"| {EIGHT} | 1 | 8 | 128 |" in Path("page.md").read_text()
    assert capsys.readouterr().out == "page.md: 36 rows, 2 results\n"


def test_a_rule_has_its_statistic_and_drops_what_it_says(capsys):
    made_up("ipu/rn50/train-m2000", [[1.0, 10.0, 12.0], [2.0, 20.0, 22.0]])
    made_up(ONE, [100.0, 102.0, 107.0])
    assert table("003", capsys)["ipu/rn50/train-m2000"]["ours"] == "16"
    (_, found) = tables.results(records())
    assert found.value == 102.0
    assert "the 3 runs differ by 6.9%, more than 5%" in tables.summary(found)
    made_up("ipu/rn50/train-m2000", [1.0])
    assert main(["table", "003"]) == 2
    assert "more than 1 logged values in each run" in capsys.readouterr().err


def test_places_in_different_settings_have_no_speedup(capsys):
    made_up(ONE, [10.0])
    made_up(EIGHT, [70.0], "1n8d", threads=2)
    rows = table("002", capsys)
    assert rows[EIGHT]["ours"] == "70"
    assert rows[EIGHT]["speedup"] == ""
    assert "1 of 7 runs" in rows[EIGHT]["comparison"]
    assert "1n1d ran with threads 1 and this with 2" in rows[EIGHT]["comparison"]


def test_a_row_shows_its_newest_runs_at_full_size_with_its_own_flags(capsys):
    made_up(ONE, [10.0, 12.0])
    made_up(ONE, [20.0], threads=2)
    made_up(ONE, [11.0])
    made_up(ONE, [1000.0], smoke=True)
    made_up(ONE, [500.0], changed=["--batch_size=1"], arguments=["--batch_size=1"])
    row = table("002", capsys)[ONE]
    assert (row["ours"], row["runs"]) == ("11", "3")


RUN = '{"row": "x", "label": "1n1d", %s}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "expected an object"),
        ('{"row": ["x"]}', "expected str as 'row'"),
        ('{"row": "x"', "line 2"),
        (RUN % '"nodes": 1, "devices": 0, "exit_code": 0, "values": [1.0]', "one device"),
        (RUN % '"nodes": 1, "devices": 1, "exit_code": 0, "values": [NaN]', "finite"),
        (RUN % '"nodes": 1, "devices": 1, "exit_code": 0', "expected list as 'values', got None"),
        (RUN % '"nodes": 1, "devices": 1, "exit_code": 1', "expected str as 'error', got None"),
    ],
)
def test_a_line_that_is_no_result_is_named(line, problem, capsys):
    made_up(ONE, [10.0])
    with Path("systems.jsonl").open("a") as file:
        file.write(f"{line}\n")
    for command in (["table", "002"], ["run", TRAINING, "--smoke"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "systems.jsonl, line 2" in error
        assert problem in error


def test_a_file_that_is_not_text_is_named(capsys):
    Path("systems.jsonl").write_bytes(b"\xff\xfe\x00")
    assert main(["table", "002"]) == 2
    assert "systems.jsonl: no file of results" in capsys.readouterr().err


def test_two_processes_do_not_append_to_one_file(capsys):
    with results.claimed(Path("systems.jsonl")):
        assert smoke(TRAINING) == 2
    assert "another run appends to it" in capsys.readouterr().err
    assert main(["table", "002"]) == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_command_takes_its_run_with_it(stop, tmp_path):
    flags = ["--smoke", "--threads=1", "--", "--max_steps=100000", "--epochs=100000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "dlrm.published.command", "run", TRAINING, *flags],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    list_of_children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    while not (running := list_of_children.read_text().split()):
        assert command.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    command.send_signal(stop)
    command.communicate()
    for _ in range(600):
        if not any(Path(f"/proc/{number}").exists() for number in running):
            break
        time.sleep(0.1)
    assert not any(Path(f"/proc/{number}").exists() for number in running)


def test_all_rows_of_a_pattern_run_but_those_that_do_not_fit(said, capsys, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said({"-m": losses(inference_throughput_1=9.0)})
    assert main(["run", "ipu/effb0/infer-*/b1", "--smoke"]) == 1  # the second has four devices
    assert [record["row"] for record in records()] == ["ipu/effb0/infer-synthetic/b1"]
    assert "passed over: ipu/effb0/infer-generated-x4/b1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "same"),
    [
        ("Tesla V100-SXM2-16GB", True),
        ("Tesla V100-PCIE-16GB", False),
        ("Tesla V100-SXM2-32GB", False),
    ],
)
def test_only_the_same_gpu_compares(gpu, same, capsys):
    made_up(ONE, [380.0] * 7, gpu=gpu, data="imagenet")
    compared = table("002", capsys)[ONE]["comparison"]
    differs = f"differs in hardware: {gpu}, not one V100-SXM2-16GB"
    assert compared == ("comparable" if same else differs)


@pytest.mark.slow
def test_losses_of_the_medium_model_follow_float32_run_eagerly(capsys):
    assert main(["run", f"{MEDIUM}/trend", "--smoke", "--threads=1"]) == 0
    assert [len(record["losses"]) for record in records()] == [19] * 2  # the summary has the last
    lines = capsys.readouterr().out.splitlines()
    rows = f"{MEDIUM}/lazy-bf16-b512 and {MEDIUM}/eager-fp32"
    assert lines[-1].startswith(f"losses at reduced sizes of {rows} match: largest gap")
