"""SQuAD v1.1: questions about paragraphs, in windows, and answers from a model's logits.

Rows are those of BERT's paper and program: [CLS] question [SEP] window [SEP], with a window of the
context every `doc_stride` tokens. The answer is the best start and end in any of them.
"""

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.documents import brief, read_json
from dlrm.files import write_atomically
from dlrm.language.loader import TextBatch
from dlrm.language.wordpiece import Slices, Tokenizer

_BREAKS = " \t\r\n\u202f"  # characters between words of a context
_NUM_BEST = 20  # starts and ends of a window that are paired
_MAX_ANSWER_LENGTH = 30  # tokens


class Answer(NamedTuple):
    """A text of a context, and the index of its first character there."""

    text: str
    start: int


class Question(NamedTuple):
    """A question, its paragraph, and the answers that people gave.

    Attributes:
        context: the paragraph; questions about the same one share the string.
        answers: answers of people; none if unknown.
        place: its location in the file, for errors.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    place: str = ""


def read_squad(path: str | Path, with_answers: bool = True) -> list[Question]:
    """Returns the questions of a file in SQuAD's JSON format.

    Args:
        with_answers: whether each must have an answer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, a field is missing or of another type, a context is empty
            or an id occurs twice; the message names file and place.
    """
    questions: dict[str, Question] = {}
    for question in _questions(read_json(path, object), path, with_answers):
        if question.id in questions:
            raise ValueError(
                f"{question.place}: id {brief(question.id)} is there twice, first in "
                f"{questions[question.id].place}"
            )
        questions[question.id] = question
    if not questions:
        raise ValueError(f"{path}: expected at least one question, got none")
    return list(questions.values())


def _questions(content: Any, path: str | Path, with_answers: bool) -> Iterator[Question]:
    for i, article in enumerate(_field(content, "data", list, f"{path}")):
        for j, paragraph in enumerate(_field(article, "paragraphs", list, f"{path}: article {i}")):
            place = f"{path}: article {i}, paragraph {j}"
            context = _field(paragraph, "context", str, place)
            if not context.strip():
                raise ValueError(f"{place}: expected a context, got an empty one")
            for k, entry in enumerate(_field(paragraph, "qas", list, place)):
                here = f"{place}, question {k}"
                id, asked = (_field(entry, name, str, here) for name in ("id", "question"))
                is_known = with_answers or "answers" in entry
                answers = _field(entry, "answers", list, here) if is_known else []
                if with_answers and not answers:
                    given = f"{here} ({brief(id)})"
                    raise ValueError(f"{given}: expected at least one answer, got none")
                yield Question(id, asked, context, tuple(_answers(answers, here)), here)


def _answers(answers: list, place: str) -> Iterator[Answer]:
    for number, answer in enumerate(answers):
        here = f"{place}, answer {number}"
        yield Answer(_field(answer, "text", str, here), _field(answer, "answer_start", int, here))


def _field(record: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, got {brief(record)}")
    if name not in record:
        raise ValueError(
            f"{place}: expected a field {name}, has {brief(list(record))[1:-1] or 'none'}"
        )
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {list: "a list", str: "a text", int: "an integer"}[kind]
        raise ValueError(f"{place}: {name}: expected {expected}, got {brief(value)}")
    return value


class SquadFeatures:
    """Windows of questions and contexts: a `TextSource`, with spans for training.

    A span is the first and last token of the question's first answer, as tight as tokens allow, in
    the window's row; 0 and 0 if the window does not contain all of it.

    Args:
        max_seq_length: tokens of a row.
        doc_stride: tokens between the starts of two windows of a context.
        max_query_length: maximum tokens of a question; the rest is cut off.
        training: whether to compute spans.

    Attributes:
        question_of_window: index of each window's question, ascending, `[windows]`.
        first_places: index of the first token of the context in each row, `[windows]`.
        window_starts: token of its context that each window begins with, `[windows]`.
        window_lengths: tokens of the context in each window, `[windows]`.

    Raises:
        ValueError: lengths are impossible, a context has no token, or in training a question has no
            answer or one that is not in its context; the message names flag and value, or the
            question.
    """

    num_masked: np.ndarray | None = None

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        max_seq_length: int = 384,
        doc_stride: int = 128,
        max_query_length: int = 64,
        training: bool = True,
    ) -> None:
        if max_seq_length < max_query_length + 4:
            raise ValueError(
                f"--max_seq_length {max_seq_length}: expected at least --max_query_length "
                f"{max_query_length} and 4 more"
            )
        for flag, value in (("doc_stride", doc_stride), ("max_query_length", max_query_length)):
            if value < 1:
                raise ValueError(f"--{flag} {value}: expected 1 or more")
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
            empty = questions[int(tokens.argmin())]
            raise ValueError(f"{empty.place} ({empty.id}): the context has no token")
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
        self._spans = self._training_spans() if training else None

    def _training_spans(self) -> np.ndarray:
        answers = self._tokenizer.encode(
            question.answers[0].text if question.answers else "" for question in self.questions
        )
        tokens = [self._answer_tokens(n, answers[n]) for n in range(len(answers))]
        spans = np.array(tokens, np.int64)[self.question_of_window] - self.window_starts[:, None]
        inside = (spans[:, 0] >= 0) & (spans[:, 1] < self.window_lengths)
        return np.where(inside[:, None], spans + self.first_places[:, None], 0)

    def _answer_tokens(self, number: int, answer: np.ndarray) -> tuple[int, int]:
        """Returns first and last token of a question's answer in its context."""
        question = self.questions[number]
        where, context = f"{question.place} ({question.id})", question.context
        if not question.answers:
            raise ValueError(f"{where}: expected an answer, got none")
        text, begin = question.answers[0]
        quoted = context[max(begin, 0) : max(begin, 0) + len(text)]
        if begin < 0 or quoted != text or not text.strip():
            raise ValueError(
                f"{where}: the answer {text!r} is not at character {begin} of its context, which "
                f"has {quoted!r} there"
            )
        end = begin + len(text.rstrip())
        begin += len(text) - len(text.lstrip())
        while begin and context[begin - 1] not in _BREAKS:  # whole words
            begin -= 1
        while end < len(context) and context[end] not in _BREAKS:
            end += 1
        first, stop = np.searchsorted(self.token_spans(number)[:, 0], (begin, end)).tolist()
        if first == stop:
            raise ValueError(f"{where}: no token in the answer {text!r}")
        ids, length = self._contexts[self._context_of[number]], len(answer)
        for token in range(first, stop - length + 1):
            if length and np.array_equal(ids[token : token + length], answer):
                return token, token + length - 1
        return first, stop - 1

    def token_spans(self, question: int) -> np.ndarray:
        """Returns the characters of each token of a question's context, `[tokens, 2]`."""
        context = self._context_of[question]
        return self._contexts.spans[slice(*self._contexts.starts[context : context + 2])]

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns windows; see `TextSource.read`."""
        question = self.question_of_window[rows]
        asked = Slices(
            self._asked.ids, self._asked.starts[:-1][question], self._asked_lengths[question]
        )
        starts = self._contexts.starts[:-1][self._context_of[question]]
        window = Slices(
            self._contexts.ids, starts + self.window_starts[rows], self.window_lengths[rows]
        )
        joined = self._tokenizer.join_pairs(asked, window, self.length)
        spans = None if self._spans is None else self._spans[rows]
        return TextBatch.of(rows, *joined, spans=spans)


def predict_answers(
    features: SquadFeatures, start_logits: np.ndarray, end_logits: np.ndarray
) -> dict[str, str]:
    """Returns the answer to each question by its id, as a text of the context.

    Of every window the 20 best starts are paired with the 20 best ends. A pair counts if both are
    tokens of the context, no other window has more context around the start, and the answer has at
    most 30 tokens. The pair with the greatest sum is the answer; without a pair the answer is "".

    Args:
        start_logits: logits of every token of every window, `[windows, length]`; those after a
            window's own tokens are ignored.
        end_logits: the same for ends.

    Raises:
        ValueError: logits have another shape, or one is NaN or infinite; the message names them.
    """
    shape = (features.num_samples, features.length)
    for name, logits in (("start", start_logits), ("end", end_logits)):
        if logits.shape != shape:
            raise ValueError(f"{name} logits: expected shape {shape}, got {logits.shape}")
    answers = {question.id: "" for question in features.questions}
    edges = np.searchsorted(features.question_of_window, np.arange(len(answers) + 1)).tolist()
    for number, (first, last) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        best, has_most = (-np.inf, 0, 0), _has_most_context(features, slice(first, last))
        for row in range(first, last):
            pair = _best_pair(features, row, start_logits[row], end_logits[row], has_most)
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
    first, begin = features.first_places[row], features.window_starts[row]
    in_context = slice(first, first + features.window_lengths[row])
    best = []
    for name, logits in (("start", start_logits), ("end", end_logits)):
        values = logits[: features.lengths[row]].astype(np.float64)
        if (wrong := np.isnan(values) | np.isposinf(values)).any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{name} logits: window {row}, token {at}: expected a finite number, got "
                f"{values[at]}"
            )
        places = np.argsort(-values, kind="stable")[:_NUM_BEST]
        allowed = np.zeros(len(values), bool)
        is_start = name == "start"
        allowed[in_context] = window_of[begin:][: features.window_lengths[row]] == row
        allowed[in_context] |= not is_start
        best.append((places, np.where(allowed, values, -np.inf)[places]))
    (starts, start_values), (ends, end_values) = best
    totals = start_values[:, None] + end_values
    lengths = ends - starts[:, None] + 1
    totals[(lengths < 1) | (lengths > _MAX_ANSWER_LENGTH)] = -np.inf
    start, end = np.unravel_index(totals.argmax(), totals.shape)
    offset = begin - first
    return float(totals[start, end]), int(starts[start] + offset), int(ends[end] + offset)


def _has_most_context(features: SquadFeatures, rows: slice) -> np.ndarray:
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
    before = begin
    while before and unicodedata.category(context[before - 1]) in ("Mn", "Cf"):
        before -= 1
    if not before or context[before - 1] in _BREAKS:  # else they belong to the letter before
        begin = before
    return context[begin:end]


def exact_match_and_f1(
    questions: Iterable[Question], answers: Mapping[str, str]
) -> dict[str, float]:
    """Returns `exact_match` and `f1` in percent, by SQuAD's definitions.

    Texts are compared in lower case, without punctuation, articles and extra spaces; F1 is that of
    their words. The best of a question's answers counts; a question not in `answers` gets 0.

    Raises:
        ValueError: there is no question, or one has no answer to compare with.
    """
    exact, f1, count = 0.0, 0.0, 0
    for question in questions:
        count += 1
        if not question.answers:
            raise ValueError(f"{question.place} ({question.id}): expected an answer, got none")
        if question.id in answers:
            words = _words(answers[question.id])
            gold = [_words(answer.text) for answer in question.answers]
            exact += max(words == right for right in gold)
            f1 += max(_f1(words, right) for right in gold)
    if not count:
        raise ValueError("exact match and F1: expected at least one question, got none")
    return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _f1(words: list[str], gold: list[str]) -> float:
    common = sum((Counter(words) & Counter(gold)).values())
    return 2 * common / (len(words) + len(gold)) if common else 0.0


def write_predictions(path: str | Path, answers: Mapping[str, str]) -> None:
    """Writes answers by question id as JSON, as SQuAD's own program reads it, whole or not."""
    write_atomically(path, json.dumps(dict(answers), indent=1, ensure_ascii=False) + "\n")
