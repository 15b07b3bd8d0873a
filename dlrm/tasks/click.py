"""A DLRM's run: its data and model, on which all ranks agree, and its training."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlrm import ops
from dlrm.data import layout
from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.config import DATASET_TYPES
from dlrm.data.clicks.datasets import Datasets
from dlrm.data.clicks.distilled import Distilled
from dlrm.data.transform.stored import facts_file
from dlrm.data.transform.transform import Transform
from dlrm.distributed import agreed
from dlrm.flags import Values
from dlrm.metrics.table import metrics_note
from dlrm.model.dlrm import DLRM
from dlrm.remote.uri import shown
from dlrm.serving.network.recalibration import load_recalibration
from dlrm.tasks.advice import advice
from dlrm.tasks.config import CONSTANT, REWARM
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.tasks.run import VARIES, Run, Work
from dlrm.tasks.splits import SplitBatches, bad_ids_named, check_scores, roles_of
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import PrecisionConfig
from dlrm.train.ema import EMA
from dlrm.train.log import Loader
from dlrm.train.precision import loss_scaler
from dlrm.train.reports.console import Line
from dlrm.train.schedule import ScheduleConfig, idle_steps_note, short_run_advice
from dlrm.train.trainer import Trainer

if TYPE_CHECKING:
    from dlrm.tasks.settle import Config


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

    config: "Config"
    whole: Datasets
    notes: list[str | Line]
    task: Recommendation
    can_be_recorded: bool = False
    teacher: DLRM | None = None

    @property
    def data_name(self) -> str:
        """The dataset, for messages."""
        dataset = self.values["dataset"]
        return shown(dataset) if dataset else f"--dataset_type {self.values['dataset_type']}"

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
        values = self.values
        if "output_dir" in values.given:
            yield "note: --output_dir is not used; checkpoints go to --save_checkpoint_path"
        if not self.task.has_clicks:
            yield "note: the targets are fractions and no clicks, so tests report the loss, no AUC"
        is_half = self.config.precision.dtype(self.world.device) == torch.float16
        if values["loss_scale"] != PrecisionConfig.loss_scale and not is_half:
            yield "note: --loss_scale is not used; it is for fp16 only"
        yield from self.notes
        if self.has_weights("train" if self.trains else "test"):
            yield (
                "note: the dataset's sample weights weight the loss and the metrics of tests"
                if values["sample_weights"]
                else "note: --nosample_weights: all rows count once, though the dataset has weights"
            )
        folder = Path(values["dataset"] or "", layout.TRANSFORM)
        has_facts = bool(values["dataset"]) and facts_file(folder).is_file()
        if has_facts and (kept := Transform.load(folder).keep_negatives) < 1:
            yield (
                f"note: training rows are {kept:g} of those with label 0, so probabilities and "
                "calibration below are too high; `dlrm evaluate --sampling_rate "
                f"{kept:g}` corrects them"
            )
        varies = self.trains and self.task.updates_vary(self.config.optimizers)
        if varies and not values["deterministic"]:
            yield VARIES
        if self.checkpoint and (found := load_recalibration(self.checkpoint.path)):
            made = f"the recalibration ({found.kind}) of {self.checkpoint}"
            if self.continued:
                yield f"note: {made} is carried over to checkpoints; tests here are without it"
            elif self.trains:
                yield f"note: {made} is not carried over: it fits the scores of those weights"
            else:
                yield (f"note: scores are without {made}; dlrm evaluate and dlrm predict apply it")
        yield self._description()

    def has_weights(self, split: str) -> bool:
        """Returns whether the rows of a split have weights."""
        dataset = self.values["dataset"]
        return bool(dataset) and Path(dataset, split, layout.WEIGHT_FILE).is_file()

    def _description(self) -> Line:
        """Returns the line about device, parameters and rows."""
        datasets, world, model = self.whole, self.world, self.task.model
        config = model.config
        sizes, dense = config.embedding_rows, self.task.parameter_groups()["dense"]
        width = config.embedding_dim + config.wide
        weights = sum(p.numel() for p in dense) + sum(sizes) * width
        splits = {"train": 0, "test": 0, "validation": 0, **datasets.rows()}  # in this order
        device = shortly = world.device
        if device == "cpu":
            threads = torch.get_num_threads()
            native = ops.instruction_set() if ops.native_available() else "plain torch"
            shortly += f" ({_counted(str(threads), 'thread')})"
            device += f" ({threads} threads, operators: {native})"
        if world.size > 1:
            counts = ", ".join(str(len(own)) for own in model.placement.tables_by_rank())
            device += f"  processes: {world.size}, with {counts} tables"
            shortly += f", {world.size} processes"
        steps = len(datasets.train)
        total = self.config.train.num_steps(steps)
        epochs = f" ({_counted(f'{total / steps:.3g}', 'epoch')})" if total >= steps else ""
        of_mode = {
            "train": f"train: {splits['train']:,} rows, {total:,} steps of "
            f"{self.values['batch_size']:,} rows{epochs}",
            "test": f"test: {splits['test']:,} rows",
        }
        rows = of_mode.get(self.config.mode)
        return Line(
            f"device: {device}  parameters: {weights:,} ({len(sizes)} tables, {sum(sizes):,} rows)"
            f"  rows: {', '.join(f'{split} {count:,}' for split, count in splits.items())}",
            rows and f"{rows}, {weights:,} parameters, {shortly}",
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
        train = ClickLoader(datasets.train, device, *order, source)
        reports = ClickLoader(named[roles.reports], device) if roles.reports else None
        return SplitBatches(train, ClickLoader(named[roles.chooses], device), reports, roles)

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
        ema, decay = None, config.step.ema_decay
        if decay is not None:
            # An EMA of tables would read and write all of their rows in every step.
            ema = EMA(task.model, decay, Parameters(task.model, task.table_parameters()).dense())
        with agreed(self.world, OSError):
            optimizers = task.optimizers(config.optimizers, one_look_up)
        return {
            "optimizers": optimizers,
            "schedule": schedule.rates(config.train.num_steps(len(train)), len(train)),
            "schedule_restarts": continue_lr == REWARM,
            "config": config.train,
            "scaler": loss_scaler(config.precision, self.world.device, config.step.max_grad_norm),
            "ema": ema,
            "advice": advice(config, task, self.can_be_recorded),
        }

    def begin(self, run: Run, trainer: Trainer, train: Loader) -> None:
        """Loads the weights that a run begins with, and reports a schedule that does not fit."""
        values, line, schedule = self.values, run.log.line, self.config.schedule
        if self.continued:
            line(self._continue(trainer))
            return
        if self.checkpoint:
            with_state = values["load_optimizer_state"]
            self.checkpoint.load(trainer.parameters, self.world, optimizers=with_state)
            loaded = "weights and optimizer state" if with_state else "weights"
            line(f"{loaded} from {self.checkpoint}; the run starts at step 0")
        by_default = not {"lr", "embedding_optimizer", "mlp_optimizer"} & values.given
        num_steps = self.config.train.num_steps(len(train))
        recipe = values.get("recipe") is None and has_recipe(values)
        advised = short_run_advice(schedule, num_steps, by_default, recipe)
        for note in filter(None, (advised, idle_steps_note(schedule, num_steps))):
            line(f"note: {note}")

    def _continue(self, trainer: Trainer) -> str:
        """Gives a new trainer the state of the run that it continues; returns a line about it.

        Raises:
            ValueError, OSError: the checkpoint is damaged, or of another model; it is named.
        """
        assert self.checkpoint is not None
        sizes = self.task.model.config.embedding_rows
        trainer.continue_run(self.checkpoint, sizes)
        mode, step = self.values["continue_lr"], trainer.progress.step
        line = f"continues from {self.checkpoint} after step {step} (--continue_lr {mode})"
        if self.checkpoint.format == "nvidia":
            line += ", with its weights alone: NVIDIA's format has no optimizer state and no step"
        saved = self.checkpoint.config["dataset"]
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
