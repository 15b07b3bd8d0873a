"""The variables that mpirun sets for a process, under the names of torch's launchers."""

import re
import zlib
from collections.abc import Mapping

from dlrm.distributed.slurm import FIRST_PORT, PORTS, first_host

_TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH and Intel MPI
_RUNS = ("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "SLURM_JOB_ID")  # the same in all processes
_USUAL_PORT = "29500"  # as torch.distributed.launch


def mpi_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, WORLD_SIZE and the others of a process of mpirun; nothing without mpirun.

    The processes meet on this machine if all of them are here, otherwise on the first node of
    SLURM's job, if there is one.

    Raises:
        ValueError: a variable has no number; the message names it.
    """
    names = _names(environment)
    found = {
        name: environment[own]
        for name, own in zip(_TORCHS, names, strict=False)
        if own in environment
    }
    for own in names:
        if not re.fullmatch("[0-9]+", environment.get(own, "0")):
            raise ValueError(f"{own}={environment[own]}: expected a number, 0 or more")
    if not found:
        return {}
    is_one_machine = found.get("LOCAL_WORLD_SIZE") == found.get("WORLD_SIZE")
    job = {"SLURM_NODELIST": environment.get("SLURM_JOB_NODELIST", "")}
    if host := "127.0.0.1" if is_one_machine else first_host(job):
        found |= {"MASTER_ADDR": host, "MASTER_PORT": _port(environment)}
    return found


def _names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the variables in the order of torch's, or none without mpirun.

    SLURM's srun may set PMI_RANK, too, but only mpirun sets the rank on the machine.
    """
    if environment.keys() & {*_OPEN_MPI[:2]}:
        return _OPEN_MPI
    return _HYDRA if environment.keys() >= {_HYDRA[0], _HYDRA[2]} else ()


def _port(environment: Mapping[str, str]) -> str:
    """Returns a port that all processes of a run derive, and those of another run rarely."""
    run = next(filter(None, map(environment.get, _RUNS)), None)
    return str(FIRST_PORT + zlib.crc32(run.encode()) % PORTS) if run else _USUAL_PORT
