"""A run of a DLRM: its data and model, on which all ranks agree, and its training.

The commands, `dlrm.fit`, seeds and searches open their runs here.
"""

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlrm.data import layout
from dlrm.data.clicks.batch import ClickDataset, Shard
from dlrm.data.clicks.config import DATASET_TYPES, DataConfig
from dlrm.data.clicks.datasets import Datasets, fitted_directory, open_datasets
from dlrm.data.clicks.distilled import Distilled
from dlrm.data.transform.difference import compare_transforms
from dlrm.distributed import World, agreed, check_same
from dlrm.distributed.placement import Placement
from dlrm.documents import printable
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.limits import check_disk
from dlrm.model.config import ARCHITECTURE, DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.ops.library import cuda_kernels_available
from dlrm.remote.cache import with_uris
from dlrm.tasks.advice import advice
from dlrm.tasks.click_splits import SplitBatches, fingerprint, roles_of, set_aside_note
from dlrm.tasks.config import (
    AUTO_PRODUCTS,
    CONSTANT,
    PRODUCTS,
    RESUMABLE,
    REWARM,
    ClickConfig,
)
from dlrm.tasks.continuing import (
    check_continued,
    check_sizes,
    facts_of,
    learning_rate_mode,
)
from dlrm.tasks.footprint import Footprint, agree_that_tables_fit
from dlrm.tasks.numerical_edges import fit_edges
from dlrm.tasks.recommendation import ClickLoader, Recommendation, check_optimizer
from dlrm.tasks.run import (
    CONTINUES,
    USER_ERRORS,
    Run,
    known_checkpoint,
    with_saved_flags,
)
from dlrm.tasks.table_rows import changed_rows
from dlrm.train.checkpoints.checkpoint import Parameters, read_config
from dlrm.train.checkpoints.nvidia import is_nvidia
from dlrm.train.cuda_graph import CudaRecorder
from dlrm.train.ema import EMA
from dlrm.train.precision import loss_scaler
from dlrm.train.schedule import ScheduleConfig
from dlrm.train.trainer import Trainer


@dataclass(kw_only=True)
class ClickRun(Run):
    """A DLRM, its data and its training; see `Run`.

    Attributes:
        whole: the dataset as a single process would read it.
        notes: lines about the dataset, its numerical fields and the source of the architecture.
        can_be_recorded: --cuda_graphs would record the steps.
        teacher: network whose probabilities the labels of training batches are mixed with, or None.
    """

    config: ClickConfig
    whole: Datasets
    notes: list[str]
    task: Recommendation
    can_be_recorded: bool = False
    teacher: DLRM | None = None

    @classmethod
    def open(
        cls,
        values: Values,
        world: World,
        checkpoint: Path | None = None,
        mode: str = "train",
        resumable: Collection[str] = (),
    ) -> "ClickRun":
        """Opens the data and makes the model, on all ranks in step.

        Args:
            values: all settings of `CLICK_CONFIGS`.
            checkpoint: checkpoint of `--load_checkpoint_path` or `--continue_from`, which is in
                use during the run.
            mode: "train", "test" or "inference_benchmark".
            resumable: other settings in `values` that a resumed run may change.
        """
        return _Opening(values, world, checkpoint, mode, resumable).run()

    @property
    def data_name(self) -> str:
        """The dataset, for messages."""
        dataset = self.values["dataset"]
        return with_uris(dataset) if dataset else f"--dataset_type {self.values['dataset_type']}"

    def recorded(self) -> dict[str, Any]:
        own = {"splits": self.whole.rows(), "roles": roles_of(self.whole).facts()}
        return super().recorded() | own

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        kept = super().frozen(run)
        kept["--dataset_type"] = DATASET_TYPES[kept["--dataset_type"]]  # it has other names
        return kept

    def own_part(self) -> Datasets:
        """Returns this rank's part of the dataset.

        Raises:
            ValueError, OSError: a file is damaged.
            OtherRankError: a file of another rank is damaged.
        """
        world, model = self.world, self.task.model
        shard = Shard(world, tuple(model.fields_by_rank[world.rank]))
        with agreed(world, ValueError, OSError):
            datasets = open_datasets(self.config.data, shard)
            if self.trains:  # these are in the fingerprint that a resumed run compares
                for index in (0, len(datasets.train) - 1):
                    datasets.train.batch(index)
        return datasets

    def distill(self, checkpoint: Path, load: Callable[[Path, str], DLRM]) -> None:
        """Mixes the labels of the training batches with the probabilities of a trained model.

        A resumed run needs the same model. All ranks call it in step, and each loads the model.

        Args:
            load: makes the network of a checkpoint on a device.

        Raises:
            ValueError, OSError: the checkpoint is damaged, or of a model with another transform or
                other fields; it is named.
        """
        values, train, data = self.values, self.whole.train, self.config.data
        with agreed(self.world, *USER_ERRORS):
            if self.world.rank == 0:
                others = values["allow_other_transform"], data.verify_data, data.allow_links
                note = compare_transforms(checkpoint, fitted_directory(data), *others)
                self.notes += [printable(note)] if note else []
            self.teacher = load(checkpoint, self.world.device)
            config = self.teacher.config
            found = config.num_numerical_features, [*config.table_sizes]
            if found != (expected := (train.num_numerical, [*train.table_sizes])):
                raise ValueError(
                    f"--distill {checkpoint}: expected a model of {expected[0]} numerical fields "
                    f"and tables of {expected[1]} rows, as {self.data_name} has, got {found[0]} "
                    f"and {found[1]}"
                )
            digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
        self.dataset = {**self.dataset, "teacher": f"manifest {digest[:12]}"}
        weight = values["distill_weight"]
        self.notes.append(f"labels are mixed with the probabilities of {checkpoint} ({weight:g})")

    def batches(self, datasets: Datasets) -> SplitBatches:
        """Returns the batches of datasets in their roles, training rows in the configured order."""
        device, roles = self.world.device, roles_of(datasets)
        order = self.config.data.shuffle_batch_order, self.config.data.seed
        source = None
        if self.teacher is not None:
            taught = self.teacher, self.values["distill_weight"], self.world
            source = Distilled(datasets.train, self.whole.train, *taught)
        batches = ClickLoader(datasets.train, device, *order, source)
        named = datasets.named()
        reports = named[roles.reports] if roles.reports else None
        return SplitBatches(
            batches,
            ClickLoader(named[roles.chooses], device),
            ClickLoader(reports, device) if reports else None,
            roles,
        )

    def trainer_arguments(self, train: ClickDataset) -> dict[str, Any]:
        """Returns the arguments of a `Trainer` besides its reports and checkpoints.

        Raises:
            OSError: the directory of --table_files has too little room for the optimizer's state.
        """
        config, task = self.config, self.task
        one_look_up = train.one_id_each and config.train.gradient_accumulation_steps == 1
        num_steps = config.train.num_steps(len(train))
        schedule = config.schedule
        if self.values["continue_lr"] == CONSTANT:
            schedule = ScheduleConfig(schedule="constant", lr=schedule.lr)
        with agreed(self.world, OSError):
            optimizers = task.optimizers(config.optimizers, one_look_up)
        return {
            "task": task,
            "world": self.world,
            "run": self.recorded(),
            "optimizers": optimizers,
            "schedule": schedule.rates(num_steps, len(train)),
            "schedule_restarts": self.values["continue_lr"] == REWARM,
            "config": config.train,
            "scaler": loss_scaler(config.precision, self.world.device, config.step.max_grad_norm),
            "recorder": task.recorder,
            "ema": self._ema(),
            "advice": advice(config, task, self.can_be_recorded),
            "accumulate": task.accumulate,
        }

    def begin_where_another_ended(self, trainer: Trainer) -> str:
        """Gives a new trainer the state of the run that it continues; returns a line about it.

        Raises:
            ValueError, OSError: the checkpoint is damaged, or of another model; it is named.
        """
        assert self.continued is not None
        assert self.checkpoint is not None
        sizes = self.task.model.config.embedding_rows
        adapted = partial(changed_rows, table_sizes=sizes)
        trainer.continue_run(self.checkpoint, adapted)
        mode, step = self.values["continue_lr"], trainer.progress.step
        line = f"continues from {self.checkpoint} after step {step} (--continue_lr {mode})"
        if is_nvidia(self.checkpoint):
            line += ", with its weights alone: NVIDIA's format has no optimizer state and no step"
        saved = read_config(self.checkpoint)["dataset"]
        before, tables = saved.get("table sizes", sizes), saved.get("field tables")
        if added := sum(sizes) - sum(dict(zip(tables or range(len(before)), before)).values()):  # noqa: B905
            line += f"; {added:,} rows appended"
        return line

    def _ema(self) -> EMA | None:
        if self.config.step.ema_decay is None:
            return None
        # An EMA of tables would read and write all of their rows in every step.
        dense = Parameters(self.task.model, self.task.table_parameters()).dense()
        return EMA(self.task.model, self.config.step.ema_decay, dense)


class _Opening:
    """Opens a run; see `ClickRun.open`."""

    def __init__(
        self,
        values: Values,
        world: World,
        checkpoint: Path | None,
        mode: str,
        resumable: Collection[str],
    ) -> None:
        self.values, self.world, self.checkpoint = values, world, checkpoint
        self.mode, self.trains = mode, mode == "train"
        self.resumable = {*RESUMABLE, *resumable}
        with agreed(world, *USER_ERRORS):
            if not self.trains:  # a test weights rows as the training's tests did
                self.values = with_saved_flags(values, checkpoint, ["sample_weights"])
            self.config = ClickConfig.from_values(self.values, device=world.device)
            check_continued(self.values)
            self.resumed = known_checkpoint(self.values, None)
            self.known = self.resumed or checkpoint
            self.continued = self._continued() if self.trains else None
            # Not if the run only resumes, after it had begun to continue another.
            self.begins = self.continued is not None and self.resumed is None
            if self.begins:
                self._choose_learning_rate()

    def run(self) -> ClickRun:
        whole, world = self._datasets(), self.world
        with agreed(world, *USER_ERRORS):
            self._check_numericals(whole)
            fitted = fitted_directory(self.config.data)
            found = [*self._compared(fitted)]
            if self.begins:
                assert self.known is not None
                check_sizes(self.known, whole.train, str(self.values["dataset"]))
            asked, self.values = (
                self.values,
                with_saved_flags(self.values, self.known, ARCHITECTURE),
            )
            architecture = self.values.config(
                DLRMConfig,
                table_sizes=tuple(whole.train.table_sizes),
                num_numerical_features=whole.train.num_numerical,
                table_poolings=_said(self.known, "poolings", whole.train.poolings),
                field_tables=_said(self.known, "field tables", whole.train.field_tables),
                field_targets=_said(self.known, "targets", whole.train.targets),
            )
        with agreed(world, *USER_ERRORS):
            placement = self._placed(architecture)
        content = zlib.crc32(repr(placement.pieces).encode())
        check_same({"the placement of the tables": f"CRC-32 {content:08x}"}, world)
        self._agree_on_memory(architecture, placement)
        read = whole.train if self.trains else whole.test
        unrecorded = None
        if self.config.step.cuda_graphs:
            unrecorded = _why_not_recorded(self.values, world, read)
        with agreed(world, *USER_ERRORS):
            task = self._task(architecture, unrecorded)
            told_by = fingerprint(read)
            self._choose_products(task)
        transform = fitted / layout.TRANSFORM if fitted else None
        if self.known is None and self.trains:
            found.append(fit_edges(task.model, whole.train, transform, world))
        if unrecorded:
            found.append(
                f"note: --cuda_graphs is not used; {unrecorded}. Steps run eagerly, with the same "
                "results"
            )
        saves = bool(self.values["save_checkpoint_path"])
        notes = [printable(note) for note in found if note]
        notes += [aside] if (aside := set_aside_note(whole, keeps_best=saves)) else []
        changed = [f"{n} {self.values[n]}" for n in ARCHITECTURE if self.values[n] != asked[n]]
        if changed:
            notes.append(f"architecture from {self.known}: {', '.join(changed)}")
        length = {"epochs", "max_steps"} if self.config.schedule.knows_the_run else set()
        return ClickRun(
            values=self.values,
            world=world,
            task=task,
            trains=self.trains,
            checkpoint=self.checkpoint,
            dataset=told_by,
            may_change=frozenset(self.resumable - length),
            transform=transform if transform and transform.is_dir() else None,
            continued=self.continued,
            config=self.config,
            whole=whole,
            notes=notes,
            can_be_recorded=_why_not_recorded(self.values, world, read) is None,
        )

    def _continued(self) -> dict[str, Any] | None:
        """Returns the facts of the checkpoint that the run continues, if it continues one."""
        if self.values["continue_from"] is not None:
            assert self.checkpoint is not None
            return facts_of(self.checkpoint, self.values["save_checkpoint_path"])
        return read_config(self.resumed).get(CONTINUES) if self.resumed else None

    def _choose_learning_rate(self) -> None:
        assert self.continued is not None
        asked, step = self.values["continue_lr"], self.continued["step"]
        mode = learning_rate_mode(asked, self.config.schedule, step)
        self.values = self.values.replaced({"continue_lr": mode})

    def _datasets(self) -> Datasets:
        """Opens the whole dataset on every rank, first on rank 0, which may have to write it."""
        # Each rank compares the part that it reads, in `own_part`.
        config = self.values.config(DataConfig, device=self.world.device, verify_data="never")
        for turn in (self.world.rank == 0, self.world.rank > 0):
            with agreed(self.world, *USER_ERRORS):
                if turn:
                    datasets = open_datasets(config)
        return datasets

    def _check_numericals(self, datasets: Datasets) -> None:
        asked, found = self.values["num_numerical_features"], datasets.train.num_numerical
        if "num_numerical_features" in self.values.given and asked != found:
            raise ValueError(f"--num_numerical_features {asked}: the dataset has {found}")

    def _compared(self, fitted: Path | None) -> Iterator[str | None]:
        """Refuses, on rank 0, a dataset whose ids mean other values; yields lines to print."""
        if self.world.rank > 0:
            return
        if self.known is None:
            return
        allowed = self.values["allow_other_transform"]
        if self.begins and fitted and not allowed:
            yield compare_transforms(self.known, fitted, False, "always", None, extended=True)
            return
        yield compare_transforms(
            self.known, fitted, allowed, self.values["verify_data"], self.values["allow_links"]
        )

    def _placed(self, architecture: DLRMConfig) -> Placement:
        """Returns the placement of the tables."""
        placement = architecture.placed(self.world.size)
        if self.trains and not self.config.optimizers.freeze_embeddings:
            check_optimizer(placement, self.config.optimizers)
        return placement

    def _agree_on_memory(self, architecture: DLRMConfig, placement: Placement) -> None:
        """Checks that the tables fit in memory, or that they can be in files."""
        config, files = self.config, self.config.step.table_files
        samples = config.data.batch_size // config.train.gradient_accumulation_steps
        how = (config.optimizers, samples) if self.trains else ()
        footprint = Footprint(architecture, *how)
        if files is None:
            agree_that_tables_fit(footprint, placement, self.world)
        elif self.world.device != "cpu":
            raise ValueError(
                f"--table_files {files}: expected --base_device cpu, got {self.world.device}"
            )
        else:
            needed = sum(footprint.of(placement.of_rank(self.world.rank)))
            with agreed(self.world, ValueError):
                check_disk(files, needed, f"--table_files {files}: the tables of this process")

    def _task(self, architecture: DLRMConfig, unrecorded: str | None) -> Recommendation:
        config, world, step = self.config, self.world, self.config.step
        recorded = step.cuda_graphs and unrecorded is None
        return Recommendation(
            architecture,
            world,
            dtype=config.precision.dtype(world.device),
            seed=config.data.seed,
            auc_on_cpu=step.auc_device == "CPU",
            optimized_mlp=step.optimized_mlp,
            recorder=CudaRecorder(world.device) if recorded else None,
            has_clicks=config.data.has_clicks,
            files=step.table_files,
        )

    def _choose_products(self, task: Recommendation) -> None:
        """Sets whose products the MLPs use, those of a resumed run first; they are recorded."""
        if self.world.device != "cpu":
            return
        asked, model = self.values["mlp_products"], task.model
        if asked == AUTO_PRODUCTS and self.resumed:
            asked = read_config(self.resumed)["flags"].get("mlp_products")
        if asked not in (AUTO_PRODUCTS, *PRODUCTS):
            raise ValueError(
                f"{self.resumed}: --mlp_products {asked}: expected one of {', '.join(PRODUCTS)}"
            )
        if asked != AUTO_PRODUCTS:
            model.products = asked
        self.values = Values({**self.values, "mlp_products": model.products}, self.values.given)


def _said(checkpoint: Path | None, name: str, here: tuple[Any, ...] | None) -> Any:
    """Returns facts of each field from the checkpoint's training data, or from this dataset."""
    saved = read_config(checkpoint)["dataset"].get(name) if checkpoint else None
    return here if saved is None else tuple(saved)


def _why_not_recorded(values: Values, world: World, data: ClickDataset) -> str | None:
    """Returns the reason why the run cannot use --cuda_graphs, or None if it can."""
    if world.device == "cpu":
        return "it is for GPUs"
    if world.size > 1:
        return "it is for one process"
    if not data.one_id_each:
        return "batches with several ids a table differ in shape"
    if values["embedding_l2"]:
        return "--embedding_l2 counts steps on the host"
    return None if cuda_kernels_available() else "plain torch runs, which waits for the GPU"
