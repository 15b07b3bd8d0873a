"""The catalogue's command: list, show, run, compare and tabulate."""

import csv
import io
import json
import math
import os
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dlrm.scripts.systems import show
from dlrm.scripts.systems.command import main
from dlrm.systems.catalogue import CATALOGUE
from dlrm.systems.rows import System

ROOT = Path(__file__).parents[3]
TRAINING = "gaudi/rn50/eager-fp32-b128"
FAST = (
    *("gaudi/rn50/eager-bf16-b256", "ipu/rn50/train-pod16", "ipu/effb0/infer-generated-x4/b1"),
    *("dlperf/bert-base/fp32-b32/2n16d", "ipu/bert-3layer/squad-infer-128/mb4"),
    *("gaudi/dlrm-medium/eager-bf16", "nvidia/dlrm-large/throughput/dgx-a100-8gpu/amp"),
    "nvidia/dlrm-small/benchmark/inference",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def records(path="systems.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_list_names_each_row_once(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(CATALOGUE)
    assert lines[-1] == f"{len(CATALOGUE)} rows"
    assert main(["list", "--source=003", "--model=efficientnet_b0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 + 1
    assert all(line.startswith("ipu/effb0/infer-") for line in lines[:-1])


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=list(CATALOGUE))
def test_show_has_the_command_and_what_was_published(row: System, capsys):
    assert main(["show", row.id]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert row.quotation in words
    assert all(str(figure) in words for figure in row.published)
    if row.measure == "run":
        assert f"dlrm.scripts.{row.command} " in words
        assert all(flag in words for flag in row.flags)
    if row.printed and row.command in ("cnn", "bert"):
        names = [
            word for word in shlex.split(row.printed) if re.fullmatch(r"--[a-z-]+(=.*)?", word)
        ]
        assert all(f"  {name.partition('=')[0]}" in text for name in names)


def test_translate_says_what_became_of_each_flag(capsys):
    printed = "python3 validation.py --model resnet --model-size 50 --batch-size 4 --batch-norm"
    assert main(["translate", f"{printed} --synthetic-data --enable-half-partials"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("python -m dlrm.scripts.cnn ")
    assert "--batch_size=4" in text
    assert "approximated" in text
    assert main(["translate", f"{printed} --bath-size 3"]) == 2
    assert "--bath-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["show", "gaudi/rn50/graph-bf16-b265"], "gaudi/rn50/graph-bf16-b256"),
        (["run", "dlperf/rn50/fp32-b128/4n32d"], "--emulate"),
        (["run", TRAINING, "--grid=1n999d"], "999 devices"),
        (["run", TRAINING, "--grid=3"], "--grid 3: expected"),
        (["run", TRAINING, "--dataset=nowhere"], "--dataset nowhere: no such directory"),
        (["run", "nvidia/dlrm-small/seed-8/amp"], "preproc/prepare_dataset.sh"),
        (["run", "gaudi/rn50/top1-from-epoch80"], "pass --dataset DIR"),
        (["run", "ipu/rn50/infer-synthetic/b1", "--dataset=."], "makes its own data"),
        (["run", "nothing/*"], "no row matches"),
        (["run", TRAINING, "--", "--no_such_flag=1"], "no_such_flag"),
        (["table", "005"], "expected a document of 000"),
        (["list", "--model=vgg"], "--model vgg: expected one of"),
        (["scaling", TRAINING, "--grid=1n2d"], "expected 1n1d among the places"),
        (["trend", TRAINING, "--against=ipu/rn50/train-m2000"], "cannot be compared"),
    ],
)
def test_mistakes_are_named(arguments, error, capsys):
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert error in message
    assert not Path("systems.jsonl").exists()


def smoke(row: str, *more: str) -> int:
    return main(["run", row, "--smoke", "--emulate", "--threads=1", *more])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, row in CATALOGUE.items()
        if row.measure == "run" and "--mode=validate" not in row.flags
    ],
)
def test_a_row_runs_at_reduced_size(row: System, capsys):
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


def test_parts_of_a_network_run_as_a_pipeline(capsys):
    assert smoke("ipu/rnx101/train-m2000") == 0
    assert smoke("ipu/rnx101/train-m2000", "--pipeline") == 0
    one, pipeline = records()
    assert (one["processes"], pipeline["processes"]) in ((1, 2), (2, 2), (2, 4))
    assert (one["pipeline"], pipeline["pipeline"]) == (1, 2)
    assert main(["run", "gaudi/rn50/eager-fp32-b128", "--pipeline"]) == 2
    assert "is not divided into parts" in capsys.readouterr().err


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


DYING = """
import os, signal, sys
if "dlrm.scripts.cnn" in sys.orig_argv:
    with open({marker!r}, "a") as file:
        file.write("x")
    if os.path.getsize({marker!r}) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_dies_is_kept_and_only_what_is_missing_is_run_again(
    tmp_path, monkeypatch, capsys
):
    marker = tmp_path / "runs"
    (tmp_path / "sitecustomize.py").write_text(DYING.format(marker=str(marker)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert smoke(TRAINING, "--repeats=3") == 1
    assert [record["exit_code"] for record in records()] == [0, -9, 0]
    captured = capsys.readouterr()
    assert "run 2/3 failed with exit code -9" in captured.out
    assert "1 runs failed" in captured.err
    assert smoke(TRAINING, "--repeats=3") == 0
    assert marker.stat().st_size == 4
    assert [record["exit_code"] for record in records()] == [0, -9, 0, 0]
    out = capsys.readouterr().out
    assert "2 of 3 runs are done" in out
    assert "mean of 3 runs" in out


def test_a_comparison_of_runs_that_fail_names_the_error(tmp_path, monkeypatch, capsys):
    marker = tmp_path / "runs"
    (tmp_path / "sitecustomize.py").write_text(DYING.format(marker=str(marker)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    scaling = ["scaling", TRAINING, "--grid=1n1d", "--smoke", "--repeats=3", "--threads=1"]
    assert main(scaling) == 1  # the second run dies, the third does not
    assert "1 of 3 runs failed, the last with: " in capsys.readouterr().err
    assert main(scaling) == 0


def test_a_failing_command_is_quoted(capsys):
    assert smoke(TRAINING, "--", "--load_checkpoint_path=/nowhere") == 1
    (record,) = records()
    assert "/nowhere" in record["error"]
    assert record["exit_code"] == 1
    assert "/nowhere" in capsys.readouterr().out


def test_places_of_a_grid_scale_and_make_a_report(capsys):
    row = "dlperf/rn50/fp32-b128/1n1d"
    grid = ["--grid=1n1d,1n2d", "--smoke", "--repeats=1", "--threads=1"]
    assert main(["scaling", row, *grid]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "| num_nodes | devices_per_node | batch_per_device | throughput | speedup | efficiency |"
    cells = [cell.strip() for cell in lines[lines.index(head) + 2].strip("|").split("|")]
    assert cells[:3] == ["1", "1", "2"]
    assert cells[4:] == ["1.00", "100.0%"]
    one, two = (record["values"][0] for record in records())
    cells = [cell.strip() for cell in lines[lines.index(head) + 3].strip("|").split("|")]
    assert cells[:3] == ["1", "2", "2"]
    assert float(cells[4]) == pytest.approx(two / one, abs=0.01)
    assert float(cells[5].rstrip("%")) == pytest.approx(50 * two / one, abs=0.2)


def made_up(row: str, values, label="1n1d", **more):
    """Results as `run` appends them, one a value."""
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
        "unit": "images/s",
        "processor": "Some CPU",
        "gpu": None,
        **more,
    }
    with Path("systems.jsonl").open("a") as file:
        for value in values:
            file.write(json.dumps({**setting, "values": [value]}) + "\n")


def test_tables_have_the_published_and_the_measured(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)  # tests draw no curves else
    made_up("dlperf/rn50/fp32-b128/1n1d", [10.0, 11.0, 10.5])
    made_up("dlperf/rn50/fp32-b128/1n8d", [70.0, 77.0, 84.0], "1n8d")
    assert main(["table", "002", "--format=csv"]) == 0
    rows = {row["row"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert len(rows) == 36
    one, eight = (rows[f"dlperf/rn50/fp32-b128/{place}"] for place in ("1n1d", "1n8d"))
    assert (one["ours"], one["runs"], one["spread"]) == ("10.5", "3", "9.5%")
    assert (eight["ours"], eight["speedup"], eight["efficiency"]) == ("77", "7.33", "91.7%")
    assert "OneFlow 2969.5 images/sec" in eight["published"]
    assert eight["comparison"].startswith("differs in hardware: Some CPU (8 threads), not 8 V100")
    assert rows["dlperf/rn50/fp32-b128/4n32d"]["ours"] == ""
    assert main(["table", "002", "--format=markdown"]) == 0
    assert "| dlperf/rn50/fp32-b128/1n8d | 1 | 8 | 128 |" in capsys.readouterr().out
    assert main(["table", "002", "--format=html", "--output=page.html"]) == 0
    page = Path("page.html").read_text()
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(list(picture.iter())) > 50
    assert "dlperf/rn50/fp32-b128/1n8d" in page
    assert not re.search(r"""(src|href)=.?https?:|<script|@import""", page)  # needs no other file


def test_settings_that_differ_are_not_compared(capsys):
    made_up("dlperf/rn50/fp32-b128/1n1d", [10.0])
    made_up("dlperf/rn50/fp32-b128/1n8d", [70.0], "1n8d", threads=2)
    assert main(["table", "002"]) == 2
    assert "different settings, threads 1 and 2" in capsys.readouterr().err


def test_a_line_that_is_no_result_is_named(capsys):
    made_up("dlperf/rn50/fp32-b128/1n1d", [10.0])
    with Path("systems.jsonl").open("a") as file:
        file.write('[1]\n{"row": "x"}\n')
    assert main(["table", "002"]) == 2
    assert "systems.jsonl, line 2: no result of a run" in capsys.readouterr().err


def test_a_comparison_says_what_differs_and_what_does_not(capsys):
    name = "nvidia/dlrm-small/throughput/dgx-a100-1gpu/tf32"
    row = CATALOGUE[name]
    there = {"gpu": "NVIDIA A100-SXM4-40GB", "data": row.data, "unit": "samples/s"}
    made_up(name, [2.5e6], **there)
    assert main(["table", "001", "--format=csv"]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert next(r for r in rows if r["row"] == name)["comparison"] == "comparable"


def test_seeds_print_the_documents_table(capsys):
    row = "dlperf/rn50/fp32-b128/1n1d"
    assert main(["seeds", row, "--n=2", "--first=3", "--smoke", "--threads=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    values = {record["seed"]: record["values"][0] for record in records()}
    assert lines[0] == "| Random seed | throughput |"
    assert lines[2:4] == [f"| {seed} | {values[seed]:.6f} |" for seed in (3, 4)]
    assert f"| **mean** | {sum(values.values()) / 2:.6f} |" in lines


MEDIUM = "gaudi/dlrm-medium"
TREND = ["--steps=20", "--smoke", "--threads=1"]


@pytest.mark.parametrize("row", ["eager-bf16", "lazy-fp32"])
def test_losses_of_the_medium_model_follow_float32_run_eagerly(row, capsys):
    assert main(["trend", f"{MEDIUM}/{row}", f"--against={MEDIUM}/eager-fp32", *TREND]) == 0
    assert f"losses of {MEDIUM}/{row} and {MEDIUM}/eager-fp32 match" in capsys.readouterr().out
    assert [len(record["losses"]) for record in records()] == [19, 19]  # the summary has the last


def test_losses_as_a_graph_follow_those_run_eagerly(capsys):
    row = f"{MEDIUM}/eager-fp32"
    assert main(["trend", row, f"--against={row}", "--change=--execution=graph", *TREND]) == 0
    graph, eager = records()
    assert "--execution=graph" in graph["changed"]
    assert "--execution=graph" not in eager["changed"]
    assert "match: largest gap" in capsys.readouterr().out


def test_a_row_that_compares_others_is_run_like_any(capsys):
    assert main(["run", f"{MEDIUM}/trend", "--smoke", "--threads=1"]) == 0
    assert "match: largest gap" in capsys.readouterr().out


PLANTED = """
import sys
if "--precision=bf16" in sys.orig_argv:
    import torch.nn.functional as F
    right = F.binary_cross_entropy_with_logits
    F.binary_cross_entropy_with_logits = lambda *a, **k: 1.1 * right(*a, **k)
"""


def test_a_planted_bug_fails_the_trend(tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    against = f"--against={MEDIUM}/eager-fp32"
    assert main(["trend", f"{MEDIUM}/eager-bf16", against, *TREND]) == 1
    assert "do not match: largest gap" in capsys.readouterr().out
    assert main(["trend", f"{MEDIUM}/eager-bf16", against, *TREND, "--bound=0.2"]) == 0


def test_the_document_is_written_from_the_rows(capsys):
    assert (ROOT / "docs" / "systems.md").read_text() == show.document(), (
        "python -m dlrm.scripts.systems document docs/systems.md writes it anew"
    )
    assert main(["document", "page.md"]) == 0
    assert Path("page.md").read_text() == show.document()
