"""Opens a DLRM's data and makes its model, on which all ranks agree."""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data import layout
from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.datasets import fitted_directory
from dlrm.data.transform.difference import compare_transforms
from dlrm.distributed import World, agreed, check_same
from dlrm.distributed.placement import Placement
from dlrm.documents import printable
from dlrm.flags import Values
from dlrm.limits import check_disk
from dlrm.model.config import DLRMConfig
from dlrm.ops.library import cuda_kernels_available
from dlrm.serving.loading import load_model
from dlrm.tasks.click import ClickWork
from dlrm.tasks.config import USER_ERRORS
from dlrm.tasks.memory import Footprint, agree_that_tables_fit
from dlrm.tasks.numerical_edges import fit_edges
from dlrm.tasks.recommendation import Recommendation, check_optimizer
from dlrm.tasks.splits import fingerprint, set_aside_note
from dlrm.tasks.start import held_checkpoint
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.cuda_graph import CudaRecorder
from dlrm.train.reports.console import Line

if TYPE_CHECKING:
    from dlrm.tasks.settle import Config


class Assembly:
    """Opens the data and makes the model of a run, on all ranks in step."""

    def __init__(self, config: "Config", world: World) -> None:
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
            asked, count = values["num_numerical_features"], whole.train.num_numerical
            if "num_numerical_features" in values.given and asked != count:
                raise ValueError(f"--num_numerical_features {asked}: the dataset has {count}")
            fitted = fitted_directory(config.data)
            found = [self._compared(fitted)]
            if self.begins and config.checkpoint:
                _check_sizes(config.checkpoint, whole.train, str(values["dataset"]))
            architecture = values.config(
                DLRMConfig,
                table_sizes=tuple(whole.train.table_sizes),
                num_numerical_features=count,
                table_poolings=self._saved_or_current("poolings", whole.train.poolings),
                field_tables=self._saved_or_current("field tables", whole.train.field_tables),
                field_targets=self._saved_or_current("targets", whole.train.targets),
            )
            placement = architecture.placed(world.size)
            if self.trains and not config.optimizers.freeze_embeddings:
                check_optimizer(placement, config.optimizers)
        content = zlib.crc32(repr(placement.shards).encode())
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
            ends = "Steps run eagerly, with the same results"
            found.append(f"note: --cuda_graphs is not used; {unrecorded}. {ends}")
        found.append(set_aside_note(whole, keeps_best=bool(values["save_checkpoint_path"])))
        notes: list[str | Line] = [printable(note) for note in found if note]
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

    def _compared(self, fitted: Path | None) -> str | None:
        """Refuses, on rank 0, a dataset whose ids mean other values; returns a line to print."""
        if self.world.rank > 0 or self.known is None:
            return None
        data, allowed = self.config.data, self.values["allow_other_transform"]
        if self.begins and fitted and not allowed:
            return compare_transforms(self.known.path, fitted, False, "always", None, extended=True)
        return compare_transforms(
            self.known.path, fitted, allowed, data.verify_data, data.allow_links
        )

    def _saved_or_current(self, name: str, current: tuple[Any, ...] | None) -> Any:
        """Returns facts of each field from the checkpoint's training data, or from this dataset."""
        saved = self.known.config["dataset"].get(name) if self.known else None
        return current if saved is None else tuple(saved)

    def _agree_on_memory(self, architecture: DLRMConfig, placement: Placement) -> None:
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
                note = compare_transforms(checkpoint.path, fitted_directory(data), *others)
                work.notes += [printable(note)] if note else []
            work.teacher = load_model(checkpoint.path, self.world.device)
            config = work.teacher.config
            fields = "{} numerical fields and tables of {} rows"
            found = fields.format(config.num_numerical_features, [*config.table_sizes])
            if found != (here := fields.format(train.num_numerical, [*train.table_sizes])):
                raise ValueError(
                    f"--distill {checkpoint}: expected a model of {here}, as {work.data_name} has, "
                    f"got {found}"
                )
            work.dataset["teacher"] = f"manifest {(checkpoint.digest or '')[:12]}"
        weight = values["distill_weight"]
        work.notes.append(f"labels are mixed with the probabilities of {checkpoint} ({weight:g})")


def _check_sizes(checkpoint: Checkpoint, data: ClickDataset, dataset: str) -> None:
    """Raises ValueError if a dataset has fewer ids than the tables of the checkpoint."""
    before = checkpoint.config["dataset"].get("table sizes")
    if before is None or len(before) != len(data.table_sizes):
        return  # loading names the tables
    for name, old, new in zip(data.categorical_names, before, data.table_sizes, strict=True):
        if new < old:
            raise ValueError(
                f"{dataset}: {name}: expected {old} ids or more, as in {checkpoint}, got {new}"
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
