"""A run of `main` or `dist_main`: training, testing or timing a DLRM."""

import time

import torch

from dlrm.command_line import shell_line
from dlrm.data.clicks.config import DataConfig
from dlrm.distributed import World, agreed
from dlrm.flags import Values
from dlrm.metrics.table import line_of, metrics_note, one_class_note
from dlrm.remote.config import CacheConfig
from dlrm.scripts.common.dlrm_flags import CommandConfig
from dlrm.scripts.common.inference_benchmark import inference_benchmark
from dlrm.scripts.common.seeds import train_seeds
from dlrm.settings import resumable_of, uris_of
from dlrm.tasks.click import ClickWork
from dlrm.tasks.config import CLICK_CONFIGS, check_continued
from dlrm.tasks.recommendation import ClickLoader
from dlrm.tasks.run import Run
from dlrm.tasks.settle import settle
from dlrm.tasks.splits import check_scores
from dlrm.tasks.start import held_checkpoint, started
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.log import Watched

_RESUMABLE = resumable_of(CommandConfig, CacheConfig)
_URIS = uris_of(CommandConfig, *(config for _, config in CLICK_CONFIGS))
# Flags in which the ranks of a run may differ: locations of the same data.
RANKS_MAY_DIFFER = frozenset(
    [
        *("dataset", "synthetic_dataset_dir", "log_path", "output_dir"),
        *("cache_dir", "cache_gib"),
    ]
)


def run(values: Values) -> dict[str, float]:
    """Runs the mode of the flags and returns the summary, on every rank.

    Raises:
        ValueError, OSError, FloatingPointError: the user's error; the message names it.
        StoppedError: the training was stopped by a signal.
    """
    check_continued(values)
    if values["seeds"]:
        return train_seeds(values, _run)
    return _run(values)


def _run(values: Values) -> dict[str, float]:
    trains = values["mode"] == "train"
    with started(values, _URIS, trains, RANKS_MAY_DIFFER, _check) as (values, world, mirror):
        torch.manual_seed(values["seed"] + world.rank)  # of dropout, which differs between ranks
        path, continued = values["load_checkpoint_path"], values["continue_from"]
        held = held_checkpoint(path or continued, world, newest=continued is not None)
        with held as checkpoint:
            config = settle(values, world, checkpoint, _RESUMABLE)
            with Run.open(config, world, mirror) as run:
                summary = _MODES[config.mode](run)
                run.log.summary(summary)
    return summary


def _check(values: Values, world: World) -> None:
    """Raises ValueError for flags that are impossible or contradict each other."""
    mode = values["mode"]
    if values["auc_threshold"] is not None and not values.config(DataConfig).has_clicks:
        raise ValueError(
            f"--auc_threshold {values['auc_threshold']}: the targets of --dataset_type "
            f"{values['dataset_type']} are fractions, of which there is no AUC"
        )
    files = values["table_files"]
    if files is not None and values["async_checkpoint"]:
        raise ValueError(
            f"--table_files {files} contradicts --async_checkpoint, which copies tables in memory"
        )
    if mode == "inference_benchmark" and world.size > 1:
        raise ValueError(f"--mode inference_benchmark: expected one process, got {world.size}")
    if mode != "train" and values["resume"]:
        raise ValueError(f"--resume contradicts --mode {mode}: only training continues")
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


def _train(run: Run) -> dict[str, float]:
    summary = run.train()
    model, data = run.values["save_checkpoint_path"], run.values["dataset"]
    if model and data:
        read = ["--checkpoint", model]
        commands = [
            ["dlrm", "evaluate", *read, "--dataset", data],
            ["dlrm", "predict", *read, "--input", data, "--output", "scores.npy"],
            ["dlrm", "export", *read],
        ]
        run.log.console.suggest([shell_line(words) for words in commands])
    return summary


def _load_weights(run: Run, work: ClickWork) -> None:
    parameters = Parameters(work.task.model, work.task.table_parameters()).averaged()
    if not run.load_weights(parameters):
        run.log.line("note: no --load_checkpoint_path, so these are the initial weights")


def _test(run: Run) -> dict[str, float]:
    work, log = run.work, run.log
    assert isinstance(work, ClickWork)
    with work.rows_named():
        data, task = work.own.test, work.task
        _load_weights(run, work)
        test = ClickLoader(data, run.world.device)
        with agreed(run.world, ValueError):
            if not test.num_samples:
                raise ValueError(f"{run.values['dataset']}: the test split has no rows")
        began = time.perf_counter()
        metrics = task.evaluate(Watched(test, "test", log.quiet))
        seconds = time.perf_counter() - began
    check_scores(task, work.whole, work.data_name, "test")
    log.line(f"Finished testing: {line_of(metrics)}", short="")
    if note := metrics_note(metrics):
        log.line(note, short="")
    weighted = run.values["sample_weights"] and work.has_weights("test")
    if note := one_class_note(metrics, test.num_samples, weighted):
        log.line(note)
    return metrics | {
        "avg_inference_latency": seconds / len(test),
        "average_test_throughput": test.num_samples / seconds,
    }


def _time(run: Run) -> dict[str, float]:
    work = run.work
    assert isinstance(work, ClickWork)
    with work.rows_named():
        test = work.own.test
        _load_weights(run, work)
        return inference_benchmark(work, test, run.log)


_MODES = {"train": _train, "test": _test, "inference_benchmark": _time}
