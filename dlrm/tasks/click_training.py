"""A training on clicks, from its configurations: the part that the command and `dlrm.fit` share."""

import os
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dlrm.data.clicks.batch import Dataset
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Datasets
from dlrm.distributed import World, agreed
from dlrm.distributed.placement import Placement
from dlrm.host_cores import idle_cores
from dlrm.host_memory import host_memory, machine
from dlrm.model.config import FUSED_TYPES, DLRMConfig
from dlrm.model.tables.placement import AUTO
from dlrm.step_clock import DATA, EXCHANGE, LOOKUP, PRODUCTS, STORE, UPDATE
from dlrm.store.config import TableStoreConfig, bytes_of, shown
from dlrm.store.row_store import RowStore, limited_store
from dlrm.tasks.config import StepConfig
from dlrm.tasks.footprint import Memory, agree_that_tables_fit
from dlrm.tasks.planning.costs import stored_row_bytes
from dlrm.tasks.planning.stored import StoredTables, check_storable
from dlrm.tasks.recommendation import Batches, LookedUpAhead, Recommendation
from dlrm.train.checkpoints.checkpoint import Parameters
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.ema import EMA
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import loss_scaler
from dlrm.train.reports.roles import OF_NVIDIA, Roles
from dlrm.train.schedule import ScheduleConfig

_SHORT_STEP = 1e9  # operations: some milliseconds of one core


class SplitBatches(NamedTuple):
    """The batches of a dataset in their roles; the arguments of `Trainer.fit`.

    Attributes:
        train: the rows to train on.
        chooses: the rows that choose the best weights.
        reports: the rows that are evaluated once, at the end; None if there are none.
        roles: names of the latter two.
    """

    train: Batches | LookedUpAhead
    chooses: Batches
    reports: Batches | None
    roles: Roles = OF_NVIDIA


def roles_of(datasets: Datasets) -> Roles:
    """Returns which rows choose and which report.

    Rows that are set aside choose, or else those of `test/`. The others report: those of
    `validation/`, or else of `test/`.
    """
    rows = datasets.rows()
    chooses = "test" if datasets.set_aside is None else "set_aside"
    others = (name for name in ("validation", "test") if name != chooses and rows.get(name))
    return Roles(chooses, next(others, None))


def set_aside_note(datasets: Datasets, keeps_best: bool) -> str | None:
    """Returns a line about rows that are set aside, or None if there are none.

    Args:
        datasets: the splits.
        keeps_best: whether the best weights are kept; otherwise the last ones are the result.
    """
    if datasets.set_aside is None:
        return None
    aside, reports = datasets.set_aside.num_samples, roles_of(datasets).reports
    report = f"{reports} rows report and are never chosen on" if reports else "no rows report"
    use = (
        "choose the best weights and do not train"
        if keeps_best
        else "are tested during the training and do not train (--save_checkpoint_path keeps the "
        "weights that are best on them, otherwise the last weights are the result)"
    )
    return (
        f"set aside: the last {aside:,} of {datasets.train.num_samples + aside:,} training rows "
        f"{use}; {report}"
    )


@dataclass(frozen=True)
class ClickTraining:
    """The configuration of a DLRM's training on a dataset of clicks.

    Attributes:
        data: the rows to read, and how to read them.
        train: length and reports of the training.
        schedule: schedule of the learning rate.
        optimizers: optimizers of the tables and of the rest.
        precision: precision of the network.
        step: computation of the steps and tests.
        tables: location of the rows that are not in memory.

    Raises:
        ValueError: values do not fit together; the message names flag and value.
    """

    data: DataConfig
    train: TrainConfig
    schedule: ScheduleConfig
    optimizers: OptimizerConfig
    precision: PrecisionConfig
    step: StepConfig = StepConfig()
    tables: TableStoreConfig = TableStoreConfig()

    def __post_init__(self) -> None:
        self._check_overlap()
        l2, rate = self.optimizers.embedding_l2, self.schedule.lr
        if self.optimizers.embedding_optimizer == "sgd" and l2 * rate >= 1:
            raise ValueError(
                f"--embedding_l2 {l2}: with sgd at --lr {rate} weights change their signs at every "
                f"step; expected less than {1 / rate:.3g}"
            )

    def _check_overlap(self) -> None:
        if self.step.overlap == "none":
            return
        parts, l2 = self.train.gradient_accumulation_steps, self.optimizers.embedding_l2
        if self.tables.table_store is not None:
            raise ValueError(
                f"--overlap stale contradicts --table_store {self.tables.table_store}: rows that "
                "are looked up ahead may leave the memory before they are updated"
            )
        if parts > 1:
            raise ValueError(
                f"--overlap stale contradicts --gradient_accumulation_steps {parts}: it looks up "
                "whole batches"
            )
        if l2 and self.optimizers.embedding_l2_mode == "all":
            raise ValueError(
                f"--overlap stale contradicts --embedding_l2 {l2} of all rows, which brings rows "
                "up to date before they are looked up; --embedding_l2_mode looked_up does not"
            )

    @property
    def may_have_store(self) -> bool:
        """Returns whether the training allows rows of tables to be in a store."""
        l2_of_all = self.optimizers.embedding_l2 and self.optimizers.embedding_l2_mode == "all"
        return self.step.overlap == "none" and not l2_of_all

    def trainer_arguments(self, task: Recommendation, train: Dataset) -> dict[str, Any]:
        """Returns the arguments of a `Trainer` besides its task, reports and checkpoints.

        Args:
            task: the task to train.
            train: the training rows.
        """
        one_look_up = train.one_id_each and self.train.gradient_accumulation_steps == 1
        return {
            "optimizers": task.optimizers(self.optimizers, one_look_up),
            "schedule": self.schedule.rates(self.train.num_steps(len(train)), len(train)),
            "config": self.train,
            "scaler": loss_scaler(
                self.precision,
                task.world.device,
                self.step.max_grad_norm,
                counted_elsewhere=task.counted_elsewhere(),
            ),
            "recorder": task.recorder,
            "ema": self._ema(task),
            "advice": self._advice(task),
            "after_save": task.forget_ahead,
            "accumulate": task.accumulate,
        }

    def _is_crowded(self, task: Recommendation) -> bool:
        """Returns whether steps are so short, and cores so busy, that one thread is no slower."""
        weights = sum(weight.numel() for weight in task.parameter_groups()["dense"])
        short = 6 * weights * self.data.batch_size < _SHORT_STEP
        if not short or task.world.device != "cpu" or torch.get_num_threads() == 1:
            return False
        idle = idle_cores() if os.getloadavg()[0] > 1 else None  # it takes a fifth of a second
        return idle is not None and idle < torch.get_num_threads() - 0.5

    def _advice(self, task: Recommendation) -> dict[str, str]:
        """Returns a flag to try for each part of a step, if one is left to try."""
        model, cuda = task.model.config, task.world.device.startswith("cuda")
        half = self.precision.dtype(task.world.device) != torch.float32
        narrow = model.embedding_dtype != "fp32"
        random = self.data.dataset_type == "synthetic_gpu" and not cuda
        # Eager steps of a GPU may take as long as their launches do, which no part shows.
        recording = ("--cuda_graphs", cuda and task.recorder is None)
        flags = {
            DATA: [
                ("--dataset_type synthetic_disk", random),
                ("--verify_data first", self.data.verify_data == "always"),
                ("reading from a faster disk or with more cores", True),
            ],
            EXCHANGE: [
                ("--placement auto", model.placement != AUTO),
                ("--amp", not half),
                ("--overlap stale", self.step.overlap == "none"),
                ("a larger --batch_size", True),
            ],
            STORE: [("more --table_memory", True)],
            PRODUCTS: [
                recording,
                ("OMP_NUM_THREADS=1, since other programs use the cores", self._is_crowded(task)),
                ("--amp", not half),
            ],
            LOOKUP: [
                recording,
                ("--embedding_dtype bf16", not narrow and model.embedding_type in FUSED_TYPES),
            ],
            UPDATE: [
                recording,
                ("--embedding_type joint_fused", model.embedding_type not in FUSED_TYPES),
                ("--embedding_dtype bf16", not narrow),
            ],
        }
        return {
            part: next(flag for flag, helps in found if helps)
            for part, found in flags.items()
            if any(helps for _, helps in found)
        }

    def _ema(self, task: Recommendation) -> EMA | None:
        if self.step.ema_decay is None:
            return None
        # An EMA of tables would read and write all of their rows in every step.
        dense = Parameters(task.model, task.table_parameters()).dense()
        return EMA(task.model, self.step.ema_decay, dense)

    def batches(self, datasets: Datasets, task: Recommendation) -> SplitBatches:
        """Returns the batches of datasets for a task; those of training rows are as configured."""
        device, roles = task.world.device, roles_of(datasets)
        trained, tested = (task.slots(trains) for trains in (True, False))
        order = self.data.shuffle_batch_order, self.data.seed
        batches = Batches(datasets.train, device, *order, trained)
        named = datasets.named()
        reports = named[roles.reports] if roles.reports else None
        return SplitBatches(
            LookedUpAhead(batches, task) if self.step.overlap == "stale" else batches,
            Batches(named[roles.chooses], device, slots=tested),
            Batches(reports, device, slots=tested) if reports else None,
            roles,
        )


def agree_on_memory(
    config: DLRMConfig,
    optimizer: str | None,
    world: World,
    fixed: Collection[str] = (),
    placement: Placement | None = None,
    tables: TableStoreConfig | None = None,
) -> None:
    """Checks the memory of all processes; see `dlrm.tasks.footprint.agree_that_tables_fit`.

    For tables in a store, it checks the memory that they may use.
    """
    memory = host_memory()
    if tables is not None and tables.table_memory is not None:
        with agreed(world, ValueError):
            limit = bytes_of(tables.table_memory)
            if memory and limit > memory[0]:
                raise ValueError(
                    f"--table_memory {tables.table_memory}: {shown(memory[0])} of "
                    f"{shown(memory[1])} are free on the host"
                )
        return
    host = Memory("the host", machine(), *memory) if memory else None
    agree_that_tables_fit(config, optimizer, world, host, fixed, placement)


def table_store(
    config: TableStoreConfig,
    architecture: DLRMConfig,
    optimizers: OptimizerConfig | None,
    world: World,
    placement: Placement | None = None,
    checkpoints: str | os.PathLike | None = None,
    read: Datasets | None = None,
) -> RowStore | None:
    """Returns the store for rows that are not in memory, or None if all are.

    Args:
        config: memory limit and location of the store.
        architecture: architecture of the model.
        optimizers: optimizers of the training; None without a training.
        world: the processes.
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
    kind = None
    if optimizers is not None and not optimizers.freeze_embeddings:
        kind = optimizers.embedding_optimizer
    size = stored_row_bytes(architecture, kind)
    rows, own = architecture.embedding_rows, placement.tables_by_rank()[world.rank]
    tables = {table: rows[table] for table in own}
    store = limited_store(config, tables, size, world.rank, world.size, checkpoints)
    if read is not None and read.train.one_id_each:
        stored = StoredTables(tuple(tables.values()), size, str(config.table_memory))
        _check_batches(stored, read, trains=optimizers is not None)
    return store


def _check_batches(stored: StoredTables, read: Datasets, trains: bool) -> None:
    trained = min(read.train.batch_size, read.train.num_samples) if trains else 0
    stored.check_batch("--batch_size", trained)
    for data in (read.test, *((read.validation, read.set_aside) if trains else ())):
        if data is not None:
            tested = min(data.batch_size, data.num_samples)
            stored.check_batch("--test_batch_size", tested, trained)


def fingerprint(data: Dataset) -> dict[str, Any]:
    """Returns values that identify a data set, independent of its location and type."""
    ends = [data.batch(0), data.batch(len(data) - 1)] if len(data) else []
    tensors = [t for batch in ends for t in batch if isinstance(t, torch.Tensor)]
    content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)
    poolings = {} if data.poolings is None else {"poolings": list(data.poolings)}
    return {
        "rows": data.num_samples,
        "table sizes": data.table_sizes,
        **poolings,
        "first and last batch": f"CRC-32 {zlib.crc32(content):08x}",
    }
