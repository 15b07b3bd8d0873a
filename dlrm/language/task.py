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

Judged = tuple[Sequence[Tensor], Sequence[Tensor]]


class LanguageTask(NetworkTask):
    """A network for sequences. Batches without padding run without a mask, unless in a graph."""

    network: type[nn.Module]

    def __init__(
        self,
        config: BertConfig,
        precision: PrecisionConfig = PrecisionConfig(),
        execution: ExecutionConfig = ExecutionConfig(),
        world: World = World(),
        seed: int = 0,
    ):
        super().__init__(self.network(config, seed=seed), precision, execution, world)

    def predict(self, batch: TextBatch) -> Any:
        """Returns the network's logits, in float32 or more."""
        return self._logits(self._run(*self._inputs(batch)), batch)

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns the metrics that the subclass describes, among them "loss"."""
        sums: Any = 0
        rows = []
        with self._tested(loader) as batches:
            for batch in batches:
                numbers, kept = self._judged(self.predict(batch), batch)
                sums = sums + torch.stack([number.double() for number in numbers])
                rows.append([tensor.cpu().numpy() for tensor in kept])
        totals = all_sum(sums, self.world).tolist()
        every = [kept for part in gather(rows, self.world) for kept in part]
        metrics = self._metrics(totals, every) if self.world.rank == 0 else {}
        return from_first(metrics, self.world)

    def _problem(self, batch: TextBatch) -> tuple[tuple[Tensor | None, ...], Judge]:
        return self._inputs(batch), lambda output: self._loss(self._logits(output, batch), batch)

    def _inputs(self, batch: TextBatch, is_first: bool = True) -> tuple[Tensor | None, ...]:
        """Returns the inputs of the network or of each part; layers derive a mask from them."""
        lengths = batch.lengths if batch.padded or self._is_graph else None
        return batch.ids, batch.segments, lengths

    def _logits(self, output: Any, batch: TextBatch) -> Any:
        return _widened(output)

    def _loss(self, logits: Any, batch: TextBatch) -> Tensor:
        """Returns these rows' share of the global batch's loss."""
        raise NotImplementedError

    def _judged(self, logits: Any, batch: TextBatch) -> Judged:
        """Returns numbers of a test batch to sum, and tensors with what to keep of each row."""
        raise NotImplementedError

    def _metrics(self, sums: list[float], rows: list[list[np.ndarray]]) -> dict[str, float]:
        """Returns the metrics, given all sums, and the kept arrays of all batches."""
        raise NotImplementedError


class PreTraining(LanguageTask):
    """Prediction of masked tokens, and of whether B follows A in the text (Devlin et al., 2018).

    `evaluate` returns mean cross-entropies, "loss" and that of masked tokens alone, "masked_loss",
    and "masked_accuracy" and "next_sentence_accuracy".
    """

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

    def _logits(self, output: tuple[Tensor, Tensor], batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Returns logits: of masked tokens, `[rows, predictions, vocabulary]`, and `[rows, 2]`."""
        tokens, order = output
        return _widened(tokens), _widened(order)

    def _loss(self, logits: tuple[Tensor, Tensor], batch: TextBatch) -> Tensor:
        """Returns the share of the mean over masked tokens plus the mean over rows."""
        tokens, order = _losses(logits, batch)
        return tokens / max(batch.global_masked, 1) + order / batch.global_size

    def _judged(self, logits: Any, batch: TextBatch) -> Judged:
        tokens, order = logits
        is_masked = batch.masked_ids != NO_TOKEN
        hits = ((tokens.argmax(dim=2) == batch.masked_ids) & is_masked).sum()
        right = (order.argmax(dim=1) == batch.labels).sum()
        return (*_losses(logits, batch), hits, is_masked.sum(), right, _count(batch)), ()

    def _metrics(self, sums: list[float], rows: list[list[np.ndarray]]) -> dict[str, float]:
        tokens_loss, order_loss, hits, masked, right, count = sums
        masked_loss = tokens_loss / max(masked, 1)
        return {
            "masked_accuracy": hits / max(masked, 1),
            "next_sentence_accuracy": right / count,
            "masked_loss": masked_loss,
            "loss": masked_loss + order_loss / count,
        }


def _losses(logits: tuple[Tensor, Tensor], batch: TextBatch) -> tuple[Tensor, Tensor]:
    """Returns the sums over masked tokens and over rows."""
    tokens, order = logits
    wanted = batch.masked_ids.flatten().long()
    of_tokens = _cross_entropy(tokens.flatten(0, 1), wanted, NO_TOKEN)
    return of_tokens, _cross_entropy(order, batch.labels)


class QuestionAnswering(LanguageTask):
    """First and last token of the answer to a question in a passage (SQuAD v1.1).

    `evaluate` returns "f1" and "exact_match", in percent, and the mean cross-entropy "loss".

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

    def _logits(self, output: Tensor, batch: TextBatch) -> Tensor:
        """Returns the logits of being first and last token, `[rows, length, 2]`.

        Those of padding are minus infinity, so that padding does not affect losses.
        """
        logits = _widened(output)
        if not batch.padded:
            return logits
        places = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill((places >= batch.lengths[:, None])[..., None], -torch.inf)

    def _loss(self, logits: Tensor, batch: TextBatch) -> Tensor:
        """Returns the share of the mean cross-entropy over rows and over both ends."""
        return _loss_of_ends(logits, batch.spans) / batch.global_size

    def _judged(self, logits: Tensor, batch: TextBatch) -> Judged:
        sums = _loss_of_ends(logits, batch.spans), _count(batch)
        return sums, (batch.indices, logits.float(), batch.spans)

    def _metrics(self, sums: list[float], rows: list[list[np.ndarray]]) -> dict[str, float]:
        total, count = sums
        length = max(logits.shape[1] for _, logits, _ in rows)
        all_logits = np.full((int(count), length, 2), -np.inf, np.float32)
        all_spans = np.empty((int(count), 2), np.int64)
        for indices, logits, spans in rows:
            all_logits[indices, : logits.shape[1]] = logits
            all_spans[indices] = spans
        starts, ends = all_logits[..., 0], all_logits[..., 1]
        scores = self.scorer(starts, ends) if self.scorer else _overlap(starts, ends, all_spans)
        return {**scores, "loss": total / count}


def _loss_of_ends(logits: Tensor, spans: Tensor) -> Tensor:
    """Returns the sum over rows of the mean over both ends."""
    first, last = (_cross_entropy(logits[..., end], spans[:, end]) for end in (0, 1))
    return (first + last) / 2


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
    """The class of a pair of sequences, paraphrase or not (MRPC).

    `evaluate` returns "accuracy", "f1" of class 1, their mean "accuracy_and_f1", and "loss".
    """

    network = BertForSequenceClassification
    metric = "accuracy_and_f1"

    def _loss(self, logits: Tensor, batch: TextBatch) -> Tensor:
        """Returns the share of the mean cross-entropy."""
        return _cross_entropy(logits, batch.labels) / batch.global_size

    def _judged(self, logits: Tensor, batch: TextBatch) -> Judged:
        sums = _cross_entropy(logits, batch.labels), _count(batch)
        return sums, (batch.labels, logits.argmax(dim=1))

    def _metrics(self, sums: list[float], rows: list[list[np.ndarray]]) -> dict[str, float]:
        true, found = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        loss, count = sums
        return {**accuracy_and_f1(true, found), "loss": loss / count}


def _count(batch: TextBatch) -> Tensor:
    return batch.lengths.new_tensor(len(batch.lengths))


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """Returns the sum over rows."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignored)


def _widened(logits: Tensor) -> Tensor:
    """Returns logits in float32 or more, for losses."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
