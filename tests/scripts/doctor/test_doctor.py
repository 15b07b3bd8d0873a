"""The doctor reports what works and what is absent, and never fails because of it."""

import json
import os
import re
import subprocess
import sys

import forked
import pytest
import torch

import dlrm
from dlrm import host_cores, ops
from dlrm.ops import library
from dlrm.scripts.doctor import (
    gpu as gpu_checks,
    machine as machine_checks,
    packages as package_checks,
)

pytestmark = pytest.mark.long
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


FEW_PACKAGES = hide("pyspark", "pyarrow", "matplotlib", "fbgemm_gpu")  # saves seconds


DOCTOR = "\nimport runpy\nrunpy.run_module('dlrm.scripts.doctor', run_name='__main__')\n"


def run_doctor(*arguments, prepare="", **variables):
    done = subprocess.run(
        [sys.executable, "-c", prepare + DOCTOR, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def run_forked(folder, *arguments, prepare="", **variables):
    """Runs the doctor where torch and the operators have been imported, in a third of the time."""
    script = folder / "prepared.py"
    script.write_text(prepare + DOCTOR)
    done = forked.run(script, *arguments, env={**os.environ, **variables}, curves=True)
    assert "Traceback" not in done.stderr + done.stdout
    return done


def results(run=run_doctor, *arguments, **options):
    """The results by name, and whether training works."""
    done = run(*arguments, "--json", **options)
    result = json.loads(done.stdout)
    assert done.returncode == (0 if result["works"] else 1)
    return {found["name"]: found for found in result["findings"]}, result["works"]


@pytest.mark.skipif(not ops.native_available(), reason="the native ops are not built")
def test_what_is_here_is_reported(tmp_path):
    found, works = results(run_forked, tmp_path)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_library_that_does_not_load_is_named_with_its_reason():
    found, works = results(prepare=FEW_PACKAGES + FOREIGN_LIBRARY)
    assert works
    assert "wrong ELF class: ELFCLASS32" in found["native operators"]["value"]


@pytest.mark.slow
def test_without_onednn_the_layers_that_run_are_named():
    found, works = results(prepare=FEW_PACKAGES + NO_LIBRARY + NO_ONEDNN)
    assert works
    assert found["linear layers"]["state"] == "slow"
    assert found["linear layers"]["value"] == "torch's own in float32 and bfloat16"


def test_without_torch_nothing_works_and_the_command_to_install_it_is_printed():
    done = run_doctor(prepare=FEW_PACKAGES + hide("torch"))
    assert done.returncode == 1
    assert re.search(r"^broken +torch +not installed$", done.stdout, re.MULTILINE)
    assert "-m pip install 'torch>=2.11'\n" in done.stdout
    assert re.search(r"^broken +training ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith('Training does NOT work here: fix what is marked "broken" first.\n')


def test_a_loss_that_is_not_a_number_is_no_training(tmp_path):
    found, works = results(run_forked, tmp_path, prepare=FEW_PACKAGES + DIVERGENT)
    assert not works
    assert found["training"]["state"] == "broken"
    assert "nan" in found["training"]["value"]


def test_the_report_can_be_read(tmp_path):
    done = run_forked(tmp_path, prepare=FEW_PACKAGES, COLUMNS="80")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "Training works here."
    assert re.search(r"^ok +torch +\d", done.stdout, re.MULTILINE)
    assert max(len(line) for line in done.stdout.splitlines() if "fix:" not in line) <= 80


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ('openjdk version "17.0.15" 2025-04-15', ("17.0.15", None)),
        ('openjdk version "25-ea"', ("25-ea", None)),
        ('java version "1.8.0_292"', "is Java 1.8.0_292; Spark needs 17 or newer"),
        ("Error: could not find libjava.so", "cannot read the version of"),
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
    monkeypatch.setattr(host_cores, "_control_group_cores", lambda: 0.5)
    found = next(iter(machine_checks.threads()))
    assert "control group's limit" in found.value
    if "uses 1;" not in found.value:
        assert (found.state, found.fix) == ("slow", "export OMP_NUM_THREADS=1")


@pytest.mark.parametrize(
    ("count", "idle", "states"),
    [
        (1, 2.0, {"threads": "slow"}),
        (1, 0.3, {"threads": "ok", "load": "note"}),
        (2, 0.3, {"threads": "ok", "load": "note"}),
        (2, 1.9, {"threads": "ok"}),
        (2, None, {"threads": "ok"}),
    ],
)
def test_one_thread_is_advised_only_where_others_use_the_cores(count, idle, states, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.setattr(machine_checks, "idle_cores", lambda: idle)
    monkeypatch.setattr(machine_checks, "available_cores", lambda: (2.0, "all"))
    monkeypatch.setattr(machine_checks.os, "cpu_count", lambda: 2)
    found = {one.name: one for one in machine_checks.threads() if one.name != "waiting threads"}
    assert {name: one.state for name, one in found.items()} == states
    if "load" in found:
        assert "leave 0.3 of 2 cores idle" in found["load"].value
        assert ("OMP_NUM_THREADS=1" in found["load"].fix) == (count == 2)


@pytest.mark.slow
def test_untuned_memory_is_reported_as_slow():
    found, works = results(prepare=FEW_PACKAGES, DLRM_TUNE="0", THP_MEM_ALLOC_ENABLE="0")
    assert works
    for name in ("huge pages", "freed memory"):
        assert (found[name]["state"], "DLRM_TUNE" in found[name]["mend"]) == ("slow", True)


@pytest.mark.slow
def test_a_variable_that_gives_freed_memory_back_is_named():
    found, works = results(prepare=FEW_PACKAGES, MALLOC_TRIM_THRESHOLD_="0")
    assert works
    freed = found["freed memory"]
    assert (freed["state"], freed["mend"]) == ("slow", "unset MALLOC_TRIM_THRESHOLD_")


@pytest.fixture
def a_gpu(monkeypatch, tmp_path, root):
    """Makes torch report a GPU with a library of operators; arguments change its facts."""

    def report(
        capability=(9, 0), free=130, total=140, driver=13000, archs="80;90", nvcc=True, devices=1
    ):
        def set_to(module, name, value):
            monkeypatch.setattr(module, name, value, raising=False)

        set_to(torch.version, "cuda", "13.0")
        set_to(torch._C, "_cuda_getDriverVersion", lambda: driver)
        set_to(torch.cuda, "is_available", lambda: driver >= 13000)
        set_to(torch.cuda, "device_count", lambda: devices * (driver >= 13000))
        set_to(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
        set_to(torch.cuda, "get_device_capability", lambda i: capability)
        set_to(torch.cuda, "mem_get_info", lambda i: (free << 30, total << 30))
        set_to(library, "_cuda_problem", None if archs else "there is none")
        set_to(library, "_FOLDER", tmp_path)
        source = (root / "csrc/cuda/runtime.cu").read_text()
        (literal,) = re.findall(r'"([^"]*)" DLRM_CUDA_ARCHS,', source)
        (tmp_path / "_ops_cuda.so").write_bytes(f"\x7fELF...{literal}{archs}\0, and".encode())
        (tmp_path / "bin").mkdir()
        if nvcc:
            (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh")
            (tmp_path / "bin" / "nvcc").chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        return {found.name: found for found in gpu_checks.cuda()}

    return report


def test_what_a_run_would_use_on_a_gpu_is_said(a_gpu):
    found = a_gpu()
    assert {result.state for result in found.values()} == {"ok"}
    text = "\n".join(f"{name}: {result.value}" for name, result in found.items())
    assert (
        "CUDA devices: NVIDIA H200 (compute capability 9.0); torch is built for CUDA 13.0" in text
    )
    assert "GPU memory: 130.0 GiB free of 140.0 on cuda:0" in text
    assert "CUDA driver: supports CUDA 13.0" in text
    assert "CUDA operators: loaded, compiled for 80, 90; cuda:0 runs machine code for 90" in text


@pytest.mark.parametrize(
    ("here", "name", "state", "value", "fix"),
    [
        ({"nvcc": False}, "nvcc", "absent", "not found in CUDA_HOME", "NVIDIA's CUDA toolkit 13.0"),
        (
            {"archs": "80", "capability": (7, 5)},
            *("CUDA operators", "broken", "cuda:0 of compute capability 7.5 cannot run"),
            'DLRM_CUDA=1 DLRM_CUDA_ARCHS="75" ',
        ),
        ({"archs": ""}, "CUDA operators", "slow", "there is none", 'DLRM_CUDA_ARCHS="90" '),
        ({"free": 2}, "GPU memory", "note", "2.0 GiB free of 140.0", "nvidia-smi"),
        ({"free": 2, "total": 3}, "GPU memory", "note", "2.0 GiB free", "--base_device=cpu"),
        ({"driver": 12080}, "CUDA driver", "slow", "supports CUDA 12.8", "driver 580 or newer"),
    ],
)
def test_what_keeps_a_run_from_a_gpu_is_said_with_its_remedy(here, name, state, value, fix, a_gpu):
    found = a_gpu(**here)[name]
    assert found.state == state
    assert value in found.value
    assert fix in found.fix
    assert found.cost


@pytest.mark.parametrize(
    ("capability", "compiled", "code"),
    [
        ((8, 6), ("80", "90"), "machine code for 80"),
        ((8, 9), ("75", "80", "86", "90"), "machine code for 86"),
        ((8, 0), ("86",), None),
        ((12, 0), ("80", "90"), "PTX of 90"),
        ((7, 0), ("75", "80"), None),
        ((9, 0), ("90a",), "machine code for 90a"),
        ((10, 0), ("90a",), None),
        ((10, 3), ("100f",), "machine code for 100f"),
        ((9, 0), (), None),
    ],
)
def test_a_gpu_runs_code_of_its_major_version_or_older_ptx(capability, compiled, code):
    found = gpu_checks.code_for(capability, compiled)
    assert found == code or found.startswith(f"{code},")


def test_requirements_are_those_of_the_package(root):
    text = (root / "pyproject.toml").read_text()
    for package in (*package_checks.REQUIRED, *package_checks.OPTIONAL):
        assert f'"{package.requirement}"' in text or package.module == "fbgemm_gpu"
