"""Replicas of a network, and pipelines of its parts, equal one process that accumulates."""

import functools
import itertools

import numpy as np
import pytest
import small_images
import torch
from small_texts import STILL, Rows, small

from dlrm.distributed import World, pipelines
from dlrm.distributed.pipeline import bubble_fraction
from dlrm.language.bert import BertForPreTraining
from dlrm.language.loader import TextLoader
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.config import ExecutionConfig, PrecisionConfig, TrainConfig
from dlrm.train.ema import EMA
from dlrm.train.log import RunLog
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.trainer import Trainer
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.loader import ImageLoader
from dlrm.vision.task import ImageClassification, ImageLossConfig, NetworkConfig

SIZE, CLASSES, ROWS, MICRO_BATCHES, STEPS = 32, 7, 12, 4, 3
TEXTS = {"squad": QuestionAnswering, "mrpc": SequenceClassification, "pretrain": PreTraining}
SPLITS = {  # by network: into two and four parts
    "resnet group": (["b2/0/relu"], ["b1/0/relu", "b2/0/relu", "b3/0/relu"]),
    "resnet batch": (["b2/0/relu"], ["b1/0/relu", "b2/0/relu", "b3/0/relu"]),
    "efficientnet": (["block3a/b"], ["block2a", "block4a", "block6a"]),
    "squad": (["layer1"], ["layer0", "layer1", "head"]),
    "mrpc": (["layer1"], ["layer0", "layer1", "head"]),
    "pretrain": (["layer1"], ["layer0", "layer1", "pooler"]),
}


class Noise:
    """Images of random pixels, as batch norm magnifies the rounding of similar images."""

    def __init__(self, rows):
        random = torch.Generator().manual_seed(rows)
        self.num_samples, self.num_classes, self.size = rows, CLASSES, SIZE
        shape = (rows, 3, SIZE, SIZE)
        self._images = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        self._labels = torch.randint(CLASSES, (rows,), generator=random)

    def read(self, rows):
        return self._images[rows], self._labels[rows]


def images(kind, world, precision=PrecisionConfig(), execution=ExecutionConfig()):
    network = {
        "resnet group": NetworkConfig("resnet50", CLASSES, "group"),
        "resnet batch": NetworkConfig("resnet50", CLASSES, "batch"),
        "efficientnet": NetworkConfig(
            "efficientnet_b0", CLASSES, "group", dropout=0.0, drop_path=0.0
        ),
    }[kind]
    task = ImageClassification(
        network,
        Augmentation(image_size=SIZE, mixup_alpha=0.2, cutmix_lambda=0.85),
        ImageLossConfig(0.1),
        precision=precision,
        execution=execution,
        world=world,
        channels_last=True,
    )

    def loader(rows, train, size=ROWS):
        source = Noise(rows)
        partners = task.augmentation.num_partners if train else 0
        options = {"shuffle": train, "num_partners": partners, "world": world}
        return ImageLoader(source, size, drop_last=train, **options)

    return task, loader


def scorer(starts, ends):
    """Depends on every logit and on its place."""
    inside = np.isfinite(starts)
    places = np.arange(starts.shape[1]) + 1 + np.arange(len(starts))[:, None]
    total = float(((starts[inside] - ends[inside]) * places[inside]).sum())
    return {"f1": total, "exact_match": 0.0}


def texts(kind, world, precision=PrecisionConfig(), execution=ExecutionConfig()):
    options = {"precision": precision, "execution": execution, "world": world}
    options |= {"scorer": scorer} if kind == "squad" else {}
    task = TEXTS[kind](small(**STILL), **options)

    def loader(rows, train, size=ROWS):
        options = {"shuffle": train, "drop_last": train, "cut": not train, "world": world}
        return TextLoader(Rows(rows), size, window=2, **options)

    return task, loader


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_images.shrink(monkeypatch.setitem)


def train(world, kind, parts, schedule="gpipe", micro_batches=MICRO_BATCHES, **options):
    """Returns losses, this process's state, its average and the metrics of a few steps.

    Trains in float64 unless a precision is given.
    """
    small_images.shrink()
    execution = ExecutionConfig(recompute=options.get("recompute", False))
    precision = options.get("precision", PrecisionConfig())
    pipes = pipelines(world, parts)
    task, loader = (texts if kind in TEXTS else images)(
        kind, pipes.replicas, precision=precision, execution=execution
    )
    if "precision" not in options:
        make_double(task)
    task.pipelines = pipes
    if parts > 1:
        task.divide(pipes.parts, SPLITS[kind][parts // 4], schedule)
    optimizer = NetworkOptimizerConfig(options.get("optimizer", "momentum"), weight_decay=1e-4)
    ema = EMA(task.model, 0.5)
    trainer = Trainer(
        task,
        optimizers=task.optimizers(optimizer),
        schedule=lambda step: 0.01,
        config=TrainConfig(gradient_accumulation_steps=micro_batches, print_freq=1),
        world=world,
        log=RunLog(quiet=True),
        scaler=task.scaler(options.get("max_grad_norm")),
        ema=ema,
    )
    size = options.get("batch_size", ROWS)
    summary = trainer.fit(loader(size * STEPS, True, size), loader(size + 1, False, size))
    losses = [entry["loss"] for entry in trainer.progress.history if "lr" in entry]
    weights = {name: value.detach().clone() for name, value in task.model.state_dict().items()}
    metrics = {name: value for name, value in summary.items() if name.startswith("test_")}
    return losses, weights, ema.state, metrics


def make_double(task):
    task.model.double()
    first = next(iter(task.stages().values()))
    first.register_forward_pre_hook(
        lambda _, inputs: tuple(x.double() if x.is_floating_point() else x for x in inputs)
    )


@functools.cache
def one_process(kind, **options):
    return train(World(), kind, 1, **options)


def check(answers, expected, parts, tolerance=1e-9):
    """Compares results of pipeline ranks with one process's."""
    losses, weights, average, metrics = expected
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        assert answer[0] == pytest.approx(losses, rel=1e-5)
        assert answer[3] == pytest.approx(metrics, rel=1e-5)
        for found, whole in ((answer[1], weights), (answer[2], average)):
            for name, value in found.items():
                torch.testing.assert_close(value, whole[name], rtol=tolerance, atol=tolerance)
    for first in range(0, len(answers), parts):
        names = [name for answer in answers[first : first + parts] for name in answer[1]]
        shared = [n for n in names if names.count(n) > 1 and "word_embeddings" not in n]
        assert set(names) == set(weights)
        assert not shared


@pytest.mark.parametrize(
    ("kind", "optimizer", "max_grad_norm"),
    [
        ("efficientnet", "rmsprop_tf", None),
        *(("squad", "momentum", None), ("mrpc", "momentum", None)),
        *(("efficientnet", "adamw", 0.5), ("pretrain", "adamw", 0.5)),
    ],
)
def test_two_replicas_equal_two_micro_batches(ranks, kind, optimizer, max_grad_norm):
    options = {"optimizer": optimizer, "max_grad_norm": max_grad_norm}
    options["batch_size"] = 7  # unequal parts
    expected = train(World(), kind, 1, micro_batches=2, **options)
    # Adam magnifies the rounding of gradients near 0.
    tolerance = 1e-6 if optimizer == "adamw" else 1e-9
    answers = ranks(2).call(settled, [(options, kind, 1, "gpipe", 1)] * 2)
    check(answers, expected, 1, tolerance)


@pytest.mark.parametrize(
    ("kind", "schedule"), zip(SPLITS, itertools.cycle(("1f1b", "gpipe")), strict=False)
)
def test_two_parts_equal_one_process(ranks, kind, schedule):
    check(ranks(2).call(train, [(kind, 2, schedule)] * 2), one_process(kind), 2)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("resnet batch", "1f1b"), ("pretrain", "gpipe"), ("squad", "sequential")]
)
def test_four_parts_equal_one_process(ranks, kind, schedule):
    check(ranks(4).call(train, [(kind, 4, schedule)] * 4), one_process(kind), 4)


@pytest.mark.parametrize(("kind", "schedule"), [("resnet group", "1f1b"), ("pretrain", "gpipe")])
def test_two_pipelines_of_two_parts_equal_one_process(ranks, kind, schedule):
    answers = ranks(4).call(train, [(kind, 2, schedule, MICRO_BATCHES // 2)] * 4)
    check(answers, one_process(kind), 2)


def settled(world, options, *arguments):
    return train(world, *arguments, **options)


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("resnet group", {"precision": PrecisionConfig()}, 1e-6),
        ("pretrain", {"max_grad_norm": 0.05}, 1e-9),
        ("squad", {"precision": PrecisionConfig(True, "fp16")}, 1e-6),
        ("squad", {"precision": PrecisionConfig(True, "bf16")}, 1e-6),
        ("mrpc", {"precision": PrecisionConfig(True, "bf16")}, 1e-6),
    ],
)
def test_precision_clipping_and_recomputation(ranks, kind, options, tolerance):
    expected = train(World(), kind, 1, **options)
    check(ranks(2).call(settled, [(options, kind, 2, "1f1b")] * 2), expected, 2, tolerance)


def overflowed(world):
    """Returns for each weight whether a step with infinite gradients leaves it as is."""
    pipes = pipelines(world, world.size)
    precision = PrecisionConfig(True, "fp16")
    task, loader = texts("squad", pipes.replicas, precision=precision)
    task.divide(pipes.parts, ["layer1"], "gpipe")
    optimizers, scaler = task.optimizers(NetworkOptimizerConfig("momentum")), task.scaler()
    set_learning_rate(optimizers, 0.1)
    for weight in task.model.parameters():
        weight.grad = torch.full_like(weight, torch.inf if world.rank else 1.0)
    before = [weight.clone() for weight in task.model.parameters()]
    scaler.step(optimizers)
    return [torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True)]


def test_no_part_takes_a_step_that_overflows_in_one(ranks):
    for unchanged in ranks(2).call(overflowed):
        assert all(unchanged)


def saved_and_loaded(world, folder, saves):
    """Saves or loads a checkpoint; returns this process's weights, momenta and averages."""
    pipes = pipelines(world, min(world.size, 2))
    task, _ = texts("pretrain", pipes.replicas)
    if world.size > 1:
        task.divide(pipes.parts, ["layer1"], "gpipe")
    optimizers = task.optimizers(NetworkOptimizerConfig("momentum"))
    average = EMA(task.model, 0.5).state
    parameters = Parameters(task.model, (), optimizers, average, pipes.parts)
    with torch.no_grad():
        for name, weight in task.model.named_parameters():
            state = optimizers[0].state[weight]["momentum_buffer"]
            for number, tensor in enumerate((weight, state, average[name])):
                tensor.fill_(len(name) + number / 4 if saves else -1)
    if saves:
        Checkpoint.save(folder, parameters, {}, {"step": 1}, world=world)
    else:
        Checkpoint(folder).load(parameters, resume=True, world=world)
    momenta = {n: optimizers[0].state[w] for n, w in task.model.named_parameters()}
    return {
        name: (w.unique().item(), momenta[name]["momentum_buffer"].unique().item(), a)
        for name, w in task.model.named_parameters()
        for a in [average[name].unique().item()]
    }


@pytest.mark.parametrize(("writers", "readers"), [(4, 1), (1, 2), (2, 4)])
def test_a_checkpoint_is_read_by_any_number_of_processes(tmp_path, ranks, writers, readers):
    for size, saves in ((writers, True), (readers, False)):
        arguments = [(tmp_path / "saved", saves)] * size
        answers = (
            [saved_and_loaded(World(), *arguments[0])]
            if size == 1
            else ranks(size).call(saved_and_loaded, arguments)
        )
        names = set()
        for answer in answers:
            names |= set(answer)
            for name, values in answer.items():
                assert values == (len(name), len(name) + 0.25, len(name) + 0.5)
        assert names == {name for name, _ in BertForPreTraining(small()).named_parameters()}
    other = Parameters(QuestionAnswering(small()).model)
    with pytest.raises(ValueError, match="another architecture"):
        Checkpoint(tmp_path / "saved").load(other)


@pytest.mark.parametrize(
    ("kind", "execution", "splits", "message"),
    [
        ("squad", ExecutionConfig("graph"), ["layer1"], "--execution graph .* 2 processes"),
        ("resnet group", ExecutionConfig(), ["reduce_mean", "fc1"], "reduce_mean has no weights"),
        ("pretrain", ExecutionConfig(), ["head"], "--pipeline_splits head: .* expected pooler or"),
        ("squad", ExecutionConfig(), ["layer7"], "--pipeline_splits layer7: no such stage"),
    ],
)
def test_a_network_that_cannot_be_divided_is_refused(kind, execution, splits, message):
    make = texts if kind in TEXTS else images
    task, _ = make(kind, World(), execution=execution)
    with pytest.raises(ValueError, match=message):
        task.divide(World(0, len(splits) + 1), splits, "gpipe")


def test_bubble_fraction():
    assert bubble_fraction("gpipe", 4, 8) == 3 / 11
    assert bubble_fraction("1f1b", 2, 1) == 1 / 2
    assert bubble_fraction("sequential", 4, 8) == 3 / 4
