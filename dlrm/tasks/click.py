"""A DLRM's run: its data and model, on which all ranks agree, and its training."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from dlrm import ops
from dlrm.data import layout
from dlrm.data.clicks.batch import ClickDataset, Shard
from dlrm.data.clicks.config import DATASET_TYPES, DataConfig
from dlrm.data.clicks.datasets import Datasets, Source, fitted_directory
from dlrm.data.clicks.distilled import Distilled
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.distributed import World, agreed, check_same
from dlrm.distributed.placement import Placement
from dlrm.documents import printable
from dlrm.flags import Values
from dlrm.limits import check_disk
from dlrm.metrics.table import metrics_note
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.ops.library import cuda_kernels_available
from dlrm.remote.cache import with_uris
from dlrm.serving.loading import load_model
from dlrm.serving.network.recalibration import load_recalibration
from dlrm.tasks.advice import advice
from dlrm.tasks.bad_rows import bad_ids_named, check_scores
from dlrm.tasks.click_splits import SplitBatches, fingerprint, roles_of, set_aside_note
from dlrm.tasks.config import CONSTANT, REWARM, USER_ERRORS, StepConfig, check_distilled
from dlrm.tasks.footprint import Footprint, agree_that_tables_fit
from dlrm.tasks.numerical_edges import fit_edges
from dlrm.tasks.recommendation import ClickLoader, Recommendation, check_optimizer
from dlrm.tasks.run import VARIES, Run, Work, manifest_digest
from dlrm.tasks.start import held_checkpoint
from dlrm.tasks.table_rows import changed_rows
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, read_config
from dlrm.train.checkpoints.nvidia import is_nvidia
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.cuda_graph import CudaRecorder
from dlrm.train.ema import EMA
from dlrm.train.log import Loader
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import loss_scaler
from dlrm.train.reports.console import Line
from dlrm.train.schedule import (
    ScheduleConfig,
    check_schedule,
    idle_steps_note,
    short_run_advice,
)
from dlrm.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a click-through model's run; `dlrm.tasks.settle.settle` makes it.

    Attributes:
        data: the rows to read, and how to read them.
        train: length and reports of the training.
        schedule: schedule of the learning rate.
        optimizers: optimizers of the tables and of the rest.
        precision: precision of the network.
        step: computation of the steps and tests.
        values: all settings by name, as they are recorded, those of the architecture too.
        mode: "train", "test" or "inference_benchmark".
        source: the dataset, which is open.
        checkpoint: checkpoint whose weights are loaded, or which is continued, or None.
        resumed: last checkpoint of a run that is resumed, or None.
        continued: facts of the checkpoint that the run continues, or None.
        may_change: settings that a resumed run may change.
        notes: lines about settings that follow from others.
    """

    data: DataConfig
    train: TrainConfig
    schedule: ScheduleConfig
    optimizers: OptimizerConfig
    precision: PrecisionConfig
    step: StepConfig = StepConfig()
    values: Values = field(default_factory=lambda: Values({}, frozenset()))
    mode: str = "train"
    source: Source | None = None
    checkpoint: Path | None = None
    resumed: Path | None = None
    continued: dict[str, Any] | None = None
    may_change: frozenset[str] = frozenset()
    notes: tuple[Line, ...] = ()

    def __post_init__(self) -> None:
        l2, rate = self.optimizers.embedding_l2, self.schedule.lr
        if self.optimizers.embedding_optimizer == "sgd" and l2 * rate >= 1:
            raise ValueError(
                f"--embedding_l2 {l2}: with sgd at --lr {rate} weights change their signs at every "
                f"step; expected less than {1 / rate:.3g}"
            )

    @classmethod
    def from_values(cls, values: Values, **data: Any) -> "Config":
        """Returns the configuration of some settings.

        Args:
            values: all settings of `CLICK_CONFIGS`.
            data: other values of `DataConfig`.
        """
        check_schedule(values["schedule"], values.given)
        check_distilled(values)
        return cls(
            data=values.config(DataConfig, **data),
            train=values.config(TrainConfig),
            schedule=values.config(ScheduleConfig),
            optimizers=values.config(OptimizerConfig),
            precision=values.config(PrecisionConfig),
            step=values.config(StepConfig),
            values=values,
        )

    def assemble(self, world: World) -> "ClickWork":
        """Opens the data and makes the model, on all ranks in step; see `dlrm.tasks.run.Run`."""
        return _Assembly(self, world).work()


@dataclass(kw_only=True)
class ClickWork(Work):
    """A DLRM with its data; see `Work`.

    Attributes:
        config: the settled settings.
        whole: the dataset as a single process would read it.
        notes: lines about the dataset, its numerical fields and settings that follow from others.
        can_be_recorded: --cuda_graphs would record the steps.
        teacher: network whose probabilities the labels of training batches are mixed with, or None.
    """

    config: Config
    whole: Datasets
    notes: list[str | Line]
    task: Recommendation
    can_be_recorded: bool = False
    teacher: DLRM | None = None

    @property
    def data_name(self) -> str:
        """The dataset, for messages."""
        dataset = self.values["dataset"]
        return with_uris(dataset) if dataset else f"--dataset_type {self.values['dataset_type']}"

    @cached_property
    def own(self) -> Datasets:
        """This rank's part of the dataset, of which the first and the last batch were read.

        Raises:
            ValueError, OSError: a file is damaged.
            OtherRankError: a file of another rank is damaged.
        """
        shard = Shard(self.world, tuple(self.task.model.fields_by_rank[self.world.rank]))
        assert self.config.source is not None
        with agreed(self.world, ValueError, OSError):
            datasets = self.config.source.splits(self.config.data, shard)
            if self.trains:  # these are in the fingerprint that a resumed run compares
                for index in (0, len(datasets.train) - 1):
                    datasets.train.batch(index)
        return datasets

    def recorded(self) -> dict[str, Any]:
        own = {"splits": self.whole.rows(), "roles": roles_of(self.whole).facts()}
        return super().recorded() | own

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        kept = super().frozen(run)
        kept["--dataset_type"] = DATASET_TYPES[kept["--dataset_type"]]  # it has other names
        return kept

    def rows_named(self) -> AbstractContextManager:
        return bad_ids_named(self.whole, self.data_name)

    def lines(self) -> Iterator[str | Line]:
        yield from self.config.notes
        values, device = self.values, self.world.device
        if "output_dir" in values.given:
            yield "note: --output_dir is not used; checkpoints go to --save_checkpoint_path"
        if not self.task.has_clicks:
            yield "note: the targets are fractions and no clicks, so tests report the loss, no AUC"
        is_half = self.config.precision.dtype(device) == torch.float16
        if "loss_scale" in values.given and not is_half:
            yield "note: --loss_scale is not used; it is for fp16 only"
        yield from self.notes
        if self.has_weights("train" if self.trains else "test"):
            yield (
                "note: the dataset's sample weights weight the loss and the metrics of tests"
                if values["sample_weights"]
                else "note: --nosample_weights: all rows count once, though the dataset has weights"
            )
        if (kept := self._kept_negatives()) < 1:
            yield (
                f"note: training rows are {kept:g} of those with label 0, so probabilities and "
                "calibration below are too high; `dlrm evaluate --sampling_rate "
                f"{kept:g}` corrects them"
            )
        varies = self.trains and self.task.updates_vary(self.config.optimizers)
        if varies and not values["deterministic"]:
            yield VARIES
        if self.checkpoint and (made := load_recalibration(self.checkpoint)):
            yield self._of_recalibration(made.kind)
        yield self._description()

    def has_weights(self, split: str) -> bool:
        """Returns whether the rows of a split have weights."""
        dataset = self.values["dataset"]
        return bool(dataset) and Path(dataset, split, layout.WEIGHT_FILE).is_file()

    def _kept_negatives(self) -> float:
        """Returns the share of training rows with label 0 that preprocessing kept."""
        folder = Path(self.values["dataset"] or "", layout.TRANSFORM)
        if not self.values["dataset"] or not facts_file(folder).is_file():
            return 1.0
        return Transform.load(folder).keep_negatives

    def _of_recalibration(self, kind: str) -> str:
        named = f"({kind}) of {self.checkpoint}"
        if self.continued:
            return (
                f"note: the recalibration {named} is carried over to this run's "
                "checkpoints; tests of the training are without it"
            )
        if not self.trains:
            return (
                f"note: scores are without the recalibration {named}; "
                "dlrm evaluate and dlrm predict apply it"
            )
        return (
            f"note: the recalibration {named} is not carried over: it "
            "fits the scores of those weights; dlrm evaluate --recalibrated_checkpoint makes "
            "one for the trained model"
        )

    def _description(self) -> Line:
        """Returns the line about device, parameters and rows."""
        task, datasets, world = self.task, self.whole, self.world
        config, held = task.model.config, {id(weight) for weight, _ in task.table_parameters()}
        sizes = config.embedding_rows
        rows = sum(sizes)
        dense = sum(p.numel() for p in task.model.parameters() if id(p) not in held)
        weights = dense + rows * (config.embedding_dim + config.wide)
        splits = {"train": 0, "test": 0, "validation": 0, **datasets.rows()}  # in this order
        shown = ", ".join(f"{split} {count:,}" for split, count in splits.items())
        device = shortly = world.device
        if device == "cpu":
            threads, native = torch.get_num_threads(), "plain torch"
            if ops.native_available():
                native = ops.instruction_set()
            shortly += f" ({_counted(str(threads), 'thread')})"
            device += f" ({threads} threads, operators: {native})"
        if world.size > 1:
            counts = ", ".join(str(len(own)) for own in task.model.placement.tables_by_rank())
            device += f"  processes: {world.size}, with {counts} tables"
            shortly += f", {world.size} processes"
        train, steps = datasets.train, len(datasets.train)
        total = self.config.train.num_steps(steps)
        epochs = f" ({_counted(f'{total / steps:.3g}', 'epoch')})" if total >= steps else ""
        model = f"{weights:,} parameters, {shortly}"
        of_mode = {
            "train": f"train: {train.num_samples:,} rows, {total:,} steps of "
            f"{self.values['batch_size']:,} rows{epochs}, {model}",
            "test": f"test: {splits['test']:,} rows, {model}",
        }
        return Line(
            f"device: {device}  parameters: {weights:,} ({len(sizes)} tables, "
            f"{rows:,} rows)  rows: {shown}",
            of_mode.get(self.config.mode),
        )

    def loaders(self) -> SplitBatches:
        """Returns the batches in their roles, training rows in the configured order."""
        device, datasets, roles = self.world.device, self.own, roles_of(self.own)
        order = self.config.data.shuffle_batch_order, self.config.data.seed
        source = None
        if self.teacher is not None:
            taught = self.teacher, self.values["distill_weight"], self.world
            source = Distilled(datasets.train, self.whole.train, *taught)
        named = datasets.named()
        return SplitBatches(
            ClickLoader(datasets.train, device, *order, source),
            ClickLoader(named[roles.chooses], device),
            ClickLoader(named[roles.reports], device) if roles.reports else None,
            roles,
        )

    def trainer_arguments(self, train: Loader) -> dict[str, Any]:
        """Returns the arguments of a `Trainer` besides its reports and checkpoints.

        Raises:
            OSError: the directory of --table_files has too little room for the optimizer's state.
        """
        config, task, continue_lr = self.config, self.task, self.values["continue_lr"]
        one_look_up = self.own.train.one_id_each and config.train.gradient_accumulation_steps == 1
        schedule = config.schedule
        if continue_lr == CONSTANT:
            schedule = ScheduleConfig(schedule="constant", lr=schedule.lr)
        with agreed(self.world, OSError):
            optimizers = task.optimizers(config.optimizers, one_look_up)
        return {
            "optimizers": optimizers,
            "schedule": schedule.rates(config.train.num_steps(len(train)), len(train)),
            "schedule_restarts": continue_lr == REWARM,
            "config": config.train,
            "scaler": loss_scaler(config.precision, self.world.device, config.step.max_grad_norm),
            "recorder": task.recorder,
            "ema": self._ema(),
            "advice": advice(config, task, self.can_be_recorded),
            "accumulate": task.accumulate,
        }

    def _ema(self) -> EMA | None:
        if self.config.step.ema_decay is None:
            return None
        # An EMA of tables would read and write all of their rows in every step.
        dense = Parameters(self.task.model, self.task.table_parameters()).dense()
        return EMA(self.task.model, self.config.step.ema_decay, dense)

    def begin(self, run: Run, trainer: Trainer, train: Loader) -> None:
        """Loads the weights that a run begins with, and reports a schedule that does not fit."""
        values, line, schedule = self.values, run.log.line, self.config.schedule
        if self.continued:
            line(self._continue(trainer))
            return
        if self.checkpoint:
            with_state = values["load_optimizer_state"]
            load_checkpoint(
                self.checkpoint, trainer.parameters, world=self.world, optimizers=with_state
            )
            loaded = "weights and optimizer state" if with_state else "weights"
            line(f"{loaded} from {self.checkpoint}; the run starts at step 0")
        by_default = not {"lr", "embedding_optimizer", "mlp_optimizer"} & values.given
        num_steps = self.config.train.num_steps(len(train))
        recipe = values.get("recipe") is None and has_recipe(values)
        if advised := short_run_advice(schedule, num_steps, by_default, recipe):
            line(f"note: {advised}")
        if idle := idle_steps_note(schedule, num_steps):
            line(f"note: {idle}")

    def _continue(self, trainer: Trainer) -> str:
        """Gives a new trainer the state of the run that it continues; returns a line about it.

        Raises:
            ValueError, OSError: the checkpoint is damaged, or of another model; it is named.
        """
        assert self.checkpoint is not None
        sizes = self.task.model.config.embedding_rows
        trainer.continue_run(self.checkpoint, partial(changed_rows, table_sizes=sizes))
        mode, step = self.values["continue_lr"], trainer.progress.step
        line = f"continues from {self.checkpoint} after step {step} (--continue_lr {mode})"
        if is_nvidia(self.checkpoint):
            line += ", with its weights alone: NVIDIA's format has no optimizer state and no step"
        saved = read_config(self.checkpoint)["dataset"]
        before, tables = saved.get("table sizes", sizes), saved.get("field tables")
        if added := sum(sizes) - sum(dict(zip(tables or range(len(before)), before)).values()):  # noqa: B905
            line += f"; {added:,} rows appended"
        return line

    def finish(
        self, run: Run, trainer: Trainer, loaders: Sequence[Any], summary: dict[str, Any]
    ) -> dict[str, Any]:
        roles = trainer.roles
        # The trainer checks the scores of other tests.
        check_scores(self.task, self.whole, self.data_name, roles.reports or roles.chooses)
        if note := metrics_note(summary):
            run.log.line(note, short="")
        if self.values.get("recipe") is not None or self.values["set_aside"]:
            summary |= roles.facts()  # which NVIDIA's summary does not have
        return summary


def has_recipe(values: Values) -> bool:
    """Returns whether a recipe could choose settings: a training reads rows of a dataset."""
    return bool(values["dataset"]) and not values["dataset_type"].startswith("synthetic")


def _counted(count: str, name: str) -> str:
    return f"{count} {name}{'' if count == '1' else 's'}"


class _Assembly:
    """Makes the work of a run; see `Config.assemble`."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world, self.values = config, world, config.values
        self.trains, self.known = config.mode == "train", config.resumed or config.checkpoint
        # Not if the run only resumes, after it had begun to continue another.
        self.begins = config.continued is not None and config.resumed is None

    def work(self) -> ClickWork:
        config, world, values = self.config, self.world, self.values
        assert config.source is not None
        with agreed(world, *USER_ERRORS):
            # Each rank compares the part that it reads, in `ClickWork.own`.
            whole = config.source.splits(config.data, verified=False)
            self._check_numericals(whole)
            fitted = fitted_directory(config.data)
            found = [*self._compared(fitted)]
            if self.begins:
                assert config.checkpoint is not None
                _check_sizes(config.checkpoint, whole.train, str(values["dataset"]))
            architecture = values.config(
                DLRMConfig,
                table_sizes=tuple(whole.train.table_sizes),
                num_numerical_features=whole.train.num_numerical,
                table_poolings=self._saved_or_current("poolings", whole.train.poolings),
                field_tables=self._saved_or_current("field tables", whole.train.field_tables),
                field_targets=self._saved_or_current("targets", whole.train.targets),
            )
            placement = self._placed(architecture)
        content = zlib.crc32(repr(placement.pieces).encode())
        check_same({"the placement of the tables": f"CRC-32 {content:08x}"}, world)
        self._agree_on_memory(architecture, placement)
        read = whole.train if self.trains else whole.test
        unrecorded = _why_not_recorded(values, world, read)
        with agreed(world, *USER_ERRORS):
            task = self._task(architecture, unrecorded is None)
            told_by = fingerprint(read)
        transform = fitted / layout.TRANSFORM if fitted else None
        if self.known is None and self.trains:
            found.append(fit_edges(task.model, whole.train, transform, world))
        if config.step.cuda_graphs and unrecorded:
            found.append(
                f"note: --cuda_graphs is not used; {unrecorded}. Steps run eagerly, with the same "
                "results"
            )
        notes: list[str | Line] = [printable(note) for note in found if note]
        saves = bool(values["save_checkpoint_path"])
        notes += [aside] if (aside := set_aside_note(whole, keeps_best=saves)) else []
        work = ClickWork(
            values=values,
            world=world,
            task=task,
            trains=self.trains,
            checkpoint=config.checkpoint,
            dataset=told_by,
            may_change=config.may_change,
            transform=transform if transform and transform.is_dir() else None,
            continued=config.continued,
            config=config,
            whole=whole,
            notes=notes,
            can_be_recorded=unrecorded is None,
        )
        self._distill(work)
        return work

    def _check_numericals(self, datasets: Datasets) -> None:
        asked, found = self.values["num_numerical_features"], datasets.train.num_numerical
        if "num_numerical_features" in self.values.given and asked != found:
            raise ValueError(f"--num_numerical_features {asked}: the dataset has {found}")

    def _compared(self, fitted: Path | None) -> Iterator[str | None]:
        """Refuses, on rank 0, a dataset whose ids mean other values; yields lines to print."""
        if self.world.rank > 0 or self.known is None:
            return
        allowed = self.values["allow_other_transform"]
        if self.begins and fitted and not allowed:
            yield compare_transforms(self.known, fitted, False, "always", None, extended=True)
            return
        yield compare_transforms(
            self.known, fitted, allowed, self.values["verify_data"], self.values["allow_links"]
        )

    def _saved_or_current(self, name: str, current: tuple[Any, ...] | None) -> Any:
        """Returns facts of each field from the checkpoint's training data, or from this dataset."""
        saved = read_config(self.known)["dataset"].get(name) if self.known else None
        return current if saved is None else tuple(saved)

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

    def _task(self, architecture: DLRMConfig, can_be_recorded: bool) -> Recommendation:
        config, world, step = self.config, self.world, self.config.step
        recorded = step.cuda_graphs and can_be_recorded
        task = Recommendation(
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
        if world.device == "cpu":
            task.model.products = self.values["mlp_products"]
        return task

    def _distill(self, work: ClickWork) -> None:
        """Mixes the labels of the training batches with the probabilities of a trained model.

        A resumed run needs the same model. Each rank loads it.

        Raises:
            ValueError, OSError: the checkpoint is damaged, or of a model with another transform or
                other fields; it is named.
        """
        values, train, data = self.values, work.whole.train, self.config.data
        if values["distill"] is None:
            return
        with (
            held_checkpoint(values["distill"], self.world) as checkpoint,
            agreed(self.world, *USER_ERRORS),
        ):
            assert checkpoint is not None
            if self.world.rank == 0:
                others = values["allow_other_transform"], data.verify_data, data.allow_links
                note = compare_transforms(checkpoint, fitted_directory(data), *others)
                work.notes += [printable(note)] if note else []
            work.teacher = load_model(checkpoint, self.world.device)
            config = work.teacher.config
            found = config.num_numerical_features, [*config.table_sizes]
            if found != (expected := (train.num_numerical, [*train.table_sizes])):
                raise ValueError(
                    f"--distill {checkpoint}: expected a model of {expected[0]} numerical fields "
                    f"and tables of {expected[1]} rows, as {work.data_name} has, got {found[0]} "
                    f"and {found[1]}"
                )
            work.dataset["teacher"] = f"manifest {(manifest_digest(checkpoint) or '')[:12]}"
        weight = values["distill_weight"]
        work.notes.append(f"labels are mixed with the probabilities of {checkpoint} ({weight:g})")


def _check_sizes(checkpoint: Path, data: ClickDataset, name: str) -> None:
    """Raises ValueError if a dataset has fewer ids than the tables of the checkpoint."""
    before = read_config(checkpoint)["dataset"].get("table sizes")
    if before is None or len(before) != len(data.table_sizes):
        return  # loading names the tables
    for field, old, new in zip(data.categorical_names, before, data.table_sizes, strict=True):
        if new < old:
            raise ValueError(
                f"{name}: {field}: expected {old} ids or more, as in {checkpoint}, got {new}: the "
                "ids of a continued dataset are those of the one before, with new ones after "
                "them"
            )


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
