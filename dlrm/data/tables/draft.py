"""Drafts a schema from the data, with the reasons for its choices."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import column_of, texts_of
from dlrm.data.tables.fields import (
    NO,
    SURE_MARKERS,
    YES,
    Drafter,
    described_column,
    listed,
    shown,
    shown_name,
)
from dlrm.data.tables.samples import Seen
from dlrm.data.tables.summaries import BOOLEANS, Summary
from dlrm.data.transform.schema import Label, Schema
from dlrm.data.transform.values import canonical_text
from dlrm.documents import one_line
from dlrm.files import write_atomically

SAMPLE_ROWS = 1_000_000
_MOST_SHOWN, _MOST_LABELS = 10, 1000
_ZERO_OR_ONE = {"0", "1", "true", "false"}


@dataclass(frozen=True)
class Draft:
    """A schema, and the observations that it was drafted from.

    Attributes:
        schema: the draft.
        comments: observations about each of its columns.
        left_out: column -> reason why no field uses it.
        label: the value that counts as 1, and the reason.
        rows: rows of the sample.
        whole: whether the sample has all rows.
        in_doubt: columns that are numerical and categorical, as nothing says which they are.
        disguised: column of text -> why it may be numbers or lists in another form.
        leaks: column -> how much of the label it tells.
        partial_leaks: column -> in which share of the rows with the rarer label it tells it.
        inexact: category of floats that need not be exact, which is refused when it is prepared
            -> what to do.
    """

    schema: Schema
    comments: dict[str, str]
    left_out: dict[str, str]
    label: str
    rows: int
    whole: bool
    in_doubt: tuple[str, ...] = ()
    disguised: dict[str, str] = field(default_factory=dict)
    leaks: dict[str, str] = field(default_factory=dict)
    partial_leaks: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)

    @property
    def sample(self) -> str:
        """Returns a description of the rows that were read."""
        return f"{'all' if self.whole else 'the first'} {self.rows:,} rows"

    def text(self, source: str = "a table") -> str:
        """Returns the schema as YAML with a comment per column."""
        lines = [f"# Drafted from {self.sample} of {one_line(source)}. Check it before use."]
        lines += [self.schema.text(self.comments).removesuffix("\n")]
        if self.left_out:
            lines += ["# Left out:"]
            left_out = self.left_out.items()
            lines += [f"#   {shown_name(name)}: {one_line(why)}" for name, why in left_out]
        return "\n".join(lines) + "\n"

    def note(self, decided: Collection[str] = ()) -> str | None:
        """Returns a line about what a user should check; None if nothing was in doubt.

        Args:
            decided: columns whose use the user has chosen.
        """
        parts = []
        if left_out := [name for name in self.left_out if name not in decided]:
            parts.append(f"left out {_listed_briefly(left_out)}")
        if in_doubt := [name for name in self.in_doubt if name not in decided]:
            parts.append(f"took {_listed_briefly(in_doubt)} as a number and an id, in doubt")
        if self.leaks:
            parts.append(f"used {_listed_briefly(self.leaks)}, which nearly tells the label")
        if self.partial_leaks:
            columns = _listed_briefly(self.partial_leaks)
            parts.append(f"used {columns}, which tells the label in some rows")
        return "; ".join(parts) or None

    def save(self, path: Path, source: str) -> None:
        """Writes the YAML, which appears whole."""
        write_atomically(path, self.text(source))


def _listed_briefly(columns: Collection[str]) -> str:
    more = ", ..." if len(columns) > _MOST_SHOWN else ""
    return listed([*columns][:_MOST_SHOWN]) + more


def draft(
    batches: Iterable[pa.RecordBatch],
    label: str,
    *,
    positive: str | None = None,
    weight: str | None = None,
    groups: Sequence[str] = (),
    time: str | None = None,
    max_rows: int = SAMPLE_ROWS,
    text: TextFormat | None = None,
    seen: Seen | None = None,
) -> Draft:
    """Drafts a schema from the first rows of a table.

    Text that is all numbers is read as numbers, except texts such as "?" and "NA", which become
    `missing_values` of that field. Then the first rule that fits decides:

    * Columns with fewer than two values, of maps and of lists of lists, and of text or ids that are
      distinct in every row, are left out; and those of two values that tell the label in every row.
    * Lists, except for text of CSV, are list fields of the longest length; those of numbers with a
      fraction are left out, as they may be weights or vectors.
    * Timestamps, text in ISO 8601 or a common format, numbers that count from 1970 and numbers such
      as 14102100 (of the form %y%m%d%H), both with a name to match, are times. The first such
      column is `time`; others are left out.
    * Booleans and text are categorical, and numbers with a leading zero.
    * Numbers with a fraction are numerical; with infinite values they are left out.
    * Whole numbers, including whole floats, are categorical if the name says that they are ids
      (`user_id`, `brand`, `c7`; see `dlrm.data.tables.names`) or a part of a date (`hour`), if they
      have up to 12 values or are beyond 2^53; and numerical if the name says so (`price`, `i7`),
      or if they are float32 beyond 2^24, or float16 beyond 2^11, which are no exact ids.
    * Of the other whole numbers, those whose order tells most of what their values tell about the
      label are numerical. More than 1000 without gaps are categorical. Those with values below 0,
      or that mostly occur once, are numerical. Those whose values tell more than their order are
      categorical. The rest is in doubt, and both: a numerical and a categorical field.
    * A numerical column with values that are far from the others gets the transform "log", or
      "quantile" if it has values below 0; the others "standardize".
    * A categorical column of more than 1000 values, most of which occur less than 5 times, gets
      `frequency_limit: 5`; one of 100,000 gets 15, at most 1,000,000 ids, and, if a fifth of the
      rows hold rare values, hash buckets for them.

    The label needs no `positive` if it is 0 and 1, or false and true. If it has two other values,
    such as yes and no, the affirmative one is positive, otherwise the rarer, otherwise the later
    one in alphabetical order.

    Args:
        batches: the table; a column that a batch lacks is missing in its rows.
        label: the column of labels.
        positive: the value that counts as 1, or several with commas between them, with every other
            value as 0.
        weight, groups, time: columns with these roles; groups can be inputs too.
        max_rows: maximum number of rows to read.
        text: the format of the text that the batches have, which becomes the schema's.
        seen: observations from reading the files; see `batches_of`.

    Raises:
        ValueError: a column is missing or occurs twice, weights are not numbers, a weight, group or
            time is missing, labels are missing or do not have two values, or no column is left as
            an input.
    """
    seen = seen or Seen()
    columns, labels, rows, whole = _summaries(batches, label, positive, max_rows, text)
    if not rows:
        raise ValueError("the input has no rows; expected one or more")
    for role, name in (("weight", weight), ("time", time), *(("groups", name) for name in groups)):
        if name is not None:
            check_columns(f"--{role}", columns, [name])
    for name in groups:
        _check_group(columns[name])
    if weight is not None:
        _check_weight(columns[weight])
    said, label_comment = _label(columns[label], labels, positive, whole)
    drafter = Drafter(columns, time)
    left_out = {name: why for name, why in seen.left_out.items() if name != label}
    for name, summary in columns.items():
        if name not in (label, weight, time, *left_out):
            drafter.add(summary)
    left_out = drafter.left_out | left_out
    if not drafter.numerical and not drafter.categorical:
        reasons = "; ".join(f"{shown_name(name)}: {why}" for name, why in left_out.items())
        raise ValueError(f"no column is left as an input ({reasons or f'{label} is the only one'})")
    schema = Schema(
        said,
        tuple(drafter.numerical),
        tuple(drafter.categorical),
        weight=weight,
        groups=tuple(groups),
        time=drafter.time,
        format=None if text is None else text.remembered,
    )
    comments = drafter.comments | {label: one_line(label_comment)}
    if weight is not None:
        comments[weight] = described_column(columns[weight])
    doubts = tuple(drafter.in_doubt), drafter.disguised
    of_draft = (rows, whole, *doubts, drafter.leaks, drafter.partial_leaks, drafter.inexact)
    return Draft(schema, comments, left_out, label_comment, *of_draft)


def _check_group(summary: Summary) -> None:
    if absent := summary.missing + sum(summary.markers.values()) * summary.is_number:
        raise ValueError(
            f"--groups: column {summary.name!r}: expected a value in every row, got none in "
            f"{absent:,} of {summary.rows:,} rows; fill it, with a text such as none, or leave the "
            "column out of --groups"
        )


def _check_weight(summary: Summary) -> None:
    where, markers = f"--weight: column {summary.name!r}", sum(summary.markers.values())
    if not summary.is_number and summary.kind not in (None, BOOLEANS):
        got = f"the type {', '.join(summary.types)}"
        if summary.examples:
            got += f" with {', '.join(map(shown, summary.examples))}"
        raise ValueError(f"{where}: expected numbers, got {got}")
    if absent := summary.missing + summary.infinite + markers:
        raise ValueError(
            f"{where}: expected a weight in every row, got none in {absent:,} of {summary.rows:,} "
            "rows; fill it, with 1 for instance"
        )
    if summary.numbers.count and summary.numbers.least < 0:
        raise ValueError(f"{where}: expected weights of 0 or more, got {summary.numbers.least:.9g}")
    if summary.numbers.count and not summary.numbers.most:
        raise ValueError(f"{where}: expected a weight above 0, got zeros alone")


def _summaries(
    batches: Iterable[pa.RecordBatch],
    label: str,
    positive: str | None,
    max_rows: int,
    text: TextFormat | None,
) -> tuple[dict[str, Summary], dict[str, int], int, bool]:
    """Returns the columns' summaries, the counts of labels, the rows, and whether they are all."""
    columns: dict[str, Summary] = {}
    labels: dict[str, int] = {}
    rows = positives = 0
    for batch in batches:
        if rows == max_rows:
            return columns, labels, rows, batch.num_rows == 0
        whole = batch.num_rows <= max_rows - rows
        batch = batch.slice(0, max_rows - rows)
        hits = _count_labels(label, positive, batch, labels)
        for name in batch.schema.names:
            if name not in columns:
                columns[name] = Summary(name, text)
                columns[name].add_missing(rows, positives)  # of batches without the column
            columns[name].add(column_of(batch, name), hits)
        for name in columns.keys() - set(batch.schema.names):
            columns[name].add_missing(batch.num_rows, int(hits.sum()))
        rows, positives = rows + batch.num_rows, positives + int(hits.sum())
        if not whole:
            return columns, labels, rows, False
    return columns, labels, rows, True


def _count_labels(
    label: str, positive: str | None, batch: pa.RecordBatch, labels: dict[str, int]
) -> np.ndarray:
    """Adds the labels of a batch to their counts, and returns which of them are positive.

    If neither of two labels is known to be positive, the second counts as positive: the sign of a
    signal does not matter.
    """
    texts, codes = texts_of(label, column_of(batch, label))
    texts = [canonical_text(text) for text in texts]
    if len(labels) <= _MOST_LABELS:
        counts = np.bincount(codes[codes >= 0], minlength=len(texts))
        for label_text, count in zip(texts, counts.tolist(), strict=True):
            if count and label_text:
                labels[label_text] = labels.get(label_text, 0) + count
    if positive is not None:
        known = set(_positives(positive, labels))
        hits = [label_text in known for label_text in texts]
    else:
        hits = [label_text != next(iter(labels), None) for label_text in texts]
    return np.array([*hits, False], bool)[codes]


def _positives(positive: str, labels: Collection[str]) -> list[str]:
    """Returns the values that `--positive` names, in canonical form."""
    if canonical_text(positive) in labels:
        return [canonical_text(positive)]
    return [canonical_text(text.strip()) for text in positive.split(",")]


def _label(
    summary: Summary, labels: dict[str, int], positive: str | None, whole: bool
) -> tuple[Label, str]:
    """Returns the label that counts as 1, and the reason."""
    name, rows = summary.name, "the rows" if whole else f"the first {summary.rows:,} rows"
    if summary.missing:
        raise ValueError(
            f"column {name}, row {summary.first_missing}: expected a label that is not missing, "
            f"got none, as in {summary.missing} of {summary.rows} rows"
        )
    missing = [text for text in labels if text.lower() in {*SURE_MARKERS, "na"}]
    if missing and (positive is None or summary.is_number):
        hint = "; --positive names the one that counts as 1, with all others as 0"
        raise ValueError(
            f"column {name}: expected labels that are not missing, got {missing[0]!r} in "
            f"{labels[missing[0]]:,} rows" + hint * (positive is None)
        )
    known = ", ".join(map(shown, sorted(labels)[:_MOST_SHOWN]))
    known += ", ..." if len(labels) > _MOST_SHOWN else ""
    if positive is not None:
        positives = _positives(positive, labels)
        if unknown := [value_text for value_text in positives if value_text not in labels]:
            raise ValueError(
                f"--positive {unknown[0]}: expected a label that occurs in {rows}, got none of "
                f"column {name}, which has {known}"
            )
        value = positives[0] if len(positives) == 1 else tuple(positives)
        label = Label(name, value, any_negative=len(labels) > len(positives) + 1)
        why = "as --positive says"
    elif {text.lower() for text in labels} <= _ZERO_OR_ONE:
        true = sum(n for text, n in labels.items() if text.lower() in ("1", "true"))
        return Label(name), f"0 and 1; {true / summary.rows:.2%} of the rows are positive"
    elif len(labels) != 2:
        raise ValueError(
            f"column {name}: expected two labels in {rows}, got {len(labels)}: {known}; "
            "--positive, or label: {positive: [...]} in a schema, names those that count as 1. "
            "Models predict one label of two classes, neither several classes nor numbers"
        )
    else:
        value, why = _positive(labels)
        label, positives = Label(name, value), [value]
    share = sum(labels[value_text] for value_text in positives) / summary.rows
    counted = " and ".join(map(shown, positives))
    return (
        label,
        f"{counted} count{'s' * (len(positives) == 1)} as 1, {why}: {share:.2%} of the rows",
    )


def _positive(labels: dict[str, int]) -> tuple[str, str]:
    """Returns the one of two labels that counts as 1, and the reason."""
    for yes, no in itertools.permutations(labels):
        if yes.lower() in YES and no.lower() in NO:
            return yes, "the affirmative one"
    first, second = sorted(labels)
    if labels[first] == labels[second]:
        return second, "the later by alphabet, as both are as frequent"
    return min(labels, key=lambda text: labels[text]), "the rarer one"
