"""The files for clusters are well-formed, and their commands run without the clusters."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from test_documented_commands import TRAINING, unknown_flags

FOLDER = Path(__file__).parent.parent / "examples" / "cluster"
SBATCH = (FOLDER / "train.sbatch").read_text()
JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())["spec"]
SPARK = yaml.safe_load((FOLDER / "prepare.sparkapplication.yaml").read_text())["spec"]
WORKER = JOB["pytorchReplicaSpecs"]["Worker"]
POD = WORKER["template"]["spec"]
(CONTAINER,) = POD["containers"]
# A fake of srun: one torchrun of two processes on this machine.
SRUN = f"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec {shlex.quote(sys.executable)} -m torch.distributed.run "${{@:2}}" {shlex.join(TRAINING)}
"""


def test_the_script_for_slurm_names_options_of_sbatch_and_flags_of_dlrm():
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SBATCH, re.M)
    assert len(options) == SBATCH.count("\n#SBATCH")
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"}
    assert {name for name, _ in options} == known | {"time", "signal", "requeue", "open-mode"}
    head, _, body = SBATCH.partition("\nset -eu\n")
    assert "#SBATCH" not in body, "sbatch reads none after the first command"
    (command,) = re.findall(r"\bdlrm .*", body.replace("\\\n", ""))
    assert not unknown_flags(shlex.split(command))
    subprocess.run(["bash", "-n", FOLDER / "train.sbatch"], check=True)


def test_the_job_for_kubernetes_is_of_one_piece():
    assert JOB["elasticPolicy"]["maxReplicas"] == WORKER["replicas"]
    assert int(JOB["nprocPerNode"]) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}
    assert not unknown_flags(CONTAINER["command"])


def test_the_application_for_spark_is_of_one_piece(root):
    assert (root / "dlrm" / Path(SPARK["mainApplicationFile"]).name).exists()
    for pods in (SPARK["driver"], SPARK["executor"]):
        assert [m["name"] for m in pods["volumeMounts"]] == [v["name"] for v in SPARK["volumes"]]
    assert not unknown_flags(["dlrm", *SPARK["arguments"]])


def execute(words, folder, **variables):
    """Runs a command with this package in place of an installed one."""
    programs = folder / "bin"
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = str(FOLDER.parent.parent)
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env={**os.environ, **own, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def shared(tmp_path, trained):
    """A folder in place of the shared one, with a dataset."""
    (tmp_path / "dataset").symlink_to(trained.dataset)
    return tmp_path


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_the_script_for_slurm_trains_and_goes_on(shared):
    program(shared / "bin" / "srun", SRUN)
    program(shared / "bin" / "scontrol", "#!/bin/bash\necho localhost\n")
    where = {"DATASET": str(shared / "dataset"), "RUN": str(shared / "run")}
    where |= {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    assert "no checkpoint in" in execute(["bash", FOLDER / "train.sbatch"], shared, **where)
    assert "resumed from" in execute(["bash", FOLDER / "train.sbatch"], shared, **where)


@pytest.mark.slow
def test_the_command_for_kubernetes_trains(shared):
    torchrun, *words = [w.replace("/shared", str(shared)) for w in CONTAINER["command"]]
    policy = JOB["elasticPolicy"]
    variables = {
        "PET_NNODES": "1:1",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": "localhost:0",
        "PET_RDZV_ID": "dlrm-train",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    assert torchrun == "torchrun"
    execute([*launcher, *words, *TRAINING], shared, **variables)
    assert len([*(shared / "run").glob("step-*/manifest.json")]) == 1


@pytest.mark.slow
@pytest.mark.spark
def test_the_application_for_spark_prepares(tmp_path, root):
    rows = {"bought": [i % 2 for i in range(300)], "shop": [f"shop {i % 9}" for i in range(300)]}
    (tmp_path / "sales").mkdir()
    parquet.write_table(pa.table(rows), tmp_path / "sales" / "part-0.parquet")
    (tmp_path / "schema.yaml").write_text("label: bought\ncategorical: [shop]\n")
    words = [word.replace("/shared", str(tmp_path)) for word in SPARK["arguments"]]
    submit = [Path(sys.executable).with_name("spark-submit"), "--master", "local[2]"]
    if not submit[0].exists():
        pytest.skip("pyspark is not installed")
    main = root / "dlrm" / Path(SPARK["mainApplicationFile"]).name
    execute([*submit, main, *words], tmp_path, PYSPARK_PYTHON=sys.executable)
    assert (tmp_path / "dataset" / "manifest.json").exists()
