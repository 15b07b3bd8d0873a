"""The variables that SLURM's srun sets for a task, under the names of torch's launchers."""

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 15_000, 15_000  # below those that Linux gives to outgoing connections


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, WORLD_SIZE and the others of a task of srun; nothing for a task alone.

    The script of sbatch has variables of a task, too, but runs once.

    Raises:
        ValueError: a variable has no number; the message names it.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    is_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" not in environment or size == "1" or is_script:
        return {}
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": _tasks_of_node(environment),
        "MASTER_ADDR": first_host(environment),
        "MASTER_PORT": _port(environment),
    }
    for name, key in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")):
        text = found[name]
        if text is not None and not re.fullmatch("[0-9]+", text):
            raise ValueError(f"SLURM_{key}={text}: expected a number, 0 or more")
    return {name: text for name, text in found.items() if text is not None}


def _tasks_of_node(environment: Mapping[str, str]) -> str | None:
    """Returns the number of this node's tasks: the second of "4(x2),3" has 4."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text, node = (
        next(filter(None, map(environment.get, names)), ""),
        environment.get("SLURM_NODEID"),
    )
    counts = [
        count
        for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(nodes or 1))
    ]
    return counts[int(node)] if node and node.isdigit() and int(node) < len(counts) else None


def first_host(environment: Mapping[str, str]) -> str | None:
    """Returns the node of task 0: of "gpu[07-09,12],cpu1" it is gpu07."""
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next(filter(None, map(environment.get, names)), "")
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]
    return first or environment.get("SLURM_LAUNCH_NODE_IPADDR")


def _port(environment: Mapping[str, str]) -> str | None:
    """Returns a port that all tasks of a step derive, and other jobs and steps rarely."""
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID") or ""
    step = environment.get("SLURM_STEP_ID", "0")
    if not job.isdigit() or not step.isdigit():
        return None
    return str(FIRST_PORT + (10 * int(job) + int(step)) % PORTS)
