"""Image networks: two processes equal one that accumulates two micro-batches."""

import pytest
import torch
from ranks import Ranks

from dlrm.data.images.augmentation import Augmentation
from dlrm.data.images.loader import GeneratedImages, ImageLoader
from dlrm.distributed import World
from dlrm.model.networks import efficientnet
from dlrm.tasks.images import ImageClassification, ImageLossConfig, NetworkConfig
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer

pytestmark = pytest.mark.long
SIZE, CLASSES, BATCH, STEPS = 32, 7, 6, 4


def train(world: World, parts: int, optimizer: str, max_grad_norm: float | None):
    """The weights and metrics after a few steps of a small network with group norm."""
    small = efficientnet.VARIANTS["efficientnet_b0"]._replace(width=0.25, depth=0.5)
    efficientnet.VARIANTS["efficientnet_b0"] = small  # in this process
    task = ImageClassification(
        NetworkConfig("efficientnet_b0", CLASSES, "group", dropout=0.0, drop_path=0.0),
        Augmentation(image_size=SIZE, mixup_alpha=0.2, cutmix_lambda=0.85),
        ImageLossConfig(0.1),
        world=world,
        channels_last=True,
    )

    def loader(rows, shuffle, partners=0):
        source = GeneratedImages(rows, SIZE, CLASSES)
        options = {"shuffle": shuffle, "num_partners": partners, "world": world}
        return ImageLoader(source, BATCH, drop_last=shuffle, **options)

    config = NetworkOptimizerConfig(optimizer, weight_decay=1e-4)
    trainer = Trainer(
        task,
        optimizers=task.optimizers(config),
        schedule=lambda step: 0.01,
        config=TrainConfig(gradient_accumulation_steps=parts, max_steps=STEPS, print_freq=1),
        world=world,
        scaler=LossScaler(max_grad_norm=max_grad_norm),
    )
    partners = task.augmentation.num_partners
    summary = trainer.fit(loader(BATCH * STEPS, True, partners), loader(BATCH + 1, False))
    losses = [entry["loss"] for entry in trainer.progress.history if "lr" in entry]
    weights = {name: value.detach().clone() for name, value in task.model.named_parameters()}
    return losses, weights, summary["test_top1"], summary["test_loss"]


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("optimizer", "max_grad_norm"), [("momentum", None), ("rmsprop_tf", None), ("adamw", 0.5)]
)
def test_two_processes_equal_two_micro_batches(two, optimizer, max_grad_norm):
    kept = efficientnet.VARIANTS["efficientnet_b0"]
    try:
        losses, weights, top1, loss = train(World(), 2, optimizer, max_grad_norm)
    finally:
        efficientnet.VARIANTS["efficientnet_b0"] = kept
    for answer in two.call(train, [(1, optimizer, max_grad_norm)] * 2):
        if isinstance(answer, Exception):
            raise answer
        assert answer[0] == pytest.approx(losses, rel=1e-4)
        # Adam and RMSprop magnify the rounding of gradients near 0.
        tolerance = 1e-5 if optimizer == "momentum" else 1e-3
        for name, value in weights.items():
            torch.testing.assert_close(answer[1][name], value, atol=tolerance, rtol=tolerance)
        assert answer[2] == top1
        assert answer[3] == pytest.approx(loss, rel=1e-3)
