"""Drafts a schema from a sample of a table, with the reasons for its choices."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.clicks.bags import MAX_LENGTH
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables import fields
from dlrm.data.tables.columns import column_of, texts_of
from dlrm.data.tables.fields import (
    ID,
    NUMBER,
    SURE_MARKERS,
    UNIQUE_ROWS,
    absent,
    described,
    listed,
    shown,
    shown_name,
)
from dlrm.data.tables.samples import Seen
from dlrm.data.tables.summary import Summary
from dlrm.data.transform.fields import CategoricalField, NumericalField, TimeField
from dlrm.data.transform.schema import Label, Schema
from dlrm.data.transform.values import canonical_text
from dlrm.documents import one_line
from dlrm.files import write_atomically

SAMPLE_ROWS, _SAMPLE_BYTES = 1_000_000, 1 << 31
_LEAK = 0.9  # share of the label's variance that a column explains
_MOST_SHOWN = 10
_YES = {"1", "yes", "y", "true", "t", "positive", "on"}
_NO = {"0", "-1", "no", "n", "false", "f", "negative", "off"}


@dataclass(kw_only=True)
class Fields:
    """The fields that columns become, and observations.

    Attributes:
        numerical, categorical, time: the fields.
        comments: column -> observations.
        left_out: column -> reason why no field uses it.
        in_doubt: columns that are numerical and categorical, as nothing says which they are.
        disguised: column of text -> why it may be numbers or lists.
        leaks: column -> how much of the label it tells.
        inexact: category of floats that need not be exact, which prepare refuses -> what to do.
    """

    numerical: list[NumericalField] = field(default_factory=list)
    categorical: list[CategoricalField] = field(default_factory=list)
    time: TimeField | None = None
    comments: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str]
    in_doubt: tuple[str, ...] = ()
    disguised: dict[str, str] = field(default_factory=dict)
    leaks: dict[str, str] = field(default_factory=dict)
    inexact: dict[str, str] = field(default_factory=dict)

    def add(self, summary: Summary, columns: Collection[str]) -> None:
        """Makes fields of a column, or leaves it out; `columns` are the names of all."""
        name, why = summary.name, fields.useless(summary)
        if why is None and (found := fields.time_of(summary)) is not None:
            if self.time is not None:
                why = f"a further time beside {self.time.column}; {described(summary)}"
            elif absent(summary):
                why = f"a time that some rows do not have; {described(summary)}"
            else:
                self.time, self.comments[name] = found
                return
        if why is not None:
            self.left_out[name] = why
            return
        column, notes = summary.items or summary, list[str]()
        reason, uses = ("", {ID}) if summary.items else fields.uses(summary)
        if NUMBER in uses and ID in uses:
            if f"{name}_number" in columns:
                uses = {ID}
            else:
                self.in_doubt += (name,)
        if NUMBER in uses:
            self.numerical.append(fields.numerical_field(column))
        if ID in uses:
            longest = min(int(summary.lengths.max()), MAX_LENGTH) if summary.items else None
            self.categorical.append(fields.categorical_field(column, longest))
        if summary.items:
            lengths = summary.lengths
            notes += [f"lists of up to {longest}, {lengths.mean():.3g} on average"]
            notes[0] += f", {(lengths == 0).mean():.2%} empty" * (not lengths.all())
        elif not reason and (reason := fields.in_disguise(column)):
            self.disguised[name] = reason
        notes += [described(column), reason]
        if ID in uses and column.inexact:
            self.inexact[name] = fields.inexact(column)
            notes += [self.inexact[name]]
        if (share := summary.signal.share) >= _LEAK and len(summary.missing) >= UNIQUE_ROWS:
            self.leaks[name] = f"explains {share:.1%} of the label's variance on its own"
            notes += [f"nearly tells the label ({share:.1%} of its variance): known before it?"]
        self.comments[name] = "; ".join(filter(None, notes))


@dataclass(kw_only=True)
class Draft(Fields):
    """A schema, and the observations that it was drafted from.

    Attributes:
        schema: the draft.
        label: the value that counts as 1, and the reason.
        rows, whole: rows of the sample, and whether they are all.
    """

    schema: Schema
    label: str
    rows: int
    whole: bool

    @property
    def sample(self) -> str:
        """Returns a description of the rows that were read."""
        return f"{'all' if self.whole else 'the first'} {self.rows:,} rows"

    def text(self, source: str = "a table") -> str:
        """Returns the schema as YAML with a comment per column."""
        lines = [f"# Drafted from {self.sample} of {one_line(source)}. Check it before use."]
        lines += [self.schema.text(self.comments).removesuffix("\n")]
        lines += ["# Left out:"] * bool(self.left_out)
        lines += [f"#   {shown_name(name)}: {one_line(why)}" for name, why in self.left_out.items()]
        return "\n".join(lines) + "\n"

    def note(self, decided: Collection[str] = ()) -> str | None:
        """Returns a line about what a user should check; None if nothing was in doubt.

        Args:
            decided: columns whose use the user has chosen.
        """
        parts = []
        for columns, note in (
            (self.left_out, "left out {}"),
            (self.in_doubt, "took {} as a number and an id, in doubt"),
            (self.leaks, "used {}, which nearly tells the label"),
        ):
            if rest := [name for name in columns if name not in decided]:
                more = ", ..." * (len(rest) > _MOST_SHOWN)
                parts.append(note.format(listed(rest[:_MOST_SHOWN]) + more))
        return "; ".join(parts) or None

    def save(self, path: Path, source: str) -> None:
        """Writes the YAML, which appears whole."""
        write_atomically(path, self.text(source))


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

    Text of numbers is read as numbers; texts such as "?" and "NA" become `missing_values` of that
    field. Then the first rule that fits decides:

    * Columns with fewer than two values, infinite ones, nested ones, lists printed as text or of
      fractions, and text or ids that are distinct in every row, are left out; and those of two
      values that tell the label in every row. Other lists are list fields of the longest length.
    * Timestamps, text in ISO 8601, numbers that count from 1970 and numbers such as 14102100 (of
      the form %y%m%d%H), both with a name to match, are times. The first such column is `time`.
    * Booleans and text are categorical, and numbers with a leading zero; fractions are numerical.
    * Whole numbers are categorical if the name says that they are ids (`user_id`, `brand`, `c7`;
      see `dlrm.data.tables.names`) or a part of a date (`hour`), if they have up to 12 values or
      are beyond 2^53; and numerical if the name says so (`price`, `i7`), or if they are float32
      beyond 2^24, or float16 beyond 2^11, which are no exact ids.
    * Of other whole numbers, those whose order tells most of what their values tell about the label
      are numerical. More than 1000 without gaps are categorical. Those with values below 0, or that
      mostly occur once, are numerical. Those whose values tell more than their order are
      categorical. The rest is in doubt, and both: a numerical and a categorical field.
    * Numbers far from the others get the transform "log", or "quantile" if some are below 0; a
      categorical column of more than 1000 values, which are mostly rare, gets `frequency_limit: 5`;
      one of 100,000 gets 15, at most 1,000,000 ids, and hash buckets for many rows of rare values.

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
        ValueError: a column is missing or occurs twice, has a role that its values do not allow, or
            no column is left as an input.
    """
    table, left_out, whole = _sample(batches, max_rows)
    roles = [("", label), ("--weight", weight), ("--time", time)]
    for role, name in (*roles, *(("--groups", name) for name in groups)):
        if name is not None:
            check_columns(role, table.column_names, [name])
    labels, are_positive = _labels(label, table[label].combine_chunks(), positive)
    columns = {name: Summary(name, table[name], are_positive, text) for name in table.column_names}
    said, why = _label(columns[label], labels, positive, whole)
    left_out |= {} if seen is None else seen.left_out
    made = Fields(left_out=left_out)
    made.comments[label] = one_line(why)
    for name in groups:
        advice = "fill it, with a text such as none, or leave the column out of --groups"
        _check_present("--groups", columns[name], "a value", advice)
    if weight is not None:
        _check_weight(columns[weight])
        made.comments[weight] = described(columns[weight])
    if time is not None:
        _check_present("--time", columns[time], "a time", "fill it, or draft without --time")
        if (found := fields.time_of(columns[time], chosen=True)) is None:
            got = f"{columns[time].type} such as {fields.examples(columns[time])}"
            raise ValueError(
                f"--time: column {time!r}: expected times in ISO 8601 or numbers, got the type "
                f"{got}; time: {{format: ...}} in a schema says another form"
            )
        made.time, made.comments[time] = found
    for name, summary in columns.items():
        if name not in (label, weight, time, *made.left_out):
            made.add(summary, columns)
    made.left_out.pop(label, None)
    if not made.numerical and not made.categorical:
        reasons = "; ".join(f"{shown_name(name)}: {why}" for name, why in made.left_out.items())
        raise ValueError(f"no column is left as an input ({reasons or f'{label} is the only one'})")
    schema = Schema(
        said,
        tuple(made.numerical),
        tuple(made.categorical),
        weight=weight,
        groups=tuple(groups),
        time=made.time,
        format=None if text is None else text.remembered,
    )
    return Draft(schema=schema, label=why, rows=table.num_rows, whole=whole, **vars(made))


def _sample(
    batches: Iterable[pa.RecordBatch], max_rows: int
) -> tuple[pa.Table, dict[str, str], bool]:
    """Returns the first rows, the columns of several types, and whether these are all rows."""
    parts: list[pa.RecordBatch] = []
    rows = size = 0
    whole = True
    for batch in batches:
        parts.append(batch.slice(0, max_rows - rows))
        rows, size = rows + parts[-1].num_rows, size + parts[-1].nbytes
        whole = parts[-1].num_rows == batch.num_rows and size <= _SAMPLE_BYTES
        if not whole:
            break
    if not rows:
        raise ValueError("the input has no rows; expected one or more")
    columns, left_out = {}, {}
    for name in dict.fromkeys(name for part in parts for name in part.schema.names):
        arrays = [
            column_of(part, name) if name in part.schema.names else pa.nulls(part.num_rows)
            for part in parts
        ]
        try:
            tables = [pa.table({name: array}) for array in arrays]
            table = pa.concat_tables(tables, promote_options="permissive")
            columns[name] = table[0]
        except pa.ArrowException:
            columns[name] = pa.nulls(rows)
            types = " and ".join(dict.fromkeys(str(array.type) for array in arrays))
            left_out[name] = f"the types {types}; expected one"
    return pa.table(columns), left_out, whole


def _check_present(flag: str, summary: Summary, what: str, advice: str) -> None:
    if lacking := absent(summary):
        raise ValueError(
            f"{flag}: column {summary.name!r}: expected {what} in every row, got none in "
            f"{lacking:,} of {len(summary.missing):,} rows; {advice}"
        )


def _check_weight(summary: Summary) -> None:
    where = f"--weight: column {summary.name!r}: expected"
    if not summary.is_number and not pa.types.is_boolean(summary.type):
        got = f"{summary.type} with {fields.examples(summary)}"
        raise ValueError(f"{where} numbers, got the type {got}")
    _check_present("--weight", summary, "a weight", "fill it, with 1 for instance")
    least, most = summary.range
    if least < 0:
        raise ValueError(f"{where} weights of 0 or more, got {least:.9g}")
    if most == 0:
        raise ValueError(f"{where} a weight above 0, got zeros alone")


def _labels(name: str, array: pa.Array, positive: str | None) -> tuple[dict[str, int], np.ndarray]:
    """Returns the labels and their rows, and which rows have a positive one.

    If neither of two labels is known to be positive, the second counts as positive: the sign of a
    signal does not matter.
    """
    texts, codes = texts_of(name, array)
    texts = [canonical_text(text) for text in texts]
    labels: dict[str, int] = {}
    counts = np.bincount(codes[codes >= 0], minlength=len(texts)).tolist()
    for text, count in zip(texts, counts, strict=True):
        if count and text:
            labels[text] = labels.get(text, 0) + count
    positives = [*labels][1:] if positive is None else _positives(positive, labels)
    known = {*positives}
    return labels, np.array([*(text in known for text in texts), False], bool)[codes]


def _positives(positive: str, labels: Collection[str]) -> list[str]:
    """Returns the values that `--positive` names, in canonical form."""
    if canonical_text(positive) in labels:
        return [canonical_text(positive)]
    return [canonical_text(text.strip()) for text in positive.split(",")]


def _label(
    summary: Summary, labels: dict[str, int], positive: str | None, whole: bool
) -> tuple[Label, str]:
    """Returns the label that counts as 1, and the reason."""
    name, rows = summary.name, len(summary.missing)
    if summary.missing.any():
        raise ValueError(
            f"column {name}, row {summary.missing.argmax()}: expected a label that is not missing, "
            f"got none, as in {np.count_nonzero(summary.missing)} of {rows} rows"
        )
    missing = [text for text in labels if text.lower() in {*SURE_MARKERS, "na"}]
    if missing and (positive is None or summary.is_number):
        hint = "; --positive names the one that counts as 1, with all others as 0"
        raise ValueError(
            f"column {name}: expected labels that are not missing, got {missing[0]!r} in "
            f"{labels[missing[0]]:,} rows" + hint * (not summary.is_number)
        )
    where = "the rows" if whole else f"the first {rows:,} rows"
    known = ", ".join(map(shown, sorted(labels)[:_MOST_SHOWN]))
    known += ", ..." * (len(labels) > _MOST_SHOWN)
    if positive is not None:
        positives, why = _positives(positive, labels), "as --positive says"
        if unknown := [text for text in positives if text not in labels]:
            raise ValueError(
                f"--positive {unknown[0]}: expected a label that occurs in {where}, got none of "
                f"column {name}, which has {known}"
            )
    elif {text.lower() for text in labels} <= {"0", "1", "true", "false"}:
        true = sum(count for text, count in labels.items() if text.lower() in ("1", "true"))
        return Label(name), f"0 and 1; {true / rows:.2%} of the rows are positive"
    elif len(labels) == 2:
        one, why = _positive(labels)
        positives = [one]
    else:
        raise ValueError(
            f"column {name}: expected two labels in {where}, got {len(labels)}: {known}; "
            "--positive, or label: {positive: [...]} in a schema, names those that count as 1. "
            "Models predict one label of two classes, neither several classes nor numbers"
        )
    value = positives[0] if len(positives) == 1 else tuple(positives)
    counted = " and ".join(map(shown, positives)) + " count" + "s" * (len(positives) == 1)
    share = sum(labels[text] for text in positives) / rows
    label = Label(name, value, any_negative=len(labels) > len(positives) + 1)
    return label, f"{counted} as 1, {why}: {share:.2%} of the rows"


def _positive(labels: dict[str, int]) -> tuple[str, str]:
    """Returns the one of two labels that counts as 1, and the reason."""
    for yes, no in itertools.permutations(labels):
        if yes.lower() in _YES and no.lower() in _NO:
            return yes, "the affirmative one"
    first, second = sorted(labels)
    if labels[first] == labels[second]:
        return second, "the later by alphabet, as both are as frequent"
    return min(labels, key=lambda text: labels[text]), "the rarer one"
