"""Language: BERT's pre-training, question answering over a passage, and pairs of sentences."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.distributed import World, all_sum, from_first, gather
from dlrm.language.bert import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)
from dlrm.language.loader import NO_TOKEN, TextBatch
from dlrm.language.pairs import accuracy_and_f1
from dlrm.tasks.networks.task import Judge, NetworkTask
from dlrm.train.config import ExecutionConfig, PrecisionConfig
from dlrm.train.log import Loader

# Logits of windows' first and last tokens of answers, `[windows, length]` -> metrics.
Scorer = Callable[[np.ndarray, np.ndarray], dict[str, float]]


class LanguageTask(NetworkTask):
    """A network for sequences. Batches without padding run without a mask, unless in a graph.

    Args:
        head: further arguments of the network.
    """

    network: type[nn.Module]

    def __init__(
        self,
        config: BertConfig,
        precision: PrecisionConfig = PrecisionConfig(),
        execution: ExecutionConfig = ExecutionConfig(),
        world: World = World(),
        seed: int = 0,
        **head: Any,
    ):
        super().__init__(self.network(config, seed=seed, **head), precision, execution, world)

    def _problem(self, batch: TextBatch) -> tuple[tuple[Tensor | None, ...], Judge]:
        return self._inputs(batch), lambda output: self._loss(output, batch)

    def _inputs(self, batch: TextBatch, is_first: bool = True) -> tuple[Tensor | None, ...]:
        """Returns the inputs of the network or of each part; layers derive a mask from them."""
        lengths = batch.lengths if batch.padded or self._is_graph else None
        return batch.ids, batch.segments, lengths

    def _loss(self, output: Any, batch: TextBatch) -> Tensor:
        """Returns these rows' share of the global batch's loss, from the network's output."""
        raise NotImplementedError


class PreTraining(LanguageTask):
    """Prediction of masked tokens, and of whether B follows A in the text (Devlin et al., 2018)."""

    network = BertForPreTraining
    metric = "masked_accuracy"

    def divide(self, parts: World, splits: Sequence[str], schedule: str) -> None:
        """Divides the network; see `NetworkTask.divide`.

        The first part, which looks words up, and the last, which decodes masked tokens, both hold
        the table of words. Both update it with the sum of their gradients.
        """
        if "head" in splits:
            raise ValueError(
                f"--pipeline_splits {','.join(splits)}: the head of pre-training takes the outputs "
                "of the pooler and of the last layer: expected pooler or a layer, and not head"
            )
        super().divide(parts, splits, schedule)

    def _shared_weights(self) -> list[nn.Parameter]:
        return [self.model.get_parameter("bert.embeddings.word_embeddings.weight")]

    def _inputs(self, batch: TextBatch, is_first: bool = True) -> tuple[Tensor | None, ...]:
        return *super()._inputs(batch), batch.masked_positions

    def _loss(self, output: tuple[Tensor, Tensor], batch: TextBatch) -> Tensor:
        """Returns these rows' share of the sum of two mean cross-entropies of the global batch.

        One is the mean over its masked tokens, the other over its rows.
        """
        tokens, order = map(_widened, output)
        return (
            _masked_loss(tokens, batch) / max(batch.global_masked, 1)
            + _cross_entropy(order, batch.labels) / batch.global_size
        )

    def predict(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Returns logits: of masked tokens, `[rows, predictions, vocabulary]`, and `[rows, 2]`."""
        tokens, order = self._run(*self._inputs(batch))
        return _widened(tokens), _widened(order)

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns mean cross-entropies, also of masked tokens alone, and accuracies.

        They are "loss", "masked_loss", "masked_accuracy" and "next_sentence_accuracy".
        """
        sums = torch.zeros(6, dtype=torch.float64, device=self.world.device)
        with self._tested(loader) as batches:
            for batch in batches:
                tokens, order = self.predict(batch)
                is_masked = batch.masked_ids != NO_TOKEN
                parts = (
                    _masked_loss(tokens, batch),
                    ((tokens.argmax(dim=2) == batch.masked_ids) & is_masked).sum(),
                    is_masked.sum(),
                    _cross_entropy(order, batch.labels),
                    (order.argmax(dim=1) == batch.labels).sum(),
                    batch.labels.new_tensor(len(batch.labels)),
                )
                sums += torch.stack([part.double() for part in parts])
        tokens_loss, hits, masked, order_loss, right, rows = all_sum(sums, self.world).tolist()
        masked_loss = tokens_loss / max(masked, 1)
        return {
            "masked_accuracy": hits / max(masked, 1),
            "next_sentence_accuracy": right / rows,
            "masked_loss": masked_loss,
            "loss": masked_loss + order_loss / rows,
        }


def _masked_loss(tokens: Tensor, batch: TextBatch) -> Tensor:
    return _cross_entropy(tokens.flatten(0, 1), batch.masked_ids.flatten().long(), NO_TOKEN)


class QuestionAnswering(LanguageTask):
    """First and last token of the answer to a question in a passage (SQuAD v1.1).

    Args:
        scorer: computes metrics from the logits of all rows of a test set, in its order, among them
            "f1" and "exact_match" in percent. None compares the likeliest tokens to the true ones.
        others: see `LanguageTask`.
    """

    network = BertForQuestionAnswering
    metric = "f1"

    def __init__(self, config: BertConfig, scorer: Scorer | None = None, **others: Any):
        super().__init__(config, **others)
        self.scorer = scorer

    def _loss(self, output: Tensor, batch: TextBatch) -> Tensor:
        """Returns these rows' share of the mean cross-entropy over rows and over both ends.

        It covers a row's tokens without its padding. An end outside these adds 0.
        """
        return self._total(_without_padding(output, batch), batch) / batch.global_size

    def predict(self, batch: TextBatch) -> Tensor:
        """Returns the logits of being first and last token, `[rows, length, 2]`.

        Logits of padding are minus infinity, so that padding does not affect losses.
        """
        return _without_padding(self._run(*self._inputs(batch)), batch)

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns "f1" and "exact_match", in percent, and the mean cross-entropy "loss"."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        answers = []
        with self._tested(loader) as batches:
            for batch in batches:
                logits = self.predict(batch)
                rows = sums.new_tensor(len(batch.spans))
                sums += torch.stack([self._total(logits, batch).double(), rows])
                found = (batch.indices, logits.float(), batch.spans)
                answers.append([tensor.cpu().numpy() for tensor in found])
        total, count = all_sum(sums, self.world).tolist()
        gathered = gather(answers, self.world)
        metrics: dict[str, float] = {}
        if self.world.rank == 0:
            all_logits, all_spans = _in_order([answer for part in gathered for answer in part])
            starts, ends = all_logits[..., 0], all_logits[..., 1]
            metrics = (
                self.scorer(starts, ends) if self.scorer else _overlap(starts, ends, all_spans)
            )
        return {**from_first(metrics, self.world), "loss": total / count}

    @staticmethod
    def _total(logits: Tensor, batch: TextBatch) -> Tensor:
        """Returns the sum over rows."""
        length = logits.shape[1]
        inside = batch.spans < batch.lengths[:, None]
        spans = batch.spans.where(inside, length)  # an ignored index
        losses = (_cross_entropy(logits[..., end], spans[:, end], length) for end in (0, 1))
        return sum(losses, logits.new_zeros(())) / 2


def _without_padding(output: Tensor, batch: TextBatch) -> Tensor:
    """Returns logits of tokens, `[rows, length, 2]`, minus infinity in the padding."""
    logits = _widened(output)
    if not batch.padded:
        return logits
    places = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill((places >= batch.lengths[:, None])[..., None], -torch.inf)


def _in_order(answers: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Puts rows that came as (indices, logits, spans) in the order of the test set.

    Rows of shorter batches are padded with logits of minus infinity.
    """
    rows = sum(len(indices) for indices, *_ in answers)
    length = max(logits.shape[1] for _, logits, _ in answers)
    all_logits = np.full((rows, length, 2), -np.inf, np.float32)
    all_spans = np.empty((rows, 2), np.int64)
    for indices, logits, spans in answers:
        all_logits[indices, : logits.shape[1]] = logits
        all_spans[indices] = spans
    return all_logits, all_spans


def _overlap(starts: np.ndarray, ends: np.ndarray, spans: np.ndarray) -> dict[str, float]:
    """Compares the likeliest first and last tokens with the true ones, in percent."""
    first, last = starts.argmax(axis=1), ends.argmax(axis=1)
    shared = np.minimum(last, spans[:, 1]) - np.maximum(first, spans[:, 0]) + 1
    both = np.maximum(last - first + 1, 0) + spans[:, 1] - spans[:, 0] + 1
    exact = (first == spans[:, 0]) & (last == spans[:, 1])
    return {
        "exact_match": 100 * float(exact.mean()),
        "f1": 100 * float((2 * np.maximum(shared, 0) / both).mean()),
    }


class SequenceClassification(LanguageTask):
    """The class of a sequence, or of a pair, such as paraphrase or not (MRPC).

    `num_labels` is the number of classes, 2 if it is not given.
    """

    network = BertForSequenceClassification
    metric = "accuracy_and_f1"

    def _loss(self, output: Tensor, batch: TextBatch) -> Tensor:
        """Returns these rows' share of the mean cross-entropy of the global batch."""
        return _cross_entropy(_widened(output), batch.labels) / batch.global_size

    def predict(self, batch: TextBatch) -> Tensor:
        """Returns the logits of the classes, `[rows, num_labels]`."""
        return _widened(self._run(*self._inputs(batch)))

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns "accuracy", "f1" of class 1, their mean "accuracy_and_f1", and "loss"."""
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        answers = []
        with self._tested(loader) as batches:
            for batch in batches:
                logits, labels = self.predict(batch), batch.labels
                loss += _cross_entropy(logits, labels)
                answers.append([t.cpu().numpy() for t in (labels, logits.argmax(dim=1))])
        everything = [answer for part in gather(answers, self.world) for answer in part]
        true, found = (np.concatenate(arrays) for arrays in zip(*everything, strict=True))
        mean = all_sum(loss, self.world).item() / len(true)
        return {**accuracy_and_f1(true, found), "loss": mean}


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """Returns the sum over rows."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignored)


def _widened(logits: Tensor) -> Tensor:
    """Returns logits in float32 or more, for losses."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
