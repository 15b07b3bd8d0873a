"""Trains, tests or times a DLRM: python -m dlrm.scripts.main --mode train ..."""

import dlrm.scripts.common.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import functools
import json
import re
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from absl import app
from absl import flags as absl_flags

from dlrm import __version__, ops
from dlrm.data.clicks import layout
from dlrm.data.clicks.batch import Batch, Dataset, Shard
from dlrm.data.clicks.datasets import (
    DATASET_TYPES,
    DataConfig,
    Datasets,
    described_directory,
    open_datasets,
)
from dlrm.data.transform.difference import compare_transforms
from dlrm.distributed import World, agreed, check_same
from dlrm.model.dlrm import ARCHITECTURE, FUSED_TYPES, DLRMConfig
from dlrm.ops.library import cuda_kernels_available
from dlrm.scripts.common import flags, session
from dlrm.scripts.common.bad_rows import bad_ids_named, check_scores
from dlrm.scripts.common.host_memory import host_memory, machine
from dlrm.serving.runtimes import RUNTIMES, open_runtimes
from dlrm.tasks.footprint import Memory, agree_that_tables_fit
from dlrm.tasks.recommendation import Batches, Recommendation
from dlrm.train.benchmark import Latency, measure_inference
from dlrm.train.checkpoints.checkpoint import Parameters, load_checkpoint, read_config
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint
from dlrm.train.cuda_graph import CALLS_BEFORE, CudaRecorder
from dlrm.train.log import RunLog, Watched
from dlrm.train.metrics import one_class_note
from dlrm.train.precision import PrecisionConfig
from dlrm.train.schedule import ScheduleConfig, learning_rate, short_run_advice
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer
from dlrm.train.watchdog import Watchdog

FLAGS = absl_flags.FLAGS
_HELD_ROWS = 1 << 18  # of an inference benchmark
flags.define_flags()
absl_flags.adopt_module_key_flags(flags)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only, got {argv[1:]}")
    session.exit_with(run, FLAGS.save_checkpoint_path)


def run() -> dict[str, float]:
    """Does what the flags say and returns the summary, on every rank.

    Raises:
        ValueError, OSError, FloatingPointError: what the user can mend.
        OtherRankError: another rank raises one of these.
        StoppedError: the training was stopped by a signal.
    """
    session.set_deterministic(FLAGS.deterministic)
    world = session.join(
        FLAGS.base_device, FLAGS.backend, flags.given("backend"), FLAGS.rank_timeout
    )
    with agreed(world, *session.USER_ERRORS):
        values = flags.values()
        precision = flags.config(PrecisionConfig)
        _check_mode(world)
        for kind in (ScheduleConfig, TrainConfig, DataConfig):
            flags.config(kind)
        flags.optimizer_config()
    shared = {f"--{k}": v for k, v in values.items() if k not in flags.RANKS_MAY_DIFFER}
    check_same(shared, world)
    torch.backends.cuda.matmul.allow_tf32 = precision.tf32
    torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.manual_seed(FLAGS.seed)
    with session.held_checkpoint(FLAGS.load_checkpoint_path, world) as checkpoint:
        return _run(world, values, precision, checkpoint)


def _run(
    world: World, values: dict[str, Any], precision: PrecisionConfig, checkpoint: Path | None
) -> dict[str, float]:
    whole = _open_datasets(world)
    with agreed(world, *session.USER_ERRORS):
        _check_numericals(whole)
        resumed = last_checkpoint(FLAGS.save_checkpoint_path) if FLAGS.resume else None
        note = _compare_transforms(resumed or checkpoint, world)
        adopted = _adopted(resumed or checkpoint)
        architecture = _architecture(whole, adopted)
    _agree_that_tables_fit(architecture, world, checkpoint, resumed)
    with agreed(world, *session.USER_ERRORS):
        task = _make_task(architecture, world, precision)
        fingerprint = _fingerprint(whole.train if FLAGS.mode == "train" else whole.test)
        log = RunLog(FLAGS.log_path, quiet=world.rank > 0)
    check_same({f"the dataset's {name}": value for name, value in fingerprint.items()}, world)
    with log, Watchdog(world, FLAGS.rank_timeout) as watchdog, ExitStack() as at_the_end:
        checkpoints = _checkpoints(world, watchdog) if FLAGS.mode == "train" else None
        if checkpoints:
            at_the_end.callback(checkpoints.release)
        log.parameters(values | adopted)
        for line in [*_notices(world, precision), *([note] if note else [])]:
            log.line(line)
        varies = FLAGS.mode == "train" and task.updates_vary(flags.optimizer_config())
        if varies and not FLAGS.deterministic:
            log.line(session.VARIES)
        if adopted:
            shown = ", ".join(f"{name} {value}" for name, value in adopted.items())
            log.line(f"architecture from {resumed or checkpoint}: {shown}")
        log.line(_describe(task, whole, world))
        with bad_ids_named(whole, _data_name()):
            datasets = _own_part(task)
            if FLAGS.mode == "train":
                run = {"flags": values | adopted, "dataset": fingerprint}
                summary = _train(task, datasets, checkpoint, checkpoints, run, log, watchdog)
            else:
                _load_weights(task, checkpoint, log)
                if FLAGS.mode == "test":
                    summary = _test(task, datasets, log, watchdog)
                else:
                    summary = _inference_benchmark(task, datasets, log)
        log.summary(summary)
    return summary


def _architecture(datasets: Datasets, adopted: dict[str, Any]) -> DLRMConfig:
    return flags.config(
        DLRMConfig,
        table_sizes=tuple(datasets.train.table_sizes),
        num_numerical_features=datasets.train.num_numerical,
        **adopted,
    )


def _agree_that_tables_fit(
    config: DLRMConfig, world: World, checkpoint: Path | None, resumed: Path | None
) -> None:
    chosen, memory = flags.optimizer_config(), host_memory()
    trained = FLAGS.mode == "train" and not chosen.freeze_embeddings
    fixed = ["embedding_dim", "max_table_size"] if checkpoint or resumed else []
    fixed += ["embedding_optimizer", "base_device"] if resumed else []
    fixed += ["processes"] if FLAGS.mode == "inference_benchmark" else []
    agree_that_tables_fit(
        config,
        chosen.embedding_optimizer if trained else None,
        world,
        Memory("the host", machine(), *memory) if memory else None,
        fixed,
    )


def _make_task(config: DLRMConfig, world: World, precision: PrecisionConfig) -> Recommendation:
    dtype, on_cpu = precision.dtype(world.device), FLAGS.auc_device == "CPU"
    recorded = FLAGS.cuda_graphs and _why_not_recorded(world) is None
    if recorded and FLAGS.mode == "train" and FLAGS.embedding_type not in FUSED_TYPES:
        raise ValueError(
            f"--cuda_graphs needs --embedding_type joint_fused, got {FLAGS.embedding_type}: "
            "torch's optimizers of sparse gradients wait for the GPU at every step"
        )
    recorder = CudaRecorder(world.device) if recorded else None
    options = (FLAGS.seed, on_cpu, FLAGS.optimized_mlp, recorder)
    return Recommendation(config, world, dtype, *options)


def _open_datasets(world: World) -> Datasets:
    """Opens the whole dataset on every rank, on the first one first: it may have to be written."""
    config = None
    for turn in (world.rank == 0, world.rank > 0):
        with agreed(world, *session.USER_ERRORS):
            if turn:
                # Each rank compares what it reads itself, in `_own_part`.
                config = flags.config(DataConfig, device=world.device, verify_data="never")
                datasets = open_datasets(config)
    return datasets


def _own_part(task: Recommendation) -> Datasets:
    """The dataset as this rank reads it; what is damaged and can be known now ends the run."""
    world = task.world
    shard = Shard(world, tuple(task.model.tables_by_rank[world.rank]))
    with agreed(world, ValueError, OSError):
        datasets = open_datasets(flags.config(DataConfig, device=world.device), shard)
        for dataset in datasets if FLAGS.mode == "train" else [datasets.test]:
            if dataset is not None:
                dataset.check_files()
        if FLAGS.mode == "train":  # these are in the fingerprint that a resumed run compares
            for index in (0, len(datasets.train) - 1):
                datasets.train.batch(index)
    return datasets


def _train(
    task: Recommendation,
    datasets: Datasets,
    checkpoint: Path | None,
    checkpoints: CheckpointDirectory | None,
    run: dict[str, Any],
    log: RunLog,
    watchdog: Watchdog,
) -> dict[str, float]:
    device = task.world.device
    schedule, config = flags.config(ScheduleConfig), flags.config(TrainConfig)
    one_id_each = datasets.train.batch(0).lengths is None
    one_look_up = one_id_each and config.gradient_accumulation_steps == 1
    optimizers = task.optimizers(flags.optimizer_config(), one_look_up)
    trainer = Trainer(
        task,
        optimizers=optimizers,
        schedule=functools.partial(learning_rate, schedule),
        config=config,
        world=task.world,
        log=log,
        scaler=flags.config(PrecisionConfig).scaler(device, FLAGS.max_grad_norm),
        checkpoints=checkpoints,
        run={"dlrm_version": __version__, **run},
        beat=watchdog.beat,
        recorder=task.recorder,
    )
    resumed = FLAGS.resume and session.resume(trainer, log, _frozen)
    if not resumed and checkpoint:
        load_checkpoint(checkpoint, trainer.parameters, world=task.world)
        log.line(f"weights from {checkpoint}; the run starts at step 0")
    train = Batches(datasets.train, device, FLAGS.shuffle_batch_order, FLAGS.seed)
    choices = ("lr", *flags.ADAM_SWITCHES, *flags.ADAM_SWITCHES.values())
    by_default = not any(map(flags.given, choices))
    advice = short_run_advice(schedule, config.num_steps(len(train)), by_default)
    if advice and not resumed:  # else flags must stay as they were
        log.line(f"note: {advice}")
    validation = Batches(datasets.validation, device) if datasets.validation else None
    with session.stopped_by_sigterm(trainer):
        summary = trainer.fit(train, Batches(datasets.test, device), validation)
    watchdog.rest()
    session.report_files(trainer, log, FLAGS.log_path)
    check_scores(task, _data_name(), "validation")  # the trainer checks those of other tests
    return summary


def _load_weights(task: Recommendation, checkpoint: Path | None, log: RunLog) -> None:
    if checkpoint:
        parameters = Parameters(task.model, task.table_parameters())
        load_checkpoint(checkpoint, parameters, world=task.world)
        log.line(f"weights from {checkpoint}")
    else:
        log.line("note: no --load_checkpoint_path, so these are the initial weights")


def _test(
    task: Recommendation, datasets: Datasets, log: RunLog, watchdog: Watchdog
) -> dict[str, float]:
    test = Batches(datasets.test, task.world.device)
    with agreed(task.world, ValueError):
        if not test.num_samples:
            raise ValueError(f"{FLAGS.dataset}: the test split has no rows")
    began = time.perf_counter()
    metrics = task.evaluate(Watched(test, "test", log.quiet, lambda: watchdog.beat(0)))
    seconds = time.perf_counter() - began
    check_scores(task, _data_name(), "test")
    shown = "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())
    log.line(f"Finished testing: {shown}")
    if note := one_class_note(metrics, test.num_samples):
        log.line(note)
    return metrics | {
        "avg_inference_latency": seconds / len(test),
        "average_test_throughput": test.num_samples / seconds,
    }


def _inference_benchmark(task: Recommendation, datasets: Datasets, log: RunLog) -> dict[str, float]:
    """Times every runtime on every batch size; keys without a runtime are of the model as it is."""
    sizes = flags.values()["inference_benchmark_batch_sizes"]
    if not sizes:
        raise ValueError("--inference_benchmark_batch_sizes: expected one or more")
    for size in sizes:
        if not 1 <= size <= datasets.test.num_samples:
            raise ValueError(
                f"--inference_benchmark_batch_sizes {size}: expected 1 to "
                f"{datasets.test.num_samples}, the rows of the test set"
            )
    summary = {}
    others = open_runtimes(task.model, _other_runtimes(task, datasets, log), log.line)
    with task.weights_unchanged(), others as runtimes:
        for size in sizes:
            for name, predict in {"native": task.infer, **runtimes}.items():
                latency = _latency(predict, size, task.world.device)
                end = f"batch_{size}" if name == "native" else f"batch_{size}_{name}"
                for which in ("mean", "p50", "p95", "p99"):
                    summary[f"{which}_inference_latency_{end}"] = getattr(latency, which)
                summary[f"mean_inference_throughput_{end}"] = latency.samples_per_second
                log.line(
                    f"batch {size:>6}  {name:<12} p50 {latency.p50 * 1e3:9.3f} ms  "
                    f"p95 {latency.p95 * 1e3:9.3f} ms  p99 {latency.p99 * 1e3:9.3f} ms  "
                    f"{latency.samples_per_second:12,.0f} samples/s"
                )
    return summary


def _other_runtimes(task: Recommendation, datasets: Datasets, log: RunLog) -> list[str]:
    names = [name for name in FLAGS.inference_benchmark_runtimes if name != "native"]
    if wrong := sorted(set(names) - set(RUNTIMES)):
        raise ValueError(
            f"--inference_benchmark_runtimes {wrong[0]}: expected native, {', '.join(RUNTIMES)}"
        )
    for reason, is_so in (
        ("on the CPU only", task.world.device != "cpu"),
        ("with one id a table only", datasets.test.batch(0).lengths is not None),
    ):
        if names and is_so:
            log.line(f"{', '.join(names)}: left out, measured {reason}")
            return []
    return names


def _latency(predict: Callable[[Batch], Any], size: int, device: str) -> Latency:
    warmup = FLAGS.benchmark_warmup_steps if flags.given("benchmark_warmup_steps") else 10
    if FLAGS.cuda_graphs:
        warmup = max(warmup, CALLS_BEFORE + 1)  # recording is not measured
    steps = warmup + FLAGS.inference_benchmark_steps
    config = flags.config(DataConfig, device=device, test_batch_size=size)
    batches = Batches(open_datasets(config).test, device)
    # They are in memory before the clock runs: reading them would take the same cores.
    with closing(batches.repeated(min(steps, -(-_HELD_ROWS // size)))) as repeated:
        held = list(repeated)
    return measure_inference(predict, islice(cycle(held), steps), size, warmup, device)


def _why_not_recorded(world: World) -> str | None:
    """Why --cuda_graphs cannot be heeded; None where it is."""
    if world.device == "cpu":
        return "it is for GPUs"
    if world.size > 1:
        return "it is for one process"
    if FLAGS.synthetic_dataset_hotness:
        return "batches with several ids a table differ in shape"
    return None if cuda_kernels_available() else "plain torch runs, which waits for the GPU"


def _notices(world: World, precision: PrecisionConfig) -> list[str]:
    """Lines about flags that are accepted and do nothing here."""
    lines = []
    if flags.given("output_dir"):
        lines.append("note: --output_dir is not used; checkpoints go to --save_checkpoint_path")
    if FLAGS.cuda_graphs and (why := _why_not_recorded(world)):
        lines.append(
            f"note: --cuda_graphs is not used; {why}. Steps run eagerly, with the same results"
        )
    if flags.given("loss_scale") and precision.dtype(world.device) != torch.float16:
        lines.append("note: --loss_scale is not used; it is for fp16 only")
    return lines


def _check_numericals(datasets: Datasets) -> None:
    found = datasets.train.num_numerical
    if flags.given("num_numerical_features") and FLAGS.num_numerical_features != found:
        raise ValueError(
            f"--num_numerical_features {FLAGS.num_numerical_features}: the dataset has {found}"
        )


def _check_mode(world: World) -> None:
    if FLAGS.execution == "graph":
        raise ValueError(
            "--execution graph: a DLRM runs eagerly, since each part of it is one native operator "
            "already and torch.compile of the same layers is slower; dlrm.scripts.cnn takes it"
        )
    if FLAGS.precision == "16.16":
        raise ValueError(
            "--precision 16.16: a DLRM keeps float32 weights; 16.32 computes in half precision, "
            "and --embedding_dtype bf16 narrows the tables"
        )
    if FLAGS.max_grad_norm is not None and not FLAGS.max_grad_norm > 0:
        raise ValueError(f"--max_grad_norm {FLAGS.max_grad_norm}: expected a number above 0")
    if FLAGS.mode == "inference_benchmark" and world.size > 1:
        raise ValueError(f"--mode inference_benchmark: expected one process, got {world.size}")
    if FLAGS.mode != "train" and FLAGS.resume:
        raise ValueError(f"--resume contradicts --mode {FLAGS.mode}: only training goes on")
    if FLAGS.resume and FLAGS.save_checkpoint_path is None:
        raise ValueError("--resume needs --save_checkpoint_path, where the checkpoints are")
    if FLAGS.checkpoint_freq and FLAGS.save_checkpoint_path is None:
        raise ValueError(f"--checkpoint_freq {FLAGS.checkpoint_freq} needs --save_checkpoint_path")


def _compare_transforms(checkpoint: Path | None, world: World) -> str | None:
    """Refuses, on rank 0, a dataset whose ids mean other values; returns a line to be said."""
    if checkpoint is None or world.rank > 0:
        return None
    return compare_transforms(
        checkpoint, _directory(), FLAGS.allow_other_transform, FLAGS.verify_data
    )


def _directory() -> Path | None:
    """Where the dataset's rows and transform are; None of data without files."""
    if _is_synthetic() or FLAGS.dataset is None:
        return None
    if DATASET_TYPES[FLAGS.dataset_type] == "split":
        return described_directory(flags.config(DataConfig))
    return Path(FLAGS.dataset)


def _adopted(checkpoint: Path | None) -> dict[str, Any]:
    """The architecture flags that the user did not give and a checkpoint has otherwise."""
    if checkpoint is None:
        return {}
    saved, values = read_config(checkpoint)["flags"], flags.values()
    theirs = {
        name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
        for name in ARCHITECTURE
        if name in saved  # older checkpoints lack later flags
    }
    return {
        name: value
        for name, value in theirs.items()
        if not flags.given(name) and value != values[name]
    }


def _describe(task: Recommendation, datasets: Datasets, world: World) -> str:
    config, held = task.model.config, {id(weight) for weight, _ in task.table_parameters()}
    rows = sum(config.embedding_rows)
    dense = sum(p.numel() for p in task.model.parameters() if id(p) not in held)
    weights = dense + rows * config.embedding_dim
    validation = datasets.validation.num_samples if datasets.validation else 0
    device = world.device
    if device == "cpu":
        native = ops.instruction_set() if ops.native_available() else "plain torch"
        device += f" ({torch.get_num_threads()} threads, operators: {native})"
    if world.size > 1:
        counts = ", ".join(str(len(tables)) for tables in task.model.tables_by_rank)
        device += f"  processes: {world.size}, with {counts} tables"
    return (
        f"device: {device}  parameters: {weights:,} ({len(datasets.train.table_sizes)} tables, "
        f"{rows:,} rows)  rows: train {datasets.train.num_samples:,}, "
        f"test {datasets.test.num_samples:,}, validation {validation:,}"
    )


def _checkpoints(world: World, watchdog: Watchdog) -> CheckpointDirectory | None:
    if FLAGS.save_checkpoint_path is None:
        return None
    fitted = folder / layout.TRANSFORM if (folder := _directory()) else None
    checkpoints = CheckpointDirectory(
        FLAGS.save_checkpoint_path,
        FLAGS.keep_checkpoints,
        fitted if fitted and fitted.is_dir() else None,
        world,
        FLAGS.async_checkpoint,
        watchdog.beat,
    )
    session.new_or_resumed(checkpoints, FLAGS.resume)
    return checkpoints


def _data_name() -> str:
    return FLAGS.dataset or f"--dataset_type {FLAGS.dataset_type}"


def _is_synthetic() -> bool:
    return DATASET_TYPES[FLAGS.dataset_type].startswith("synthetic")


def _frozen(run: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same when a run goes on."""
    # A flag that is newer than the run must have the default, which is what the run did.
    newer = {k: v for k, v in flags.values().items() if not flags.given(k)}
    run = json.loads(json.dumps({**run, "flags": {**newer, **run["flags"]}}))
    kept = {f"--{k}": v for k, v in run["flags"].items() if k not in flags.RESUME_MAY_CHANGE}
    kept["--base_device"] = session.device(kept["--base_device"])
    kept["--dataset_type"] = DATASET_TYPES[kept["--dataset_type"]]  # it has other names
    return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


def _fingerprint(data: Dataset) -> dict[str, Any]:
    """Tells one data set from another, wherever it lies and of whatever type it is."""
    ends = [data.batch(0), data.batch(len(data) - 1)] if len(data) else []
    tensors = [t for batch in ends for t in batch if isinstance(t, torch.Tensor)]
    content = b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)
    return {
        "rows": data.num_samples,
        "table sizes": data.table_sizes,
        "first and last batch": f"CRC-32 {zlib.crc32(content):08x}",
    }


def start() -> None:
    # torch.distributed.launch without --use_env says this to each process; the environment has it.
    told = re.compile(r"--local[-_]rank=\d+")
    app.run(main, [argument for argument in sys.argv if not told.fullmatch(argument)])


if __name__ == "__main__":
    start()
