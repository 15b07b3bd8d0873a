"""SQuAD v1.1: questions about paragraphs, in windows, and answers from a model's logits.

Rows are those of BERT's paper and program: [CLS] question [SEP] window [SEP], with a window of the
context every `doc_stride` tokens. The answer is the best start and end in any of them.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.documents import brief, read_json
from dlrm.language.loader import TextBatch
from dlrm.language.wordpiece import Tokenizer

_NUM_BEST = 20  # starts and ends of a window that are paired
_MAX_ANSWER_LENGTH = 30  # tokens


class Question(NamedTuple):
    """A question, its paragraph, and the answers that people gave.

    Attributes:
        context: the paragraph; questions about the same one share the string.
        answers: texts of the context, with the index of their first character there.
        place: its location in the file and its id, for errors.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    place: str = ""


def read_squad(path: str | Path) -> list[Question]:
    """Returns the questions of a file in SQuAD's JSON format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, a field is missing or of another type, a context is empty,
            a question has no answer, or an id occurs twice; the message names file and place.
    """
    questions: dict[str, Question] = {}
    for question in _questions(read_json(path, object), f"{path}"):
        if question.id in questions:
            first = questions[question.id].place
            raise ValueError(f"{question.place}: the id is there twice, first in {first}")
        questions[question.id] = question
    if not questions:
        raise ValueError(f"{path}: expected at least one question, got none")
    return list(questions.values())


def _questions(content: Any, path: str) -> Iterator[Question]:
    for i, article in enumerate(_field(content, "data", list, path)):
        for j, paragraph in enumerate(_field(article, "paragraphs", list, f"{path}: article {i}")):
            place = f"{path}: article {i}, paragraph {j}"
            context = _field(paragraph, "context", str, place)
            if not context.strip():
                raise ValueError(f"{place}: expected a context, got an empty one")
            for k, entry in enumerate(_field(paragraph, "qas", list, place)):
                here = f"{place}, question {k}"
                id, asked = (_field(entry, name, str, here) for name in ("id", "question"))
                here += f" ({brief(id)})"
                answers = [
                    (_field(one, "text", str, here), _field(one, "answer_start", int, here))
                    for one in _field(entry, "answers", list, here)
                ]
                if not answers:
                    raise ValueError(f"{here}: expected at least one answer, got none")
                yield Question(id, asked, context, tuple(answers), here)


def _field(record: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(record, dict) or name not in record:
        raise ValueError(f"{place}: expected an object with {name}, got {brief(record)}")
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {list: "a list", str: "a text", int: "an integer"}[kind]
        raise ValueError(f"{place}: {name}: expected {expected}, got {brief(value)}")
    if isinstance(value, str) and (half := re.search("[\ud800-\udfff]", value)):
        at = f"{place}: {name}, character {half.start()}"
        raise ValueError(f"{at}: expected a character, got half of a surrogate pair")
    return value


class SquadFeatures:
    """Windows of questions and contexts: a `TextSource`.

    The span of a window is the tokens of the question's first answer in the window's row; 0 and 0
    if the window does not contain all of it.

    Args:
        max_seq_length: tokens of a row.
        doc_stride: tokens between the starts of two windows of a context.
        max_query_length: maximum tokens of a question; the rest is cut off.

    Attributes:
        question_of_window: index of each window's question, ascending, `[windows]`.
        first_places: index of the first token of the context in each row, `[windows]`.
        window_starts: token of its context that each window begins with, `[windows]`.
        window_lengths: tokens of the context in each window, `[windows]`.

    Raises:
        ValueError: lengths are impossible, a context has no token, or an answer is not in its
            context; the message names flag and value, or the question.
    """

    num_masked: np.ndarray | None = None

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        max_seq_length: int = 384,
        doc_stride: int = 128,
        max_query_length: int = 64,
    ) -> None:
        if max_seq_length < max_query_length + 4:
            raise ValueError(
                f"--max_seq_length {max_seq_length}: expected at least --max_query_length "
                f"{max_query_length} and 4 more"
            )
        self.questions, self.length, self._tokenizer = questions, max_seq_length, tokenizer
        numbers: dict[str, int] = {}
        self._context_of = np.array(
            [numbers.setdefault(question.context, len(numbers)) for question in questions], np.int64
        )
        self._contexts = tokenizer.encode(numbers, spans=True)
        self._asked = tokenizer.encode(question.question for question in questions)
        self._asked_lengths = np.minimum(self._asked.lengths, max_query_length)
        tokens = self._contexts.lengths[self._context_of]
        if not tokens.all():
            raise ValueError(f"{questions[int(tokens.argmin())].place}: the context has no token")
        room = max_seq_length - 3 - self._asked_lengths
        step = np.minimum(room, doc_stride)
        counts = 1 + np.maximum(0, -(-(tokens - room) // step))
        self.question_of_window = question = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(question)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.window_starts = number * step[question]
        self.window_lengths = np.minimum(room[question], tokens[question] - self.window_starts)
        self.first_places = self._asked_lengths[question] + 2
        self.num_samples = len(question)
        self.lengths = self.first_places + self.window_lengths + 1
        answers = np.array([self._answer_tokens(n) for n in range(len(questions))], np.int64)
        spans = answers[question] - self.window_starts[:, None]
        inside = (spans[:, 0] >= 0) & (spans[:, 1] < self.window_lengths)
        self._spans = np.where(inside[:, None], spans + self.first_places[:, None], 0)

    def _answer_tokens(self, number: int) -> tuple[int, int]:
        """Returns first and last token of a question's answer in its context."""
        question = self.questions[number]
        text, begin = question.answers[0]
        quoted = question.context[max(begin, 0) : max(begin, 0) + len(text)]
        if begin < 0 or quoted != text or not text.strip():
            raise ValueError(
                f"{question.place}: the answer {text!r} is not at character {begin} of its "
                f"context, which has {quoted!r} there"
            )
        end = begin + len(text.rstrip())
        begin += len(text) - len(text.lstrip())
        spans = self.token_spans(number)
        first = int(np.searchsorted(spans[:, 1], begin, "right"))
        last = int(np.searchsorted(spans[:, 0], end)) - 1
        if last < first:
            raise ValueError(f"{question.place}: no token in the answer {text!r}")
        return first, last

    def token_spans(self, question: int) -> np.ndarray:
        """Returns the characters of each token of a question's context, `[tokens, 2]`."""
        context = self._context_of[question]
        start = self._contexts.starts[context]
        return self._contexts.spans[start : start + self._contexts.lengths[context]]

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns windows; see `TextSource.read`."""
        question = self.question_of_window[rows]
        asked = self._asked.part(question, 0, self._asked_lengths[question])
        contexts = self._context_of[question]
        window = self._contexts.part(contexts, self.window_starts[rows], self.window_lengths[rows])
        joined = self._tokenizer.join_pairs(asked, window, self.length)
        return TextBatch.of(rows, *joined, spans=self._spans[rows])


class AnswerScorer:
    """Exact match and F1 of answers to the questions of a test set.

    Attributes:
        answers: the last answers, by id.
    """

    def __init__(self, features: SquadFeatures) -> None:
        self._features = features
        self.answers: dict[str, str] = {}

    def __call__(self, starts: np.ndarray, ends: np.ndarray) -> dict[str, float]:
        """Returns the metrics of logits; see `predict_answers` and `exact_match_and_f1`."""
        self.answers = predict_answers(self._features, starts, ends)
        return exact_match_and_f1(self._features.questions, self.answers)


def predict_answers(
    features: SquadFeatures, start_logits: np.ndarray, end_logits: np.ndarray
) -> dict[str, str]:
    """Returns the answer to each question by its id, as a text of the context.

    Of every window the 20 best starts are paired with the 20 best ends. A pair counts if both are
    tokens of the context, no other window has more context around the start, and the answer has at
    most 30 tokens. The pair with the greatest sum is the answer; without a pair the answer is "".

    Args:
        start_logits: logits of every token of every window, `[windows, length]`; those after a
            window's own tokens are ignored, and may be missing.
        end_logits: the same for ends.

    Raises:
        ValueError: a logit is NaN or infinite; the message names the window.
    """
    answers = {question.id: "" for question in features.questions}
    edges = np.searchsorted(features.question_of_window, np.arange(len(answers) + 1)).tolist()
    for number, (first, last) in enumerate(pairwise(edges)):
        best, window_of = (-np.inf, 0, 0), _window_of_most_context(features, slice(first, last))
        for row in range(first, last):
            pair = _best_pair(features, row, start_logits[row], end_logits[row], window_of)
            best = pair if pair[0] > best[0] else best
        if best[0] > -np.inf:
            answers[features.questions[number].id] = _text(features, number, *best[1:])
    return answers


def _best_pair(
    features: SquadFeatures,
    row: int,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    window_of: np.ndarray,
) -> tuple[float, int, int]:
    """Returns sum, first and last token of a window's best pair; the sum is -inf without a pair."""
    place, begin = features.first_places[row], features.window_starts[row]
    logits = np.stack([start_logits, end_logits])[:, : features.lengths[row]].astype(np.float64)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise ValueError(f"logits of window {row}: expected finite numbers, got {logits.max()}")
    best = np.argsort(-logits, axis=1, kind="stable")[:, :_NUM_BEST]
    allowed = np.full(logits.shape, -np.inf)
    context = slice(place, place + features.window_lengths[row])
    has_most = window_of[begin:][: features.window_lengths[row]] == row
    allowed[0, context] = np.where(has_most, logits[0, context], -np.inf)
    allowed[1, context] = logits[1, context]
    (starts, ends), values = best, np.take_along_axis(allowed, best, axis=1)
    totals = values[0][:, None] + values[1]
    lengths = ends - starts[:, None] + 1
    totals[(lengths < 1) | (lengths > _MAX_ANSWER_LENGTH)] = -np.inf
    start, end = np.unravel_index(totals.argmax(), totals.shape)
    offset = begin - place
    return float(totals[start, end]), int(starts[start] + offset), int(ends[end] + offset)


def _window_of_most_context(features: SquadFeatures, rows: slice) -> np.ndarray:
    """Returns which of a question's windows has most context around each token of its context.

    Context is the smaller number of tokens to the left and right, plus a hundredth of the window's
    length; of equal windows, the first counts.
    """
    starts, lengths = features.window_starts[rows], features.window_lengths[rows]
    left = np.arange(starts[-1] + lengths[-1]) - starts[:, None]
    right = lengths[:, None] - 1 - left
    scores = np.minimum(left, right) + 0.01 * lengths[:, None]
    return rows.start + np.where((left >= 0) & (right >= 0), scores, -np.inf).argmax(axis=0)


def _text(features: SquadFeatures, question: int, first: int, last: int) -> str:
    """Returns the text of tokens in the original context, including accents that they lost."""
    spans, context = features.token_spans(question), features.questions[question].context
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[begin:end]


def exact_match_and_f1(
    questions: Sequence[Question], answers: Mapping[str, str]
) -> dict[str, float]:
    """Returns `exact_match` and `f1` in percent, by SQuAD's definitions.

    Texts are compared in lower case, without punctuation, articles and extra spaces; F1 is that of
    their words. The best of a question's answers counts; a question not in `answers` gets 0.
    """
    exact = f1 = 0.0
    for question in questions:
        if question.id in answers:
            words = _words(answers[question.id])
            gold = [_words(text) for text, _ in question.answers]
            exact += max(words == right for right in gold)
            f1 += max(_f1(words, right) for right in gold)
    return {"exact_match": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _f1(words: list[str], gold: list[str]) -> float:
    common = sum((Counter(words) & Counter(gold)).values())
    return 2 * common / (len(words) + len(gold)) if common else 0.0
