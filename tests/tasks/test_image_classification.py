"""Image classification: loss, evaluation; accumulation, graphs and recomputation agree."""

import pytest
import small_images
import torch
import torch.nn.functional as F
from network_runs import learns, losses_of

from dlrm.distributed import World
from dlrm.metrics.table import METRICS
from dlrm.train.config import ExecutionConfig, PrecisionConfig
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.vision.augmentation import Augmentation, Prepared
from dlrm.vision.loader import GeneratedImages, ImageLoader
from dlrm.vision.task import ImageClassification, ImageLossConfig, NetworkConfig

pytestmark = pytest.mark.long
SIZE, CLASSES = 32, 11


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_images.shrink(monkeypatch.setitem)


def task(augment=None, loss=None, **options) -> ImageClassification:
    network = {"model": "efficientnet_b0", "norm": "group", "dropout": 0.0, "drop_path": 0.0}
    network |= options.pop("network", {})
    return ImageClassification(
        NetworkConfig(num_classes=CLASSES, **network),
        Augmentation(image_size=SIZE, **(augment or {})),
        ImageLossConfig(**(loss or {})),
        **options,
    )


def loader(batch_size=8, images=24, partners=0, **options) -> ImageLoader:
    return ImageLoader(
        GeneratedImages(images, SIZE, CLASSES), batch_size, num_partners=partners, **options
    )


def train(task, steps=3, parts=1, batch_size=8, partners=0, double=False):
    """Losses of a few steps."""
    if double:
        task.model.double()
        original = task.augmentation.train
        object.__setattr__(task, "augmentation", Doubled(task.augmentation, original))
    batches = loader(batch_size, batch_size * steps, partners, world=task.world).batches()
    return losses_of(
        task, batches, NetworkOptimizerConfig("momentum", weight_decay=1e-4), 0.005, parts
    )


class Doubled:
    """An augmentation whose images are float64."""

    def __init__(self, inner, train):
        self.num_partners, self._train = inner.num_partners, train

    def train(self, batch):
        prepared = self._train(batch)
        return prepared._replace(images=prepared.images.double(), weights=prepared.weights.double())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_cross_entropy(smoothing):
    logits, labels = torch.randn(6, CLASSES), torch.randint(CLASSES, (6,))
    prepared = Prepared(torch.empty(0), labels[:, None], torch.ones(6, 1))
    config = ImageLossConfig(label_smoothing=smoothing)
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(config.total(logits, prepared), expected)


def test_tensorflows_smoothing_leaves_the_label_what_it_takes_from_it():
    logits, labels = torch.randn(6, CLASSES), torch.randint(CLASSES, (6,))
    prepared = Prepared(torch.empty(0), labels[:, None], torch.ones(6, 1))
    targets = torch.full((6, CLASSES), 0.1 / (CLASSES - 1)).scatter_(1, labels[:, None], 0.9)
    config = ImageLossConfig(0.1, "tf")
    expected = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(config.total(logits, prepared), expected)


def test_mixed_labels_are_mixed_losses():
    logits = torch.randn(4, CLASSES)
    labels = torch.randint(CLASSES, (4, 2))
    weights = torch.tensor([[0.7, 0.3]]).expand(4, 2)
    prepared = Prepared(torch.empty(0), labels, weights)
    config = ImageLossConfig(0.1)
    mixed = torch.zeros(4, CLASSES).scatter_add_(1, labels, weights)
    targets = 0.9 * mixed + 0.1 / CLASSES
    expected = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(config.total(logits, prepared), expected)


@pytest.mark.parametrize("batch_size", [4, 5, 24])
def test_evaluation_counts_hits_whatever_the_batches(batch_size, device):
    world = World(device=device)
    subject = task(world=world).model.eval()
    (images,) = loader(24, world=world).batches()
    labels = images.labels
    classifier = task(world=world)
    with torch.no_grad():
        logits = subject(classifier.augmentation.evaluate(images))
    ranked = logits.argsort(dim=1, descending=True)
    found = classifier.evaluate(loader(batch_size, world=world))
    assert classifier.metric in found.keys() <= METRICS.keys()
    assert found["top1"] == (ranked[:, 0] == labels).sum().item() / 24
    assert found["top5"] == (ranked[:, :5] == labels[:, None]).any(1).sum().item() / 24
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_network_is_tested_in_evaluation_mode_and_goes_on_as_before():
    tested, modes = task(), []
    tested.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    for training in (True, False):
        tested.model.train(training)
        tested.evaluate(loader(12))
        assert tested.model.training is training
    assert modes == [False] * 4


@pytest.mark.parametrize("augment", [{}, {"mixup_alpha": 0.2, "cutmix_lambda": 0.85}])
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_one_batch_with_group_norm(parts, augment, device):
    network = {"group_dim": 64}  # torch is slow at depthwise convolutions of float64
    whole, cut = (task(augment, network=network, world=World(device=device)) for _ in range(2))
    partners = whole.augmentation.num_partners
    expected = train(whole, double=True, partners=partners)
    assert train(cut, parts=parts, double=True, partners=partners) == pytest.approx(expected, 1e-12)
    for actual, wanted in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)


RESNET = {"model": "resnet50", "dropout": None, "drop_path": None}
DROPPING = {"dropout": 0.2, "drop_path": 0.2}


@pytest.mark.parametrize("network", [RESNET | {"norm": "batch"}, DROPPING])
def test_recomputation_gives_the_same_losses(network):
    plain = train(task(network=network, execution=ExecutionConfig()))
    assert train(task(network=network, execution=ExecutionConfig(recompute=True))) == plain


@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
def test_every_precision_learns(half, device):
    config, world = PrecisionConfig(half is not None, half, 128.0), World(device=device)
    subject = task(precision=config, network={"norm": "group"}, world=world)
    batch = next(loader(world=world).batches())
    assert learns(subject, batch, NetworkOptimizerConfig("momentum"), 0.005) == ""


def test_channels_last_changes_no_loss(device):
    options = {"network": {"norm": "batch"}, "world": World(device=device)}
    expected = train(task(**options))
    actual = train(task(**options, channels_last=True))
    assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NetworkConfig("vgg"), "--model vgg: expected one of resnet50"),
        (lambda: NetworkConfig("resnet50", group_dim=16), "--group_dim 16: resnet50 has none"),
        (lambda: NetworkConfig("efficientnet_b0", zero_init_residual=True), "--zero_init_residual"),
        (lambda: NetworkConfig("resnet50", dropout=0.0), "--dropout 0.0: resnet50 has none"),
        (lambda: NetworkConfig("resnet50", width=0.25), "--width 0.25: resnet50 has none"),
        (lambda: NetworkConfig("efficientnet_b4", depths=(1, 1, 1, 1)), "--depths 1,1,1,1: eff"),
        (lambda: NetworkConfig(depths=(3, 4, 6)), "--depths 3,4,6: expected four numbers"),
        (lambda: NetworkConfig(depths=(3, 4, 6, 0)), "--depths 3,4,6,0: expected 1 or more"),
        (lambda: NetworkConfig(norm="layer"), "--norm layer: expected one of batch, group"),
        (lambda: NetworkConfig("efficientnet_b0", width=0.0), "--width 0.0: expected a number ab"),
        (
            lambda: NetworkConfig("efficientnet_b0", group_dim=0),
            "--group_dim 0: expected 1 or more",
        ),
        (lambda: NetworkConfig("efficientnet_b0", dropout=1.0), "--dropout 1.0: .* less than 1"),
        (lambda: ImageLossConfig(1.0), "--label_smoothing 1.0"),
        (lambda: ImageLossConfig(0.1, "keras"), "--label_smoothing_style keras"),
    ],
)
def test_impossible_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
