"""The doctor names what is live and what is absent, and never fails because of it."""

import json
import os
import re
import subprocess
import sys

import pytest

import dlrm
from dlrm import ops
from dlrm.scripts.doctor import machine as machine_checks
from dlrm.scripts.doctor import packages as package_checks

# Run before the doctor, in its process.
NO_LIBRARY = """
import torch
from pathlib import Path
exists = Path.exists
Path.exists = lambda path: path.name != "_ops_cpu.so" and exists(path)
def missing(path):
    raise OSError("cannot open shared object file")
torch.ops.load_library = missing
"""
FOREIGN_LIBRARY = """
import torch
def foreign(path):
    raise OSError("wrong ELF class: ELFCLASS32")
torch.ops.load_library = foreign
"""
NO_ONEDNN = """
import torch
torch.backends.mkldnn.is_available = lambda: False
"""
DIVERGENT = """
from dlrm.tasks.recommendation import Recommendation
loss = Recommendation.loss
Recommendation.loss = lambda task, batch: loss(task, batch) * float("nan")
"""


def hide(*modules):
    return f"import sys; sys.modules |= dict.fromkeys({modules!r})\n"


FEW_PACKAGES = hide("pyspark", "pyarrow", "matplotlib", "fbgemm_gpu")  # seconds saved


def run_doctor(*arguments, prepare="", **variables):
    code = (
        f"{prepare}\nimport runpy\nrunpy.run_module('dlrm.scripts.doctor', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def results(**options):
    """The results by name, and whether training works."""
    done = run_doctor("--json", **options)
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["works"] else 1)
    return {found["name"]: found for found in result["findings"]}, result["works"]


@pytest.mark.skipif(not ops.native_available(), reason="the native ops are not built")
def test_what_is_here_is_reported():
    found, works = results()
    assert works
    assert found["training"]["state"] == "ok"
    assert found["native operators"]["state"] == "ok"
    assert ops.instruction_set() in found["native operators"]["value"]
    assert found["dlrm"]["value"].startswith(dlrm.__version__)
    assert set(found) >= {
        *("python", "torch", "linear layers", "CUDA devices", "CUDA operators", "threads"),
        "huge pages",
        *("freed memory", "java", "pyspark", "matplotlib", "fbgemm_gpu", "memory", "disk"),
    }


def test_without_library_java_and_matplotlib_training_works_and_each_cost_is_named(tmp_path):
    prepare = hide("matplotlib") + NO_LIBRARY
    found, works = results(prepare=prepare, PATH=str(tmp_path), JAVA_HOME="")
    assert works
    assert found["training"]["state"] == "ok"
    native = found["native operators"]
    assert native["state"] == "slow"
    assert "_ops_cpu.so was not built" in native["value"]
    assert native["mend"].startswith("sudo apt-get install -y g++ && ")  # there is none on PATH
    assert found["java"]["state"] == found["matplotlib"]["state"] == "absent"
    assert found["java"]["value"] == "there is no java"
    assert "apt-get install -y openjdk" in found["java"]["mend"]
    assert found["matplotlib"]["cost"] == "no curves.png after training"
    assert found["matplotlib"]["mend"].endswith("-m pip install 'matplotlib>=3.8'")
    assert all(f["cost"] for f in found.values() if f["state"] in ("absent", "slow"))


def test_a_library_that_does_not_load_is_named_with_its_reason():
    found, works = results(prepare=FEW_PACKAGES + FOREIGN_LIBRARY)
    assert works
    assert "wrong ELF class: ELFCLASS32" in found["native operators"]["value"]


def test_without_onednn_the_layers_that_run_are_named():
    found, works = results(prepare=FEW_PACKAGES + NO_ONEDNN)
    assert works
    assert found["linear layers"]["state"] == "slow"
    assert found["linear layers"]["value"] == "torch's own in float32 and bfloat16"


def test_without_torch_nothing_works_and_the_command_to_install_it_is_printed():
    done = run_doctor(prepare=FEW_PACKAGES + hide("torch"))
    assert done.returncode == 1
    assert re.search(r"^broken +torch +not installed$", done.stdout, re.MULTILINE)
    assert "-m pip install 'torch>=2.11'\n" in done.stdout
    assert re.search(r"^broken +training ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(
        'Training does NOT work here: mend what is marked "broken" first.\n'
    )


def test_a_loss_that_is_not_a_number_is_no_training():
    found, works = results(prepare=FEW_PACKAGES + DIVERGENT)
    assert not works
    assert found["training"]["state"] == "broken"
    assert "nan" in found["training"]["value"]


def test_the_report_can_be_read():
    done = run_doctor(prepare=FEW_PACKAGES, COLUMNS="80")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "Training works here."
    assert re.search(r"^ok +torch +\d", done.stdout, re.MULTILINE)
    assert max(len(line) for line in done.stdout.splitlines() if "mend:" not in line) <= 80


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ('openjdk version "17.0.15" 2025-04-15', ("17.0.15", None)),
        ('openjdk version "25-ea"', ("25-ea", None)),
        ('java version "1.8.0_292"', "is Java 1.8.0_292; Spark needs 17 or newer"),
        ("Error: could not find libjava.so", "does not say its version"),
    ],
)
def test_java_is_asked_for_its_version(tmp_path, monkeypatch, says, expected):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = package_checks.java_version()
    assert found == expected or (found[0] is None and expected in found[1])


def test_a_package_of_another_version_is_not_taken_for_the_needed_one(monkeypatch):
    pytest.importorskip("pyspark")
    monkeypatch.setattr(package_checks.importlib.metadata, "version", lambda name: "5.0.1")
    (pyspark,) = (f for f in package_checks.preprocessing() if f.name == "pyspark")
    assert pyspark.state == "absent"
    assert pyspark.value == "5.0.1 is installed, pyspark>=4,<5 is needed"


def test_more_threads_than_cores_are_slow(monkeypatch):
    monkeypatch.setattr(machine_checks, "_cgroup_cpus", lambda: 0.5)
    found = next(iter(machine_checks.threads()))
    assert "control group's limit" in found.value
    if "uses 1;" not in found.value:
        assert (found.state, found.fix) == ("slow", "export OMP_NUM_THREADS=1")


def test_untuned_memory_is_reported_as_slow():
    found, works = results(prepare=FEW_PACKAGES, DLRM_TUNE="0", THP_MEM_ALLOC_ENABLE="0")
    assert works
    for name in ("huge pages", "freed memory"):
        assert (found[name]["state"], "DLRM_TUNE" in found[name]["mend"]) == ("slow", True)


def test_requirements_are_those_of_the_package(root):
    text = (root / "pyproject.toml").read_text()
    for package in (*package_checks.REQUIRED, *package_checks.OPTIONAL):
        assert f'"{package.requirement}"' in text or package.module == "fbgemm_gpu"
