"""Tasks of SLURM's srun are ranks, unless another launcher made them, or there is one task."""

import os
import socket

import forked
import pytest

from dlrm.distributed import join_world, launch
from dlrm.distributed.slurm import slurm_variables
from dlrm.distributed.world import Launch, shutdown

TASK = {
    **{"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_TASKS_PER_NODE": "4,2,1", "SLURM_NODELIST": "gpu[07-09,12],cpu1"},
    **{"SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "2"},
}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def test_tasks_of_srun_are_ranks():
    assert launch(TASK) == Launch(5, 7, 1, 2)
    found = slurm_variables(TASK)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu07", "15672")
    again = slurm_variables({**TASK, "SLURM_STEP_ID": "3"})
    assert again["MASTER_PORT"] != found["MASTER_PORT"], "of another step"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Launch()),
        ({"SLURM_STEP_NUM_TASKS": "1"}, Launch()),  # srun -n 1 within a job of 7
        ({"ENVIRONMENT": "BATCH", "SLURM_STEP_ID": None}, Launch()),  # the script of sbatch
        ({"ENVIRONMENT": "BATCH"}, Launch(5, 7, 1, 2)),  # srun within it
        ({"SLURM_PROCID": None}, Launch()),  # a shell of salloc
        ({"SLURM_STEP_ID": None, "SLURM_TASKS_PER_NODE": "4,2(x2)"}, Launch(5, 7, 1, 2)),
        ({"SLURM_NODEID": None}, Launch(5, 7, 1, 7)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Launch(0, 2, 0, 2)),  # of torchrun
        (MPIRUN, Launch(1, 2, 0, 2)),
    ],
)
def test_which_launcher_counts(change, expected):
    where = {"MASTER_ADDR": "here", "MASTER_PORT": "1"}
    variables = {**TASK, **where, **change}
    assert launch({k: v for k, v in variables.items() if v is not None}) == expected


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("rack[1-2]n[03,05]-ib,x", "rack1n03-ib"),
        ("a[10,20-21]", "a10"),
        ("", "10.0.0.7"),
    ],
)
def test_task_0_is_on_the_first_node(nodes, host):
    variables = {**TASK, "SLURM_NODELIST": nodes, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
    assert slurm_variables(variables)["MASTER_ADDR"] == host


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x: expected a number"),
        ({"SLURM_LOCALID": None}, "LOCAL_RANK: not set, though RANK=5"),
        ({"SLURM_JOB_ID": None}, "MASTER_PORT: not set"),
    ],
)
def test_variables_that_do_not_fit_are_named(change, message):
    variables = {k: v for k, v in {**TASK, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        launch(variables)


def _task(rank, variables, answer):
    for name in [n for n in os.environ if n.endswith(("RANK", "WORLD_SIZE"))]:
        del os.environ[name]
    os.environ.update(variables, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    world = join_world("cpu", timeout=60)
    answer.send((world.rank, world.size))
    shutdown(world)


def test_two_tasks_join():
    receiver, sender = forked.CONTEXT.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
    variables["MASTER_PORT"] = port  # the user's own counts
    tasks = [
        forked.CONTEXT.Process(target=_task, args=[rank, variables, sender]) for rank in range(2)
    ]
    for task in tasks:
        task.start()
    assert sorted(receiver.recv() for _ in tasks if receiver.poll(60)) == [(0, 2), (1, 2)]
    for task in tasks:
        task.join()
