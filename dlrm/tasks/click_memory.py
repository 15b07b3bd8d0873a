"""The memory of a DLRM's tables, and the store of rows that are not in it."""

import os
from collections.abc import Collection
from pathlib import Path

import torch

from dlrm.data.clicks.datasets import Datasets
from dlrm.distributed import World, agreed, gather
from dlrm.distributed.placement import Placement
from dlrm.host_memory import host_memory, machine
from dlrm.model.config import DLRMConfig
from dlrm.store.config import TableStoreConfig, bytes_of, shown
from dlrm.store.row_stores import RowStores, limited_stores
from dlrm.tasks.footprint import Memory, agree_that_tables_fit
from dlrm.tasks.planning.stored import StoredTables, check_storable
from dlrm.tasks.planning.workload import Workload, kinds_of
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.state import MEMBERS
from dlrm.train.optim.config import OptimizerConfig


def agree_on_memory(
    workload: Workload,
    world: World,
    fixed: Collection[str] = (),
    placement: Placement | None = None,
    tables: TableStoreConfig | None = None,
) -> None:
    """Checks the memory of all processes; see `dlrm.tasks.footprint.agree_that_tables_fit`.

    For tables in a store, it checks the memory that they may use.
    """
    memory, place = host_memory(), machine()
    if tables is not None and tables.table_memory is not None:
        sharing = gather(place, world).count(place)
        with agreed(world, ValueError):
            limit = bytes_of(tables.table_memory)
            if memory and sharing * limit > memory[0]:
                most = shown(memory[0] // sharing, round_up=False)
                ranks = f" in each of {sharing} ranks" if sharing > 1 else ""
                raise ValueError(
                    f"--table_memory {tables.table_memory}: expected at most {most}{ranks}, since "
                    f"{shown(memory[0], round_up=False)} of {shown(memory[1])} are free on the host"
                )
        return
    host = Memory("the host", place, *memory) if memory else None
    agree_that_tables_fit(workload, world, host, fixed, placement)


def agree_that_teacher_fits(checkpoint: Path, world: World) -> None:
    """Checks that each process can load the tables of a teacher; all call it together.

    Args:
        world: the processes, which have made their own tables.

    Raises:
        ValueError: too little memory is free; the message has the numbers.
        FileNotFoundError: the checkpoint is incomplete.
    """
    if world.device == "cpu":
        memory, place = host_memory(), machine()
    else:
        memory, place = torch.cuda.mem_get_info(world.device), f"rank {world.rank}"
    loads = gather(place, world).count(place)
    with agreed(world, ValueError, OSError):
        config = read_config(checkpoint)
        values = sum(table["rows"] * table["dim"] for table in config["tables"])
        needed = 4 * values * config.get(MEMBERS, 1) * loads
        if memory and needed > memory[0]:
            times = f" in {loads} processes" if loads > 1 else ""
            raise ValueError(
                f"--distill {checkpoint}: its tables need {shown(needed)}{times}, and "
                f"{shown(memory[0])} of {shown(memory[1])} are free"
            )


def table_store(
    config: TableStoreConfig,
    architecture: DLRMConfig,
    optimizers: OptimizerConfig | None,
    world: World,
    placement: Placement | None = None,
    checkpoints: str | os.PathLike | None = None,
    read: Datasets | None = None,
) -> RowStores | None:
    """Returns the stores for rows that are not in memory, or None if all are.

    Args:
        optimizers: optimizers of the training; None without a training.
        placement: placement of the tables; None follows `architecture`.
        checkpoints: directory of the run's checkpoints, or None.
        read: datasets whose batches must fit in the memory; without `optimizers` only the test
            rows count. None skips this check.

    Raises:
        ValueError: memory is too small for the store or for the rows of a batch, or tables in a
            store do not work with another setting.
    """
    if config.table_memory is None:
        return None
    placement = placement or architecture.placed(world.size)
    flag = f"--table_store {config.table_store}"
    if world.device != "cpu":
        raise ValueError(
            f"{flag}: expected --base_device cpu, got {world.device}: rows are read into the "
            "memory of the host"
        )
    check_storable(flag, architecture, placement)
    l2 = optimizers.embedding_l2 if optimizers is not None else 0.0
    if optimizers is not None and l2 and optimizers.embedding_l2_mode == "all":
        raise ValueError(
            f"{flag} contradicts --embedding_l2 {l2:g}, which changes every row before each test "
            "and checkpoint; use --embedding_l2_mode looked_up"
        )
    kinds = kinds_of(placement, world.rank, Workload.of_run(architecture, 1, optimizers))
    stores = limited_stores(config, kinds, world.rank, world.size, checkpoints)
    if read is not None and read.train.one_id_each:
        stored = StoredTables(kinds, str(config.table_memory))
        _check_batches(stored, read, trains=optimizers is not None)
    return stores


def _check_batches(stored: StoredTables, read: Datasets, trains: bool) -> None:
    trained = min(read.train.batch_size, read.train.num_samples) if trains else 0
    stored.check_batch("--batch_size", trained)
    for data in (read.test, *((read.validation, read.set_aside) if trains else ())):
        if data is not None:
            tested = min(data.batch_size, data.num_samples)
            stored.check_batch("--test_batch_size", tested, trained)
