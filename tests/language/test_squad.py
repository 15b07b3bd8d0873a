import json
import re
import string

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlrm.language.squad import (
    Question,
    SquadFeatures,
    exact_match_and_f1,
    predict_answers,
    read_squad,
)
from dlrm.language.wordpiece import SPECIAL_TOKENS, Tokenizer

pytest.importorskip("tokenizers", reason="no tokenizers (extra text)")
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
VOCABULARY = [*SPECIAL_TOKENS, *LETTERS, "cafe", "##s", "1895", "1943", "(", ")", "-", "'", "."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return Tokenizer(path)


def question(context, answer=None, asked="q", id="id", start=None):
    answer = answer or context.split()[0]
    start = context.index(answer) if start is None else start
    return Question(id, asked, context, ((answer, start),), "file.json: article 0 (id)")


def text_of(tokenizer, ids):
    return " ".join(VOCABULARY[id] for id in ids)


def one_hot(features, spans):
    """Returns logits of 1 at the spans' ends and 0 elsewhere."""
    rows = np.arange(features.num_samples)
    start, end = np.zeros((2, features.num_samples, features.length), np.float32)
    start[rows, spans[:, 0]] = 1
    end[rows, spans[:, 1]] = 1
    return start, end


def test_windows_and_spans_of_a_known_context(tokenizer):
    asked = question("a b c d e f g h i", "f g", "x y z w")
    features = SquadFeatures([asked], tokenizer, 10, doc_stride=2, max_query_length=3)
    batch = features.read(np.arange(features.num_samples))
    assert [text_of(tokenizer, row) for row in batch.ids.tolist()] == [
        "[CLS] x y z [SEP] a b c d [SEP]",
        "[CLS] x y z [SEP] c d e f [SEP]",
        "[CLS] x y z [SEP] e f g h [SEP]",
        "[CLS] x y z [SEP] g h i [SEP] [PAD]",
    ]
    assert batch.segments.tolist() == [[0] * 5 + [1] * 5] * 3 + [[0] * 5 + [1] * 4 + [0]]
    assert batch.lengths.tolist() == features.lengths.tolist() == [10, 10, 10, 9]
    assert batch.spans.tolist() == [[0, 0], [0, 0], [6, 7], [0, 0]]
    assert features.num_masked is None


def windows_by_definition(tokens, room, stride):
    start = 0
    while True:
        length = min(tokens - start, room)
        yield start, length
        if start + length == tokens:
            return
        start += min(length, stride)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 9))
@settings(max_examples=50)
def test_windows_are_those_of_the_definition(tokenizer, sizes, room, stride):
    questions = [question("a " * n, asked="b " * (n % 3), id=str(n)) for n in sizes]
    features = SquadFeatures(questions, tokenizer, room + 5, stride, 1)
    found = zip(
        *(features.question_of_window, features.window_starts, features.window_lengths), strict=True
    )
    assert list(found) == [
        (number, *window)
        for number, tokens in enumerate(sizes)
        for window in windows_by_definition(tokens, room + 2 - min(1, tokens % 3), stride)
    ]


@pytest.mark.parametrize(
    ("context", "answer", "tokens"),
    [
        ("x (1895-1943). y", "1895", "1895"),
        ("x (1895-1943). y", "1895-1943", "1895 - 1943"),
        ("x a's. b", "a", "a"),
        ("b 1895.) c", "189", "1895"),  # it ends within a token
        ("b cafés b", " cafés ", "cafe ##s"),
        ("a b\u202fc", "b", "b"),
        ("a 1895-1895 b", "1895-1895", "1895 - 1895"),
    ],
)
def test_answers_are_as_tight_as_tokens_allow(tokenizer, context, answer, tokens):
    batch = SquadFeatures([question(context, answer)], tokenizer).read(np.array([0]))
    begin, end = batch.spans[0].tolist()
    assert text_of(tokenizer, batch.ids[0, begin : end + 1].tolist()) == tokens


def best_by_definition(features, start_logits, end_logits):
    """Applies the rules of BERT's program pair by pair."""
    windows_of, best = {}, {}
    for row, number in enumerate(features.question_of_window):
        windows_of.setdefault(number, []).append(row)
    for number, rows in windows_of.items():
        pairs = []
        for row in rows:
            first, offset = features.first_places[row], features.window_starts[row]
            length, used = features.window_lengths[row], features.lengths[row]

            def most_context(token, rows=rows):
                scores = {}
                for other in rows:
                    begin = features.window_starts[other]
                    last = begin + features.window_lengths[other] - 1
                    if begin <= token <= last:
                        context = min(token - begin, last - token)
                        scores[other] = context + 0.01 * features.window_lengths[other]
                return max(scores, key=lambda other: (scores[other], -other))

            def top(logits, row=row, used=used):
                return sorted(range(used), key=lambda at: -logits[row, at])[:20]

            for start in top(start_logits):
                for end in top(end_logits):
                    inside = all(first <= place < first + length for place in (start, end))
                    if not inside or end < start or end - start + 1 > 30:
                        continue
                    if most_context(start - first + offset) == row:
                        total = float(start_logits[row, start]) + float(end_logits[row, end])
                        pairs.append((total, start - first + offset, end - first + offset))
        if pairs:
            best[number] = max(pairs, key=lambda pair: pair[0])[1:]
    return best


@pytest.mark.parametrize("seed", range(4))
def test_predictions_are_those_of_the_definition(tokenizer, seed):
    random = np.random.default_rng(seed)
    questions = [
        question(" ".join(random.choice(LETTERS, size)), asked="x y", id=str(number))
        for number, size in enumerate([1, 7, 30, 60, 45, 90])
    ]
    length = [16, 24, 40, 60][seed]
    features = SquadFeatures(questions, tokenizer, length, 5 + 3 * seed, 4)
    shape = (2, features.num_samples, length)
    start, end = random.integers(-4, 5, shape).astype(np.float32)  # many equal sums
    start[:, ::3] += 4
    found = predict_answers(features, start, end)
    best = best_by_definition(features, start, end)
    assert len(best) > 3
    for number, asked in enumerate(questions):
        words = asked.context.split()
        first, last = best.get(number, (0, -1))
        assert found[asked.id] == " ".join(words[first : last + 1])


def test_what_follows_a_window_is_not_looked_at(tokenizer):
    features = SquadFeatures([question("a b c", "b")], tokenizer)
    start, end = one_hot(features, features.read(np.array([0])).spans.numpy())
    start[:, features.lengths[0] :] = np.inf
    end[:, features.lengths[0] :] = np.nan
    assert predict_answers(features, start, end) == {"id": "b"}


def test_answers_stand_as_in_the_context(tokenizer):
    context = "a  (Cafe\u0301) B."
    features = SquadFeatures([question(context, "Cafe\u0301")], tokenizer)
    logits = one_hot(features, features.read(np.array([0])).spans.numpy())
    assert predict_answers(features, *logits) == {"id": "Cafe\u0301"}
    across = one_hot(features, np.array([[3, 7]]))
    assert predict_answers(features, *across) == {"id": "a  (Cafe\u0301) B"}


def test_a_question_without_a_pair_has_an_empty_answer(tokenizer):
    features = SquadFeatures([question("a b", "b")], tokenizer)
    start, end = np.full((2, 1, 384), -np.inf, np.float32)
    assert predict_answers(features, start, end) == {"id": ""}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_named(tokenizer, value):
    features = SquadFeatures([question("a b", "b")], tokenizer)
    logits = np.zeros((1, 384), np.float32)
    wrong = logits.copy()
    wrong[0, 4] = value
    with pytest.raises(ValueError, match=f"logits of window 0: expected finite .* got {value}"):
        predict_answers(features, logits, wrong)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question("a b c", "b", start=0), "'b' is not at character 0 of its context, .* 'a' there"),
        (question("a b c", "b", start=-3), "not at character -3"),
        (question("a b c", "c", start=90), "not at character 90"),
        (question("a b c", "d", start=1), r"article 0 \(id\): the answer 'd' is not at"),
        (question("a \u200b c", "\u200b", start=2), "no token in the answer"),
        (question("\u200b", "\u200b"), "the context has no token"),
    ],
)
def test_wrong_answers_are_named(tokenizer, asked, message):
    with pytest.raises(ValueError, match=message):
        SquadFeatures([asked], tokenizer)


def test_impossible_sizes_are_named(tokenizer):
    message = "--max_seq_length 10: expected at least --max_query_length 7 and 4 more"
    with pytest.raises(ValueError, match=message):
        SquadFeatures([question("a b", "b")], tokenizer, 10, 3, 7)


def content(**changes):
    entry = {"id": "1", "question": "q", "answers": [{"text": "a", "answer_start": 0}]}
    paragraph = {"context": "a b", "qas": [entry]}
    for name, value in changes.items():
        for record in (entry, paragraph, entry["answers"][0]):
            if name in record:
                if value is None:
                    del record[name]
                else:
                    record[name] = value
    return {"data": [{"title": "t", "paragraphs": [paragraph]}]}


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_files_are_read(tmp_path):
    place = f"{tmp_path / 'd.json'}: article 0, paragraph 0, question 0 ('1')"
    expected = [Question("1", "q", "a b", (("a", 0),), place)]
    assert read_squad(write(tmp_path / "d.json", content())) == expected


WHERE = r"d\.json: article 0, paragraph 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, rf"{WHERE}: expected an object with context, got {{"),
        ({"context": " \n"}, rf"{WHERE}: expected a context, got an empty one"),
        ({"qas": []}, r"d\.json: expected at least one question"),
        ({"answers": []}, rf"{WHERE}, question 0 \('1'\): expected at least one answer, got none"),
        ({"answer_start": True}, "answer_start: expected an integer, got True"),
        ({"question": "b\ud800"}, "question, character 1: .* half of a surrogate pair"),
    ],
)
def test_wrong_fields_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_squad(write(tmp_path / "d.json", content(**changes)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"data": [\n1,, 2]}', r"d\.json: line 2, column 3: no JSON: Expecting value"),
        (b'{"data": "\xff"}', r"d\.json: byte 10: .*not UTF-8"),
        (b"[" * 100_000, r"d\.json: expected lists and maps at most"),
        (b"[]", r"d\.json: expected an object with data, got \[\]"),
    ],
)
def test_malformed_files_are_named(tmp_path, data, message):
    (tmp_path / "d.json").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_squad(tmp_path / "d.json")


def test_ids_that_are_there_twice_are_named(tmp_path):
    twice = content()
    twice["data"] *= 2
    message = r"article 1, paragraph 0, question 0 \('1'\): .* twice, first in .*article 0"
    with pytest.raises(ValueError, match=message):
        read_squad(write(tmp_path / "d.json", twice))


def scores_by_definition(prediction, gold):
    """Returns exact match and F1 of two texts from their published definitions."""

    def words(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        parts = re.split(r"(\W)", text)
        return "".join(" " if part in ("a", "an", "the") else part for part in parts).split()

    one, two = words(prediction), words(gold)
    left, same = list(two), 0
    for word in one:
        if word in left:
            left.remove(word)
            same += 1
    precision, recall = (same / max(1, len(side)) for side in (one, two))
    f1 = 2 * precision * recall / (precision + recall) if same else 0.0
    return float(one == two), f1


TEXTS = st.lists(st.sampled_from(["a", "The", "an", "cat", "Cat's", "the-cat", ".", "é", "b!"]))


@given(st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_metrics_are_those_of_the_definition(cases):
    questions, answers, exact, f1 = [], {}, [], []
    for number, (predicted, gold) in enumerate(cases):
        texts = [" ".join(words) for words in gold]
        questions.append(Question(str(number), "", "", tuple((t, 0) for t in texts)))
        answers[str(number)] = "  ".join(predicted)
        scores = [scores_by_definition(answers[str(number)], text) for text in texts]
        exact.append(max(score[0] for score in scores))
        f1.append(max(score[1] for score in scores))
    expected = {"exact_match": 100 * np.mean(exact), "f1": 100 * np.mean(f1)}
    assert exact_match_and_f1(questions, answers) == pytest.approx(expected)


def test_metrics_of_known_answers():
    gold = question("", "The cat, sat!", start=0)
    assert exact_match_and_f1([gold], {"id": "cat sat"}) == {"exact_match": 100, "f1": 100}
    half = exact_match_and_f1([gold, gold._replace(id="none")], {"id": "a cat ran"})
    assert half == {"exact_match": 0, "f1": 25}


@pytest.mark.parametrize(("length", "stride"), [(384, 128), (128, 64)])
def test_real_questions_are_answered_from_their_own_spans(shared_data, length, stride):
    """Finds all but one of 1,089 gold answers: that one ends within a token."""
    tokenizer = Tokenizer(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    count, missed = 0, []
    for name in ("train-v1.1.slice.json", "xquad_en_shared.json"):
        questions = read_squad(shared_data / "squad" / name)
        features = SquadFeatures(questions, tokenizer, length, stride)
        spans = features.read(np.arange(features.num_samples)).spans.numpy()
        answers = predict_answers(features, *one_hot(features, spans))
        assert list(answers) == [asked.id for asked in questions]
        for asked in questions:
            scores = exact_match_and_f1([asked], answers)
            count += 1
            if scores != {"exact_match": 100, "f1": 100}:
                missed.append((asked.answers[0][0], answers[asked.id]))
    assert count == 1089
    assert missed == [("7,000,000 square kilometres (2,70", "7,000,000 square kilometres (2,700")]
