"""Plans the placement of tables, and predicts memory and time."""

import sys
from pathlib import Path

import torch

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.distributed import World, choose_device
from dlrm.distributed.placement import Placement, placement_text
from dlrm.files import write_atomically
from dlrm.flags import Values
from dlrm.model.config import DLRMConfig, check_dims
from dlrm.model.dlrm import DLRM
from dlrm.model.tables.placement import AUTO
from dlrm.scripts.plan.flags import PlanConfig
from dlrm.tasks.config import StepConfig
from dlrm.tasks.planning.machines import MACHINES, Machine, machine_of
from dlrm.tasks.planning.planner import Limits, mean_ids, plan_placement, shortage
from dlrm.tasks.planning.report import report
from dlrm.tasks.planning.stored import check_storable
from dlrm.tasks.planning.workload import Workload, stored_tables
from dlrm.tasks.recommendation import check_optimizer
from dlrm.train.config import PrecisionConfig
from dlrm.train.optim.config import OptimizerConfig

_GB = 10**9
_DOES_NOT_FIT = 3


def run(values: Values) -> int:
    output = values["output"] and Path(values["output"])
    if output and output.exists() and not values["overwrite"]:
        raise FileExistsError(f"{output}: exists; --overwrite replaces it")
    memory = values.config(PlanConfig).memory_gb
    spec = _spec(values)
    assumed = values["machine"] is None
    machine = machine_of(choose_device(None)) if assumed else MACHINES[values["machine"]]
    workload = _workload(values, spec, machine)
    limits = Limits(
        values["ranks"], None if memory is None else int(memory * _GB), values["fixed_shapes"]
    )
    if workload.config.placement == AUTO:
        placement = plan_placement(workload, limits, machine)
    else:
        placement = workload.config.placed(limits.num_ranks)
    _check_model(placement, workload.config, values.config(OptimizerConfig))
    _check_store(placement, workload, machine)
    if assumed:
        others = ", ".join(name for name in MACHINES if name != machine.name)
        print(f"machine: {machine.name} is assumed; --machine chooses another: {others}")
    for line in report(placement, workload, limits, machine):
        print(line)
    fits = not shortage(placement, workload, limits, machine)
    if output and not fits:
        refused = f"{output}: not written, since the plan does not fit in --memory_gb {memory:g}"
        print(refused, file=sys.stderr)
    elif output:
        names = workload.config.table_names(spec.categorical)
        write_atomically(output, placement_text(placement, names))
        print(f"{output}: for --placement of a training by {limits.num_ranks} processes")
    return 0 if fits else _DOES_NOT_FIT


def _check_model(placement: Placement, config: DLRMConfig, optimizers: OptimizerConfig) -> None:
    """Refuses what a training would refuse."""
    DLRM(config, World(size=placement.num_ranks, device="meta"), placement=placement)
    if not optimizers.freeze_embeddings:
        check_optimizer(placement, optimizers)


def _check_store(placement: Placement, workload: Workload, machine: Machine) -> None:
    if workload.table_memory is None:
        return
    flag = f"--table_memory {workload.table_memory}"
    if not machine.has_store:
        raise ValueError(
            f"{flag} needs --machine cpu, got {machine.name}: rows are read into the memory of the "
            "host"
        )
    check_storable(flag, workload.config, placement)
    if workload.lookups is None:
        for rank in range(placement.num_ranks):
            stored_tables(placement, rank, workload).check_batch(
                "--batch_size", workload.batch_size
            )


def _spec(values: Values) -> FeatureSpec:
    if values["dataset"] is not None:
        return FeatureSpec.load(
            Path(values["dataset"], values["feature_spec"]), values["allow_links"]
        )
    if "feature_spec" in values.given:
        return FeatureSpec.load(values["feature_spec"], values["allow_links"])
    sizes = values["synthetic_dataset_table_sizes"]
    return FeatureSpec.default(".", values["num_numerical_features"], sizes)


def _workload(values: Values, spec: FeatureSpec, machine: Machine) -> Workload:
    check_dims(spec.categorical, spec.field_dims, spec.poolings, values["embedding_dim"])
    config = values.config(
        DLRMConfig,
        table_sizes=tuple(spec.cardinalities),
        num_numerical_features=len(spec.numerical),
        table_poolings=spec.poolings,
        field_tables=spec.field_tables,
        field_targets=spec.targets,
        field_dims=spec.field_dims,
    )
    device = "cpu" if machine.name == "cpu" else "cuda"
    return Workload.of_run(
        config,
        values["batch_size"],
        values.config(OptimizerConfig),
        lookups=_mean_ids(values, spec),
        half=values.config(PrecisionConfig).dtype(device) != torch.float32,
        table_memory=values["table_memory"],
        ema=values.config(StepConfig).ema_decay is not None,
    )


def _mean_ids(values: Values, spec: FeatureSpec) -> tuple[float, ...] | None:
    given, count = values["mean_ids"], len(spec.cardinalities)
    if given is None:
        if values["dataset"] is None or not spec.lists:
            return None
        return mean_ids(open_datasets(values.config(DataConfig, verify_data="never")).train)
    if len(given) not in (1, count) or not all(0 <= ids < 1e9 for ids in given):
        raise ValueError(
            f"--mean_ids {','.join(map(str, given))}: expected one number of 0 or more, or one for "
            f"each of {count} fields"
        )
    return given if len(given) == count else given * count
