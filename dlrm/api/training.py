"""`dlrm.fit`: from a table in memory, or a dataset, to a trained model."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dlrm.api.dataset import OPTIONS, Dataset, check_types, plain, unexpected
from dlrm.api.tables import ColumnRoles, opened
from dlrm.api.temporary import temporary_directory
from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.schema.schema import Schema
from dlrm.distributed import World, choose_device
from dlrm.files import check_all_local, link_or_copy
from dlrm.flags import Values
from dlrm.remote.cache import Cache
from dlrm.remote.localize import check_path, errors_shown, local_path
from dlrm.remote.mirror import Mirror, NotUploadedError, mirrored
from dlrm.remote.uri import Local, Uri, is_uri
from dlrm.serving.loading import load
from dlrm.serving.predictor import Predictor
from dlrm.serving.wording import in_python, warn
from dlrm.settings import defaults_of, settings_of
from dlrm.tasks.click import ClickWork
from dlrm.tasks.config import CLICK_CONFIGS, RECIPES, ClickCheckpointConfig
from dlrm.tasks.recipe import set_aside_default, training_defaults
from dlrm.tasks.run import Run
from dlrm.tasks.settle import Config, settle
from dlrm.tasks.splits import roles_of
from dlrm.torch_settings import own_settings
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import all_checkpoints
from dlrm.train.checkpoints.runs import write_results
from dlrm.train.config import PrecisionConfig
from dlrm.train.log import RunLog
from dlrm.train.reports.callbacks import Callbacks, LabelsAndScores, OnStep, OwnMetrics
from dlrm.train.reports.console import is_watched
from dlrm.train.schedule import check_schedule, idle_steps_note

_OF_THE_COMMAND = {
    *("dataset", "dataset_type", "num_numerical_features"),
    *("base_device", "backend"),
    *("log_format", "verbose", "profile", "log_path", "tensorboard", "mlflow", "deterministic"),
    *settings_of(ClickCheckpointConfig),
}
_CONFIGS = tuple(config for _, config in CLICK_CONFIGS)
SETTINGS = tuple(
    name
    for name in settings_of(*_CONFIGS)
    if name not in _OF_THE_COMMAND and not name.startswith("synthetic_")
)
# Settings of a continued training.
OF_CONTINUING = ("continue_lr",)


def fit(
    data: Any,
    schema: Schema | str | os.PathLike | Mapping[str, Any] | None = None,
    *,
    label: str | None = None,
    positive: Any = None,
    time: str | None = None,
    weight: str | None = None,
    groups: str | Sequence[str] | None = None,
    test: Any = None,
    validation: Any = None,
    metrics: OwnMetrics | None = None,
    on_test: OnStep | None = None,
    on_step: OnStep | None = None,
    progress: bool | None = None,
    verbose: bool = False,
    save_checkpoint_path: str | os.PathLike | None = None,
    base_device: str | None = None,
    recipe: str | None = None,
    **settings: Any,
) -> Predictor:
    """Trains a DLRM and returns it, ready to score rows.

    The trainer, the model and the configurations are those of `dlrm train`: the same dataset
    and settings give the same weights (except with `dropout` on a GPU, which draws other numbers),
    in any thread, and whatever the caller has set for torch. Settings that you leave open follow
    from the numbers of rows (`dlrm.tasks.recipe`), or from `recipe`.

    Args:
        data: a table in memory (see `Dataset.from_arrow`), a `Dataset`, or a dataset's directory or
            URI.
        schema: the meaning of a table's columns: a `dlrm.Schema`, a path, a URI or a dict; None
            drafts a schema from the table, see `dlrm.data.tables.draft.draft`. A dataset already
            has its schema and takes none.
        label: column of the label, when no schema is given.
        positive: the value of the label that counts as 1, or a list of them with all others as 0;
            None decides by the values. This and the next three are for a table without a schema.
        time, weight: columns with the time and the weight of each row.
        groups: column or columns that metrics are grouped by, such as a user.
        test, validation: tables with the rows of these splits; without them a fifth of the rows is
            used for testing. The model returned has the weights with the best AUC on the rows that
            choose: the test rows if there are validation rows, which then report. Otherwise a tenth
            of the training rows, the last ones, is set aside to choose, and the test rows report;
            `set_aside` is another share, and 0 chooses on the test rows.
        metrics: further metrics of the tests: name -> function of the labels and the scores, both
            `[rows]`, such as a metric of scikit-learn. They are reported; the AUC chooses.
        on_test: called with the step and the metrics of each test of the rows that choose. True
            ends the training as at the end of the last epoch.
        on_step: called with the step, and `loss` and `lr`, about every twentieth of the run
            (`print_freq`). True ends the training after a test. If a function raises, the training
            saves its state, and `fit` raises the same.
        progress: show a progress bar; None shows one in a terminal and in a notebook. With
            `verbose` there is none.
        verbose: print lines as `dlrm train` does: about each stage, test and tenth of the run, and
            a summary.
        save_checkpoint_path: a new directory for the best and the last checkpoint, or a URI to
            which they are uploaded; None uses a temporary one, removed when the model is
            garbage-collected, or, if the process was killed, by a later one.
        base_device: "cpu", "cuda" or "cuda:<index>" to train on; None uses CUDA if available. The
            model returned is on the CPU.
        recipe: "auto" chooses the open settings from the rows, see `dlrm.tasks.recipe.auto`.
        settings: fields of the configurations, named as the command's flags: the model
            (`embedding_dim`, `bottom_mlp_sizes`), the data (`batch_size`, `shuffle_batch_order`,
            `seed`), the training (`epochs`, `max_steps`, `test_freq`), the learning rate (`lr`,
            `warmup_steps`), the optimizers (`embedding_optimizer`) and the precision (`amp`),
            `table_files`, `max_grad_norm` and `ema_decay`, `distill`
            (a checkpoint, run or URI whose probabilities are mixed into the labels); for a table
            also the options of `Dataset.from_arrow`, such as `test_fraction`.

    Returns:
        A model with `predict`, `evaluate`, `save`, the run's summary in `results`, and the `draft`
        of the schema if none was given. In the summary
        `selection_split` and `holdout_split` are the names of the rows in these roles: "set_aside",
        "test" or "validation". The names of their metrics begin with them, as in `test_auc`.

    Raises:
        TypeError: an unknown setting.
        FileNotFoundError: the schema or the dataset does not exist.
        FileExistsError: `save_checkpoint_path` has checkpoints of an earlier run.
        OSError: the dataset or a checkpoint cannot be written, as on a full disk.
        ValueError: data, schema and settings contradict each other, or all training rows have one
            label; the message names column and row, or setting and value.
        FloatingPointError: the loss is NaN or infinite.
        Exception: any that `on_test`, `on_step` or a function of `metrics` raises.
    """
    with in_python():
        paths = {"data": data, "schema": schema, "save_checkpoint_path": save_checkpoint_path}
        settings = checked(fit, settings, {*SETTINGS, *OPTIONS}, paths)
        options = {name: settings[name] for name in OPTIONS if name in settings}
        chosen = {name: value for name, value in settings.items() if name in SETTINGS}
        watch = Watch(Callbacks(on_step, on_test), LabelsAndScores(metrics or {}), progress)
        roles = ColumnRoles(label, positive, weight, groups, time)
        device, splits = choose_device(base_device), {"test": test, "validation": validation}
        if isinstance(data, Dataset | str | os.PathLike):
            options = {name: value for name, value in options.items() if name not in chosen}
        dataset, draft = opened(data, schema, roles, splits, options, verbose)
        values = _settings(dataset, recipe, chosen)
        model = train_and_load(
            Training(dataset, values, device, watch), save_checkpoint_path, verbose
        )
    model.draft = draft
    warn_of_a_poor_fit(model.results, recipe)
    return model


def warn_of_a_poor_fit(results: Mapping[str, Any], recipe: str | None) -> None:
    """Warns if the model predicts the rows that report no better than one number would."""
    name = results.get("holdout_split")
    entropy = results.get(f"{name}_normalized_entropy", 0.0)
    if entropy > 1:
        recipe_too = "" if recipe else 'recipe="auto", '
        warn(
            f"the model is no better than a constant prediction on the {name} rows: its normalized "
            f"entropy is {entropy:.3f}, and that of always predicting their share of positive rows "
            f"is 1; try {recipe_too}fewer epochs or a smaller embedding_dim, and look for columns "
            "that changed since the training rows"
        )


def _settings(dataset: Dataset, recipe: str | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a training: the caller's, and defaults unless a recipe chooses."""
    if recipe is not None:
        if recipe not in RECIPES:
            raise ValueError(f"--recipe {recipe}: expected one of {', '.join(RECIPES)}")
        return {**chosen, "recipe": recipe}
    given = {**set_aside_default(dataset.rows), **chosen}
    rows = round((1 - given.get("set_aside", 0.0)) * dataset.rows["train"])
    return training_defaults(rows, given)


def checked(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    names: Collection[str],
    paths: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the settings of a call, plain; raises an error for one that is none or impossible.

    Args:
        function: the function that was called.
        names: the settings that it has.
        paths: other arguments that may be paths or URIs.

    Raises:
        TypeError: an unknown setting.
        ValueError: an impossible value, or a path that is none of this machine.
    """
    found = plain(settings)
    if unknown := [name for name in found if name not in names]:
        raise unexpected(function, unknown[0], sorted(names))
    check_setting_types({n: v for n, v in found.items() if n in (*SETTINGS, *OF_CONTINUING)})
    check_schedule(found.get("schedule", "nvidia"), found)
    check_all_local((name, value) for name, value in found.items() if name != "distill")
    for name, value in {**paths, "distill": found.get("distill")}.items():
        check_path(value, name)
    return found


def check_setting_types(settings: Mapping[str, Any]) -> None:
    """Raises ValueError if one of `SETTINGS` has an impossible value; the message names it."""
    check_types(settings, _CONFIGS)
    described = settings_of(*_CONFIGS)
    for name in settings.keys() & described.keys():
        described[name].check(name, settings[name])


def judge_settings(
    dataset: str | os.PathLike,
    base_device: str | None = None,
    recipe: str | None = None,
    tests: int = 1,
    on_test: OnStep | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Trains as `fit` does, saves nothing, and returns the metrics of the last weights.

    Args:
        dataset: directory of a dataset, whose test rows are read by the tests.
        base_device, recipe: as in `fit`.
        tests: number of tests, evenly over the steps; a shorter training has one for each step.
        on_test: called after a test with how many of `tests` equal parts of the training are done,
            and with the metrics; True ends the training.
        settings: as in `fit`; see `SETTINGS`.

    Returns:
        The metrics of the test rows, see `dlrm.metrics.clicks.click_metrics`.
    """
    settings = checked(judge_settings, settings, SETTINGS)
    rows, device = Dataset(dataset), choose_device(base_device)
    chosen = _settings(rows, recipe, {"set_aside": 0.0} | settings)
    last: dict[str, float] = {}

    def watched(step: int, metrics: dict[str, float]) -> Any:
        last.update(metrics)
        return on_test is not None and on_test(step * tests // steps, metrics)

    watch = Watch(Callbacks(on_test=watched))
    training = Training(rows, chosen, device, watch)
    with RunLog(quiet=True) as log, own_settings(training.tf32):
        config = settle(training.settings(None), World(device=device))
        steps = config.train.num_steps(-(-rows.rows["train"] // config.data.batch_size))
        length = replace(config.train, test_freq=-(-steps // tests))
        _train(training, replace(config, train=length), log)
    return last


@dataclass(frozen=True)
class Watch:
    """Functions, metrics and whether a progress bar is shown, by which the caller watches."""

    callbacks: Callbacks = Callbacks()
    metrics: LabelsAndScores = field(default_factory=LabelsAndScores)
    progress: bool | None = False


@dataclass(frozen=True)
class Training:
    """A training before it begins.

    Attributes:
        dataset: the rows.
        values: settings.
        device: see `base_device` of `fit`.
        watch: functions of the caller.
        continued: checkpoint to continue from; None begins with new weights.
    """

    dataset: Dataset
    values: dict[str, Any]
    device: str
    watch: Watch = Watch()
    continued: Checkpoint | None = None

    @property
    def tf32(self) -> bool:
        """Says whether float32 products may be in TensorFloat-32."""
        return self.values.get("tf32", PrecisionConfig.tf32)

    def settings(self, save_checkpoint_path: Path | None) -> Values:
        """Returns all settings of `settle`."""
        own = {
            "dataset": str(self.dataset.path),
            "save_checkpoint_path": save_checkpoint_path and str(save_checkpoint_path),
            "continue_from": self.continued and str(self.continued),
            "recipe": self.values.get("recipe"),
        }
        given = frozenset(self.values) - {"recipe"}
        return Values({**defaults_of(*_CONFIGS), **self.values, **own}, given)


def train_and_load(
    training: Training, save_checkpoint_path: str | os.PathLike | None, verbose: bool
) -> Predictor:
    """Trains and returns the model; for the other arguments see `fit`."""
    is_local = save_checkpoint_path is not None and not is_uri(save_checkpoint_path)
    temporary = None if is_local else temporary_directory()
    path, mirror = Path(temporary.name if temporary else save_checkpoint_path or ""), None
    progress = is_watched() if training.watch.progress is None else training.watch.progress
    lines = RunLog(quiet=not verbose, log_format="short", progress=progress and not verbose)
    world = World(device=training.device)
    with ExitStack() as stack:
        if temporary and save_checkpoint_path is not None:
            mirror = stack.enter_context(_mirror(Uri.parse(save_checkpoint_path)))
            path = mirror.path
        with lines as log, own_settings(training.tf32), errors_shown():
            values = training.settings(path)
            if values["distill"] is not None:
                teacher = local_path(values["distill"], "distill")
                values = values.replaced({"distill": teacher})
            config = settle(values, world, training.continued)
            results, roles = _train(training, config, log, mirror)
            write_results(Checkpoint.open(path).path, {**results, **roles})
            log.summary(results)
        if temporary and mirror is not None:
            mirror.saved(all_checkpoints(path))  # whose best one has the summary now
            best = Checkpoint.open(path).path  # the local directory is removed at the end
            path = Path(Local.within(temporary.name, mirror.uri.below(best.name)))
            shutil.copytree(best, path, copy_function=link_or_copy)
    model = load(path)
    if temporary:
        weakref.finalize(model.model, temporary.cleanup)  # which recalibrated models share
    return model


def _train(
    training: Training, config: Config, log: RunLog, mirror: Mirror | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Trains and returns the summary, and the roles of the rows in it."""
    watch, device = training.watch, training.device
    with Run.open(config, World(device=device), mirror, log) as run:
        work = run.work
        assert isinstance(work, ClickWork)
        work.task.model.random = torch.Generator(device).manual_seed(config.data.seed)
        _check_classes(work.own.train)
        steps = config.train.num_steps(len(work.own.train))
        if training.continued is None and (idle := idle_steps_note(config.schedule, steps)):
            warn(idle)
        work.values, work.task.own_metrics = _recorded(work, training), watch.metrics
        results = run.train(watch.callbacks)
    return results, roles_of(work.whole).facts()


def _check_classes(train: ClickDataset) -> None:
    """Raises ValueError if all training rows have one label."""
    seen: set[float] = set()
    for index in range(len(train)):
        seen.update(train.batch(index).labels.unique().tolist())
        if len(seen) > 1:
            return
    for label in seen:
        rows = train.num_samples
        raise ValueError(
            f"label: expected training rows of both classes, got {label:g} in all {rows:,}"
        )


def _recorded(work: ClickWork, training: Training) -> Values:
    """Returns the settings that checkpoints record: those of `fit`, and what they were used with.

    A temporary dataset is gone when the checkpoint is read, so it is not named.
    """
    values = work.values
    own = {
        "dataset": None if training.dataset.is_temporary else values["dataset"],
        "dataset_type": values["dataset_type"],
        "num_numerical_features": work.whole.train.num_numerical,
        "base_device": training.device,
        "distill": training.values.get("distill"),
    }
    names = (*SETTINGS, *OF_CONTINUING)
    return Values({**{name: values[name] for name in names}, **own}, values.given)


@contextmanager
def _mirror(uri: Uri) -> Iterator[Mirror]:
    """Yields a local directory of checkpoints that are uploaded; see `mirrored`."""
    with ExitStack() as stack:
        try:
            mirror = stack.enter_context(mirrored(Cache.open(), uri))
        except FileExistsError as error:  # with advice for the command
            last = str(error).partition(": ")[0]
            raise FileExistsError(f"{last}: of an earlier run; name another place") from error
        yield mirror
        try:
            stack.close()
        except NotUploadedError as error:
            raise OSError(str(error)) from error
