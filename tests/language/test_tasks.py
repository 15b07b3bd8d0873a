"""Language tasks: losses, metrics; accumulation, graphs and recomputation agree."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from network_runs import learns, losses_of
from small_texts import LENGTH, STILL, WORDS, Rows, small

from dlrm.distributed import World
from dlrm.language.loader import NO_TOKEN, TextLoader
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.train.config import PrecisionConfig
from dlrm.train.optim.config import NetworkOptimizerConfig

pytestmark = pytest.mark.long
TASKS = [PreTraining, QuestionAnswering, SequenceClassification]


def make(kind, dropout=False, double=True, device="cpu", **options):
    task = kind(small(**({} if dropout else STILL)), world=World(device=device), **options)
    if double:
        task.model.double()
    return task


def batches(count=3, size=8, padded=True, device="cpu", **options):
    rows, world = Rows(count * size, padded=padded), World(device=device)
    return list(TextLoader(rows, size, world=world, **options).batches())


def plain(task, batch):
    """Returns the network's own outputs, always masked; answers in padding get -inf."""
    logits = task.model(batch.ids, batch.segments, batch.lengths)
    if logits.ndim == 2:
        return logits
    inside = torch.arange(logits.shape[1], device=logits.device) < batch.lengths[:, None]
    return torch.where(inside[..., None], logits, -torch.inf)


def test_the_loss_of_pretraining_is_the_mean_over_masked_tokens_and_that_over_rows(device):
    task, (batch,) = make(PreTraining, device=device), batches(1, device=device)
    tokens, order = task.model(batch.ids, batch.segments, batch.lengths, batch.masked_positions)
    likelihoods, wanted = tokens.log_softmax(2), []
    for row, place in (batch.masked_ids != NO_TOKEN).nonzero().tolist():
        wanted.append(-likelihoods[row, place, batch.masked_ids[row, place]])
    pair = -order.log_softmax(1)[torch.arange(8, device=device), batch.labels]
    torch.testing.assert_close(task.loss(batch), torch.stack(wanted).mean() + pair.mean())


def test_the_loss_of_question_answering_is_the_mean_of_both_ends(device):
    task, (batch,) = make(QuestionAnswering, device=device), batches(1, device=device)
    likelihoods = plain(task, batch).log_softmax(1)
    rows = torch.arange(8, device=device)
    first, last = (-likelihoods[rows, batch.spans[:, end], end] for end in (0, 1))
    torch.testing.assert_close(task.loss(batch), (first.mean() + last.mean()) / 2)


def test_the_loss_of_classification_is_torchs_cross_entropy(device):
    task, (batch,) = make(SequenceClassification, device=device), batches(1, device=device)
    torch.testing.assert_close(task.loss(batch), F.cross_entropy(plain(task, batch), batch.labels))


@pytest.mark.parametrize("kind", TASKS)
def test_padding_and_what_is_beyond_it_change_nothing(kind, device):
    task = make(kind, device=device)
    (cut,), (whole,) = (batches(1, size=6, device=device, cut=cut) for cut in (True, False))
    assert cut.ids.shape[1] <= whole.ids.shape[1] == LENGTH
    torch.testing.assert_close(task.loss(cut), task.loss(whole))
    outside = torch.arange(LENGTH, device=device) >= whole.lengths[:, None]
    garbage = whole.ids.masked_fill(outside, WORDS - 1)
    torch.testing.assert_close(task.loss(whole._replace(ids=garbage)), task.loss(whole))


@pytest.mark.parametrize("kind", TASKS)
def test_rows_without_padding_run_without_a_mask(kind, monkeypatch):
    task, (batch,) = make(kind), batches(1, padded=False)
    masks = []
    attention = F.scaled_dot_product_attention

    def watched(query, key, value, mask=None, *rest):
        masks.append(mask)
        return attention(query, key, value, mask, *rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert not batch.padded
    without = task.loss(batch)
    assert masks == [None, None]
    torch.testing.assert_close(without, task.loss(batch._replace(on_host=None)))
    assert None not in masks[2:]


def train(task, parts=1, size=8, steps=3, lr=0.05, loader=None):
    """Losses of a few steps of Adam."""
    given = batches(steps, size, device=task.world.device, **(loader or {}))
    return losses_of(task, given, NetworkOptimizerConfig("adamw", weight_decay=0.01), lr, parts)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("parts", [2, 3])
def test_accumulation_equals_one_batch(kind, parts, device):
    whole, cut = make(kind, device=device), make(kind, device=device)
    assert train(cut, parts) == pytest.approx(train(whole), rel=1e-12)
    for actual, wanted in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        # Adam magnifies the rounding of gradients near 0.
        torch.testing.assert_close(actual, wanted, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("half", [None, "bf16", "fp16"])
def test_every_precision_learns(kind, half, device):
    config = PrecisionConfig(half is not None, half, 64.0)
    task = make(kind, double=False, precision=config, device=device)
    (batch,) = batches(1, device=device)
    learns(task, batch, NetworkOptimizerConfig("adamw", optimizer_eps=1e-6), 0.01)


def test_evaluation_of_pretraining_is_over_masked_tokens_and_rows(device):
    task, source = make(PreTraining, dropout=True, device=device), Rows(11)
    metrics = task.evaluate(TextLoader(source, 4, world=task.world))
    (batch,) = TextLoader(source, 11, world=task.world).batches()
    task.model.eval()
    tokens, order = task.model(batch.ids, batch.segments, batch.lengths, batch.masked_positions)
    is_masked = batch.masked_ids != NO_TOKEN
    tokens, wanted = tokens[is_masked], batch.masked_ids[is_masked].long()
    expected = {
        "masked_accuracy": (tokens.argmax(1) == wanted).double().mean(),
        "next_sentence_accuracy": (order.argmax(1) == batch.labels).double().mean(),
        "masked_loss": F.cross_entropy(tokens, wanted),
        "loss": F.cross_entropy(tokens, wanted) + F.cross_entropy(order, batch.labels),
    }
    assert metrics == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-6)
    assert 0 < metrics["next_sentence_accuracy"] < 1


def test_evaluation_of_classification_gives_accuracy_and_f1_of_the_positive_class(device):
    from sklearn.metrics import accuracy_score, f1_score

    task, source = make(SequenceClassification, dropout=True, device=device), Rows(31)
    with torch.no_grad():  # so that both classes are found
        task.model.classifier.weight.mul_(100)
    metrics = task.evaluate(TextLoader(source, 4, world=task.world))
    assert task.model.training
    (batch,) = TextLoader(source, 31, world=task.world).batches()
    task.model.eval()
    logits = plain(task, batch)
    found, labels = logits.argmax(1).tolist(), batch.labels.tolist()
    accuracy, f1 = accuracy_score(labels, found), f1_score(labels, found)
    assert 0 < f1 < 1
    expected = {"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2}
    expected["loss"] = F.cross_entropy(logits, batch.labels).item()
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_scorer_gets_the_logits_of_all_rows_in_their_order(device):
    seen = []

    def scorer(starts, ends):
        seen.append((starts, ends))
        return {"exact_match": 25.0, "f1": 50.0}

    task = make(QuestionAnswering, dropout=True, scorer=scorer, device=device)
    source = Rows(11)
    metrics = task.evaluate(TextLoader(source, 4, window=3, world=task.world))
    (batch,) = TextLoader(source, 11, world=task.world).batches()
    task.model.eval()
    logits = plain(task, batch)
    ((starts, ends),) = seen
    inside = np.arange(starts.shape[1]) < source.lengths[:, None]
    for actual, wanted in ((starts, logits[..., 0]), (ends, logits[..., 1])):
        wanted = wanted.detach().cpu().numpy()[:, : actual.shape[1]]
        np.testing.assert_allclose(actual[inside], wanted[inside], rtol=1e-5, atol=1e-6)
    loss = sum(F.cross_entropy(logits[..., end], batch.spans[:, end]) for end in (0, 1)) / 2
    assert metrics == pytest.approx({"exact_match": 25, "f1": 50, "loss": loss.item()}, rel=1e-6)


def test_without_a_scorer_the_likeliest_tokens_are_compared():
    task, source = make(QuestionAnswering), Rows(3)
    source._spans[:] = [[2, 4], [3, 3], [1, 2]]
    answers = [(2, 4), (2, 4), (5, 6)]

    def predict(batch):
        logits = torch.zeros(*batch.ids.shape, 2)
        for row, index in enumerate(batch.indices.tolist()):
            for end in (0, 1):
                logits[row, answers[index][end], end] = 9
        return logits

    task.predict = predict
    metrics = task.evaluate(TextLoader(source, 2))
    assert metrics["exact_match"] == pytest.approx(100 / 3)
    assert metrics["f1"] == pytest.approx(100 * (1 + 2 / 4 + 0) / 3)
