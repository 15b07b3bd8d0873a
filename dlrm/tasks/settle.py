"""The settings of a click-through model's run, all settled before the run is opened."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm import ops
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Source
from dlrm.distributed import World, agreed
from dlrm.flags import Values
from dlrm.model.config import ARCHITECTURE
from dlrm.remote.uri import shown
from dlrm.tasks.assembly import Assembly
from dlrm.tasks.click import ClickWork, has_recipe
from dlrm.tasks.config import (
    AUTO_PRODUCTS,
    CARRIED,
    CONSTANT,
    RESUMABLE,
    REWARM,
    SCHEDULE,
    USER_ERRORS,
    StepConfig,
    check_distilled,
)
from dlrm.tasks.recipe import BATCH_SIZE, DatasetFacts, auto, describe, set_aside_default
from dlrm.tasks.run import CONTINUES, resumed_checkpoint, with_saved_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.reports.console import Line
from dlrm.train.schedule import ScheduleConfig, check_schedule


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a click-through model's run; `settle` makes it.

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
    checkpoint: Checkpoint | None = None
    resumed: Checkpoint | None = None
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
        return Assembly(self, world).work()


def settle(
    values: Values,
    world: World,
    checkpoint: Checkpoint | None = None,
    may_change: Collection[str] = (),
) -> Config:
    """Returns the configuration of a run: flags, recipe, and what its checkpoints decide.

    All ranks call it in step. The dataset is opened here, once.

    Args:
        values: all settings of `CLICK_CONFIGS`; also "mode" and "recipe", if there are some.
        checkpoint: checkpoint of `--load_checkpoint_path` or `--continue_from`, which is in use
            during the run.
        may_change: other settings in `values` that a resumed run may change.

    Raises:
        ValueError, OSError: settings contradict each other, the data or a checkpoint.
    """
    mode, source, notes = values.get("mode", "train"), None, list[Line]()
    trains, recipe = mode == "train", values.get("recipe")
    with agreed(world, *USER_ERRORS):
        if recipe is not None and not trains:
            raise ValueError(
                f"--recipe {recipe} contradicts --mode {mode}: only a training has one"
            )
        if recipe is not None and not has_recipe(values):
            raise ValueError(f"--recipe {recipe} needs --dataset, whose rows the flags are to fit")
        resumed = resumed_checkpoint(values) if trains else None
    if recipe is not None:
        source = _open(values.config(DataConfig, device=world.device), world)
        with agreed(world, *USER_ERRORS):
            values, line = _with_recipe(values, source, checkpoint, resumed)
            notes.append(line)
    with agreed(world, *USER_ERRORS):
        continued = None
        if trains:
            values = _with_carried(values, checkpoint, resumed)
            continued = _continued(values, checkpoint, resumed)
        else:  # a test weights rows as the training's tests did
            values = with_saved_flags(values, checkpoint, ["sample_weights"])
        if continued is not None and resumed is None:
            values = values.replaced(
                {"continue_lr": _learning_rate_mode(values, continued["step"])}
            )
        asked, known = values, resumed or checkpoint
        values = with_saved_flags(values, known, ARCHITECTURE)
        if changed := [f"{n} {values[n]}" for n in ARCHITECTURE if values[n] != asked[n]]:
            notes.append(Line(f"architecture from {known}: {', '.join(changed)}"))
        config = Config.from_values(values, device=world.device)
        if world.device == "cpu":
            values = values.replaced({"mlp_products": _products(config, resumed)})
    length = {"epochs", "max_steps"} if config.schedule.knows_the_run else set()
    return replace(
        config,
        values=values,
        mode=mode,
        source=source or _open(config.data, world),
        checkpoint=checkpoint,
        resumed=resumed,
        continued=continued,
        may_change=frozenset({*RESUMABLE, *may_change} - length),
        notes=tuple(notes),
    )


def _open(config: DataConfig, world: World) -> Source:
    """Opens the dataset on every rank, first on rank 0, which may have to write it."""
    for turn in (world.rank == 0, world.rank > 0):
        with agreed(world, *USER_ERRORS):
            if turn:
                source = Source(config)
    return source


def _with_recipe(
    values: Values, source: Source, checkpoint: Checkpoint | None, resumed: Checkpoint | None
) -> tuple[Values, Line]:
    """Returns the flags with those that the recipe chooses, and the line that says them.

    Flags that were given stay. The chosen ones count as given. A run that is resumed has those of
    its checkpoint, and the architecture of weights that are loaded is theirs.
    """
    data = values.config(DataConfig, batch_size=BATCH_SIZE)
    if "set_aside" in values.given:
        aside = {"set_aside": values["set_aside"]}
    elif resumed:
        aside = resumed.saved_flags(["set_aside"])
    else:
        aside = set_aside_default(source.splits(data, verified=False).rows())
    train = source.splits(replace(data, **aside), verified=False).train
    facts = DatasetFacts.from_dataset(train)
    given = {name: values[name] for name in values.given}
    if checkpoint and not resumed:
        given = checkpoint.saved_flags(ARCHITECTURE) | given
    settings = aside | auto(facts, given)
    if resumed:
        settings |= resumed.saved_flags(settings.keys() - given.keys())
    filled = Values(values.filled(settings), values.given | settings.keys())
    return filled, describe(facts, settings, given)


def _with_carried(
    values: Values, checkpoint: Checkpoint | None, resumed: Checkpoint | None
) -> Values:
    """Returns settings with those of the run that is continued for the ones that are not given.

    A run that has been interrupted and is resumed has those of its own checkpoint.
    """
    names = {*CARRIED} & values.keys()
    if resumed is not None:
        own = resumed if CONTINUES in resumed.config else None
        return with_saved_flags(values, own, names | {"continue_lr"})
    if values["continue_from"] is None or checkpoint is None or checkpoint.format == "nvidia":
        return values  # flags of NVIDIA's program are of another one
    return with_saved_flags(values, checkpoint, names)


def _continued(
    values: Values, checkpoint: Checkpoint | None, resumed: Checkpoint | None
) -> dict[str, Any] | None:
    """Returns the facts of the checkpoint that a run continues, which it records, or None."""
    if values["continue_from"] is None:
        return resumed.config.get(CONTINUES) if resumed else None
    assert checkpoint is not None
    directory = checkpoint.path.parent
    path = Path(values["save_checkpoint_path"] or "")
    own, other = shown(str(path.absolute())), shown(str(directory.absolute()))
    if values["save_checkpoint_path"] and (
        own == other or (path.exists() and path.samefile(directory))
    ):
        raise ValueError(
            f"--continue_from {checkpoint.uri}: is in --save_checkpoint_path {own}; a continued "
            "run needs a directory of its own (--resume alone continues an interrupted run)"
        )
    digest = checkpoint.digest
    return {
        "run": other,
        "checkpoint": checkpoint.path.name,
        "manifest": digest,
        "step": int(checkpoint.progress.get("step", 0)) if digest else 0,
    }


def _learning_rate_mode(values: Values, step: int) -> str:
    """Returns one of `CONTINUE_LR` for a run that continues after a step."""
    asked, schedule, reason = values["continue_lr"], values.config(ScheduleConfig), None
    if asked in (CONSTANT, REWARM):
        return asked
    if schedule.knows_the_run:
        reason = f"--schedule {schedule.schedule} depends on the length of the run, which is over"
    elif not any(rate_after > 0 for rate_after in map(schedule.rates(1, 1), (step + 1, step + 2))):
        reason = f"its rate is 0 after step {step:,}"
    if reason and asked == SCHEDULE:
        raise ValueError(
            f"--continue_lr {SCHEDULE}: {reason}; --continue_lr {CONSTANT} keeps --lr, and "
            f"{REWARM} begins the schedule again"
        )
    return REWARM if reason else SCHEDULE


def _products(config: Config, resumed: Checkpoint | None) -> str:
    """Returns whose matrix products the MLPs use on a CPU, those of a resumed run first."""
    asked = config.step.mlp_products
    if asked == AUTO_PRODUCTS and resumed:
        asked = resumed.config["flags"].get("mlp_products", asked)
    if asked == AUTO_PRODUCTS:
        return ops.choose_products(config.precision.dtype("cpu"))
    return asked
