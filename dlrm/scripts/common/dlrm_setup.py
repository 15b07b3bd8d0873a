"""The data and the model of a DLRM's run, on which all ranks agree."""

import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlrm.data.clicks import layout
from dlrm.data.clicks.batch import Dataset, Shard
from dlrm.data.clicks.config import DATASET_TYPES, DataConfig
from dlrm.data.clicks.datasets import Datasets, fitted_directory, open_datasets
from dlrm.data.transform.difference import compare_transforms
from dlrm.distributed import World, agreed, check_same
from dlrm.distributed.placement import Placement
from dlrm.documents import printable
from dlrm.flags import Values
from dlrm.model.config import ARCHITECTURE, FUSED_TYPES, DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.tables.placement import AUTO
from dlrm.ops.library import cuda_kernels_available
from dlrm.ops.products import AUTO as AUTO_PRODUCTS
from dlrm.ops.products import TORCH
from dlrm.scripts.common import run, session
from dlrm.scripts.common.dlrm_flags import RESUME_MAY_CHANGE, optimizer_config
from dlrm.scripts.common.run import Setup
from dlrm.store.config import TableStoreConfig
from dlrm.tasks.click_training import (
    ClickTraining,
    agree_on_memory,
    fingerprint,
    roles_of,
    table_store,
)
from dlrm.tasks.config import StepConfig
from dlrm.tasks.numerical_edges import fit_edges
from dlrm.tasks.planning.costs import Workload
from dlrm.tasks.planning.machines import machine_of
from dlrm.tasks.planning.planner import Limits, mean_ids, plan
from dlrm.tasks.recommendation import Recommendation, check_optimizer
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.cuda_graph import CudaRecorder, why_none_records
from dlrm.train.execution import why_not_lazy
from dlrm.train.schedule import ScheduleConfig, check_schedule


@dataclass(kw_only=True)
class DLRMSetup(Setup):
    """See `Setup`.

    Attributes:
        whole: the dataset as a single process would read it.
        adopted: source of weights and architecture, and the latter's flags.
        note: remarks about the dataset's transform and its numerical fields.
        unrecorded: why `--cuda_graphs` is not used, if it is not.
    """

    whole: Datasets
    adopted: str | None
    note: str | None
    unrecorded: str | None

    @property
    def data_name(self) -> str:
        """The dataset, for messages."""
        return self.values["dataset"] or f"--dataset_type {self.values['dataset_type']}"

    def recorded(self) -> dict[str, Any]:
        own = {"splits": self.whole.rows(), "roles": roles_of(self.whole).facts()}
        return super().recorded() | own

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        kept = super().frozen(run)
        kept["--dataset_type"] = DATASET_TYPES[kept["--dataset_type"]]  # it has other names
        return kept


def check(values: Values, world: World) -> None:
    """Raises ValueError for flags that are impossible or contradict each other."""
    values.config(PrecisionConfig)
    _check_mode(values, world)
    training(values)


def training(values: Values) -> ClickTraining:
    """Returns the configurations of a training.

    Raises:
        ValueError: flags are impossible; the message names them.
    """
    check_schedule(values["schedule"], values.given)
    return ClickTraining(
        schedule=values.config(ScheduleConfig),
        train=values.config(TrainConfig),
        data=values.config(DataConfig),
        optimizers=optimizer_config(values),
        precision=values.config(PrecisionConfig),
        tables=values.config(TableStoreConfig),
        step=values.config(StepConfig),
    )


def _check_mode(values: Values, world: World) -> None:
    mode = values["mode"]
    if values["auc_threshold"] is not None and not values.config(DataConfig).has_clicks:
        raise ValueError(
            f"--auc_threshold {values['auc_threshold']}: the targets of --dataset_type "
            f"{values['dataset_type']} are fractions, of which there is no AUC"
        )
    if values["precision"] == "16.16":
        raise ValueError(
            "--precision 16.16: a DLRM keeps float32 weights; 16.32 computes in half precision, "
            "and --embedding_dtype bf16 narrows the tables"
        )
    store = values["table_store"]
    if store is not None and mode == "inference_benchmark":
        raise ValueError(f"--table_store {store} contradicts --mode {mode}: rows would be on disk")
    if store is not None and mode == "test" and not values["load_checkpoint_path"]:
        raise ValueError(f"--table_store {store} --mode {mode} needs --load_checkpoint_path")
    if mode == "inference_benchmark" and world.size > 1:
        raise ValueError(f"--mode inference_benchmark: expected one process, got {world.size}")
    if mode != "train" and values["resume"]:
        raise ValueError(f"--resume contradicts --mode {mode}: only training goes on")
    if values["resume"] and not values["save_checkpoint_path"]:
        raise ValueError("--resume needs --save_checkpoint_path, where the checkpoints are")
    if values["checkpoint_freq"] and not values["save_checkpoint_path"]:
        freq = values["checkpoint_freq"]
        raise ValueError(f"--checkpoint_freq {freq} needs --save_checkpoint_path")
    if values["load_optimizer_state"] and (mode != "train" or not values["load_checkpoint_path"]):
        raise ValueError(
            "--load_optimizer_state: expected --mode train and --load_checkpoint_path, whose state "
            "is loaded"
        )
    if values["early_stop"] and not values["save_checkpoint_path"]:
        raise ValueError(
            f"--early_stop {values['early_stop']} needs --save_checkpoint_path, which the best "
            "weights are restored from"
        )


def set_up(values: Values, world: World, at_the_end: ExitStack) -> DLRMSetup:
    """Opens the data and makes the model; see `dlrm.scripts.common.run.run`.

    Raises:
        ValueError, OSError: the user's error; the message names it.
        OtherRankError: another rank raises one of these.
    """
    torch.manual_seed(values["seed"] + world.rank)  # of dropout, which differs between ranks
    checkpoint = at_the_end.enter_context(
        session.held_checkpoint(values["load_checkpoint_path"], world)
    )
    if values["mode"] != "train":  # a test weights rows as the training's tests did
        with agreed(world, *session.USER_ERRORS):
            values = run.with_saved_flags(values, checkpoint, ["sample_weights"])
    whole = _open_datasets(values, world)
    with agreed(world, *session.USER_ERRORS):
        _check_numericals(values, whole)
        resumed = run.known_checkpoint(values, None)
        known = resumed or checkpoint
        fitted = fitted_directory(values.config(DataConfig))
        note = _compare_transforms(values, known, fitted, world)
        asked, values = values, run.with_saved_flags(values, known, ARCHITECTURE)
        architecture = values.config(
            DLRMConfig,
            table_sizes=tuple(whole.train.table_sizes),
            num_numerical_features=whole.train.num_numerical,
            table_poolings=_poolings(known, whole.train),
        )
    with agreed(world, *session.USER_ERRORS):
        placement = _place(values, architecture, world, whole)
    _check_same_placement(placement, world)
    _agree_that_tables_fit(values, architecture, world, checkpoint, resumed, placement)
    with agreed(world, *session.USER_ERRORS):
        read = whole.train if values["mode"] == "train" else whole.test
        why_not = None
        if values["cuda_graphs"]:
            why_not = _why_not_recorded(values, world, read, placement)
    unrecorded = why_none_records(why_not, world)
    with agreed(world, *session.USER_ERRORS):
        task = _make_task(values, architecture, world, unrecorded, placement, whole)
        told_by = fingerprint(read)
        values = _with_products(values, task, resumed)
    if task.model.store is not None:
        at_the_end.callback(_close_store, task.model)
    transform = fitted / layout.TRANSFORM if fitted else None
    if known is None and values["mode"] == "train":
        without_bins = fit_edges(task.model, whole.train, transform, world)
        note = "\n".join(map(printable, filter(None, (note, without_bins)))) or None
    changed = [f"{n} {values[n]}" for n in ARCHITECTURE if values[n] != asked[n]]
    return DLRMSetup(
        values=values,
        world=world,
        task=task,
        trains=values["mode"] == "train",
        checkpoint=checkpoint,
        dataset=told_by,
        may_change=_may_change(values),
        transform=transform if transform and transform.is_dir() else None,
        whole=whole,
        adopted=f"architecture from {known}: {', '.join(changed)}" if changed else None,
        note=note,
        unrecorded=unrecorded,
    )


def _may_change(values: Values) -> frozenset[str]:
    """Returns the flags that a resumed run may change: its length only if no rate depends on it."""
    length = {"epochs", "max_steps"} if values.config(ScheduleConfig).knows_the_run else set()
    return RESUME_MAY_CHANGE - length


def _close_store(model: DLRM) -> None:
    assert model.store is not None
    model.store.close()  # or the view that has replaced it


def _with_products(values: Values, task: Recommendation, resumed: Path | None) -> Values:
    """Sets whose products the MLPs use, those of a resumed run first; returns what is recorded."""
    asked, model = values["mlp_products"], task.model
    if task.world.device != "cpu":
        return values
    if asked == AUTO_PRODUCTS and resumed:  # runs from before the flag used torch's
        asked = run.saved_flags(resumed, ["mlp_products"]).get("mlp_products", TORCH)
    if asked != AUTO_PRODUCTS:
        model.products = asked
    return Values({**values, "mlp_products": model.products}, values.given)


def _open_datasets(values: Values, world: World) -> Datasets:
    """Opens the whole dataset on every rank, first on rank 0, which may have to write it."""
    for turn in (world.rank == 0, world.rank > 0):
        with agreed(world, *session.USER_ERRORS):
            if turn:
                # Each rank compares the part that it reads, in `own_part`.
                config = values.config(DataConfig, device=world.device, verify_data="never")
                datasets = open_datasets(config)
    return datasets


def _check_numericals(values: Values, datasets: Datasets) -> None:
    asked, found = values["num_numerical_features"], datasets.train.num_numerical
    if "num_numerical_features" in values.given and asked != found:
        raise ValueError(f"--num_numerical_features {asked}: the dataset has {found}")


def _poolings(checkpoint: Path | None, data: Dataset) -> tuple[str | None, ...] | None:
    """Returns the poolings of the checkpoint's training data, otherwise of this dataset."""
    saved = read_config(checkpoint)["dataset"].get("poolings") if checkpoint else None
    return data.poolings if saved is None else tuple(saved)


def _compare_transforms(
    values: Values, checkpoint: Path | None, fitted: Path | None, world: World
) -> str | None:
    """Refuses, on rank 0, a dataset whose ids mean other values; returns a line to print."""
    if checkpoint is None or world.rank > 0:
        return None
    return compare_transforms(
        checkpoint,
        fitted,
        values["allow_other_transform"],
        values["verify_data"],
        values["allow_links"],
    )


def _agree_that_tables_fit(
    values: Values,
    config: DLRMConfig,
    world: World,
    checkpoint: Path | None,
    resumed: Path | None,
    placement: Placement,
) -> None:
    chosen = optimizer_config(values)
    trained = values["mode"] == "train" and not chosen.freeze_embeddings
    fixed = ["embedding_dim", "max_table_size"] if checkpoint or resumed else []
    fixed += ["embedding_optimizer", "base_device"] if resumed else []
    fixed += ["processes"] if values["mode"] == "inference_benchmark" else []
    may_have_store = {
        "train": training(values).may_have_store,
        "test": values["load_checkpoint_path"] is not None,
        "inference_benchmark": False,
    }
    fixed += [] if may_have_store[values["mode"]] else ["table_store"]
    optimizer = chosen.embedding_optimizer if trained else None
    agree_on_memory(config, optimizer, world, fixed, placement, values.config(TableStoreConfig))


def _place(values: Values, config: DLRMConfig, world: World, whole: Datasets) -> Placement:
    """Returns the placement of the tables; "auto" uses the planner."""
    chosen, batch_size = optimizer_config(values), values["batch_size"]
    optimizer = None if values["mode"] != "train" else chosen.embedding_optimizer
    if config.placement == AUTO and world.size > 1:
        workload = Workload(
            config,
            batch_size if values["mode"] == "train" else values["test_batch_size"],
            optimizer,
            chosen.mlp_optimizer,
            mean_ids(whole.train),
            values.config(PrecisionConfig).dtype(world.device) != torch.float32,
        )
        limits = Limits(world.size, fixed_shapes=values["cuda_graphs"])
        placement = plan(workload, limits, machine_of(world.device))
    else:
        placement = config.placed(world.size)
    if optimizer is not None and not chosen.freeze_embeddings:
        check_optimizer(placement, chosen)
    return placement


def _check_same_placement(placement: Placement, world: World) -> None:
    content = zlib.crc32(repr(placement.pieces).encode())
    check_same({"the placement of the tables": f"CRC-32 {content:08x}"}, world)


def _why_not_recorded(
    values: Values, world: World, data: Dataset, placement: Placement
) -> str | None:
    """Returns the reason why this rank cannot use --cuda_graphs, or None if it can."""
    if world.device == "cpu":
        return "it is for GPUs"
    if world.size > 1 and values["backend"] != "nccl":
        return f"--backend {values['backend']} waits for the GPU"
    if not data.one_id_each:
        return "batches with several ids a table differ in shape"
    if values["embedding_l2"]:
        return "--embedding_l2 counts steps on the host"
    if any(piece.copied or not piece.has_all_rows for piece in placement.pieces):
        return "copies and divided rows send as many rows as a batch has of them"
    return None if cuda_kernels_available() else "plain torch runs, which waits for the GPU"


def _make_task(
    values: Values,
    config: DLRMConfig,
    world: World,
    unrecorded: str | None,
    placement: Placement,
    whole: Datasets,
) -> Recommendation:
    recorded, kind = values["cuda_graphs"] and unrecorded is None, values["embedding_type"]
    if recorded and values["mode"] == "train" and kind not in FUSED_TYPES:
        raise ValueError(
            f"--cuda_graphs needs --embedding_type joint_fused, got {kind}: "
            "torch's optimizers of sparse gradients wait for the GPU at every step"
        )
    execution, trains = values["execution"], values["mode"] == "train"
    store = table_store(
        values.config(TableStoreConfig),
        config,
        optimizer_config(values) if trains else None,
        world,
        placement,
        values["save_checkpoint_path"],
        whole,
    )
    return Recommendation(
        config,
        world,
        dtype=values.config(PrecisionConfig).dtype(world.device),
        seed=values["seed"],
        auc_on_cpu=values["auc_device"] == "CPU",
        optimized_mlp=values["optimized_mlp"],
        recorder=CudaRecorder(world.device) if recorded else None,
        execution="graph" if execution == "lazy" and why_not_lazy(world.device) else execution,
        has_clicks=values.config(DataConfig).has_clicks,
        placement=placement,
        store=store,
    )


def own_part(setup: DLRMSetup) -> Datasets:
    """Returns this rank's part of the dataset.

    Raises:
        ValueError, OSError: a file that is compared as a whole is damaged.
        OtherRankError: a file of another rank is damaged.
    """
    world = setup.world
    model = setup.task.model
    shard = Shard(world, tuple(model.tables_by_rank[world.rank]), model.own_samples_alone)
    with agreed(world, ValueError, OSError):
        datasets = open_datasets(setup.values.config(DataConfig, device=world.device), shard)
        for dataset in datasets if setup.trains else [datasets.test]:
            if dataset is not None:
                dataset.check_files()
        if setup.trains:  # these are in the fingerprint that a resumed run compares
            for index in (0, len(datasets.train) - 1):
                datasets.train.batch(index)
    return datasets
