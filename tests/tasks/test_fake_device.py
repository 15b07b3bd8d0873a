"""Steps on a device without values: all that a step needs is on its device."""

import pytest
import small_images
import torch
from fake_device import NAME, fake_device
from small_texts import Rows, small

from dlrm import ops
from dlrm.data.clicks.batch import Batch
from dlrm.language.loader import TextLoader
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.ema import EMA
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import (
    NETWORK_OPTIMIZER_NAMES,
    NetworkOptimizerConfig,
    OptimizerConfig,
)
from dlrm.train.precision import LossScaler
from dlrm.vision import augmentation as augment
from dlrm.vision.loader import GeneratedImages, ImageLoader
from dlrm.vision.task import ImageClassification, NetworkConfig

pytestmark = pytest.mark.long
SIZES = (10, 300, 5)
BATCH = 6


@pytest.fixture
def fake():
    with fake_device() as device:
        yield device


def clicks(bags):
    shape = (BATCH, len(SIZES))
    ids, lengths = torch.zeros(shape, dtype=torch.int16), None
    if bags:
        ids, lengths = torch.zeros(2 * ids.numel(), dtype=torch.int16), torch.full(shape, 2)
    return Batch(torch.rand(BATCH, 4).half(), ids, torch.zeros(BATCH), lengths)


def scaler(scaled=True, max_grad_norm=1.0):
    return LossScaler(torch.full((), 64.0, device=NAME) if scaled else None, max_grad_norm)


def train(task, optimizers, batch, scaler, average=None):
    """Takes two steps; the second reuses state."""
    for step in range(2):
        set_learning_rate(optimizers, 0.1 * step)
        for part in task.split(batch, 2):
            scaler.backward(task.loss(part))
        scaler.step(optimizers)
        task.model.zero_grad()
        if average:
            average.update()


def test_two_devices_are_not_mixed(fake):
    here, there = torch.ones(2, 2), fake.batch(clicks(bags=False)).numerical
    with fake, pytest.raises(RuntimeError, match="cpu"):
        torch.mm(fake.from_tensor(here), there[:2, :2].float())


needs_native = pytest.mark.skipif(not ops.native_available(), reason="the ops are not built")
CASES = [  # optimizers, dtype, whether ids are in bags and hashed, parts of the network
    ("sgd", "sgd", torch.float32, False, False, {}),
    ("adagrad", "adagrad", torch.float16, True, False, {}),
    ("row_wise_adagrad", "adam", torch.float32, False, True, {}),
    ("adam", "sgd", torch.bfloat16, True, True, {"embedding_dtype": "bf16"}),
    ("sgd", "adam", torch.bfloat16, False, False, {"embedding_dtype": "bf16"}),
    (
        *("adam", "adam", torch.float16, False, False),
        {"numerical_embedding": "piecewise", "interaction_op": "cuda_dot,dcn", "cross_rank": 3},
    ),
    (
        *("adam", "adam", torch.float32, False, False),
        {"wide": True, "interaction_op": "dcn", "cross_structure": "parallel"},
    ),
    (
        *("adam", "adam", torch.float16, False, False),
        {"wide": True, "numerical_embedding": "piecewise", "dropout": 0.5, "ensemble": 3},
    ),
    ("sgd", "sgd", torch.float32, False, False, {"interaction_op": "dot"}),
    ("sgd", "sgd", torch.float32, False, False, {"interaction_op": "cat"}),
]


@needs_native
@pytest.mark.parametrize(("tables", "mlps", "dtype", "bags", "hashed", "parts"), CASES, ids=str)
def test_a_step_of_a_dlrm_is_all_on_its_device(tables, mlps, dtype, bags, hashed, parts, fake):
    config = DLRMConfig(SIZES, 4, 8, (16, 8), (16, 1), hash_indices=hashed, **parts)
    task, batch = Recommendation(config, dtype=dtype), clicks(bags)
    fake.allow_non_fake_inputs = True
    fake.place(task)
    batch = fake.batch(batch)
    with fake:
        optimizers = task.optimizers(OptimizerConfig(tables, mlps))
        average = EMA(task.model, 0.9)
        train(task, optimizers, batch, scaler(dtype == torch.float16), average)
        with average.applied(), task.model.weights_unchanged():
            assert str(task.predict(batch).device) == NAME


@needs_native
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"freeze_embeddings": True}, {"freeze_mlps": True}),
        {"embedding_optimizer": "adam", "mlp_optimizer": "adam"},
    ],
    ids=str,
)
def test_no_step_of_a_dlrm_copies_between_devices(options, fake):
    task, batch = Recommendation(DLRMConfig(SIZES, 4, 8, (16, 8), (16, 1))), clicks(bags=False)
    fake.place(task)
    batch = fake.batch(batch)
    with fake:
        optimizers, scaled = task.optimizers(OptimizerConfig(**options)), scaler()
        fake.copies = False
        train(task, optimizers, batch, scaled)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *((PreTraining, optimizer) for optimizer in NETWORK_OPTIMIZER_NAMES),
        (QuestionAnswering, "sgd"),
        (SequenceClassification, "sgd"),
    ],
)
def test_a_step_of_a_bert_is_all_on_its_device(kind, optimizer, fake):
    task, (batch,) = kind(small()), TextLoader(Rows(BATCH), BATCH).batches()
    fake.place(task)
    batch = fake.batch(batch)
    with fake:
        optimizers = task.optimizers(NetworkOptimizerConfig(optimizer, weight_decay=0.01))
        train(task, optimizers, batch, scaler(), EMA(task.model, 0.9))


@pytest.mark.parametrize(
    "model", ["resnet50", pytest.param("efficientnet_b0", marks=pytest.mark.slow)]
)
def test_a_step_of_an_image_network_is_all_on_its_device(model, fake, monkeypatch):
    small_images.shrink(monkeypatch.setitem)
    # Without its cache, which would keep a fake tensor.
    monkeypatch.setattr(augment, "_of_channels", augment._of_channels.__wrapped__)
    augmentation = augment.Augmentation(image_size=32, mixup_alpha=0.2, cutmix_lambda=0.85)
    task = ImageClassification(NetworkConfig(model, num_classes=5), augmentation)
    loader = ImageLoader(GeneratedImages(4, 40, 5), 4, num_partners=augmentation.num_partners)
    (batch,) = loader.batches()
    fake.place(task)
    batch = fake.batch(batch)
    with fake:
        optimizers = task.optimizers(NetworkOptimizerConfig("rmsprop_tf"))
        train(task, optimizers, batch, scaler(), EMA(task.model, 0.9))
        assert str(task.predict(batch).device) == NAME
