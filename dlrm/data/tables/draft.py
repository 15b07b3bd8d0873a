"""Drafts a schema from a sample of a table, with the reasons for its choices."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import pyarrow as pa

from dlrm.data.schema.fields import CategoricalField, NumericalField, TimeField
from dlrm.data.schema.schema import Label, Schema
from dlrm.data.sources.column_names import check_columns, listed
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables import fields
from dlrm.data.tables.fields import described, joined, shown, shown_name
from dlrm.data.tables.samples import Seen
from dlrm.data.tables.summary import NUMBER, NUMBERS, SURE_MARKERS, Summary
from dlrm.data.transform.arrays import column_of, texts_of
from dlrm.data.transform.values import canonical_text
from dlrm.documents import one_line

SAMPLE_ROWS, _SAMPLE_BYTES = 1_000_000, 1 << 31
_LEAK = 0.9  # share of the label's variance that a column explains
_YES = {"1", "yes", "y", "true", "t", "positive", "on"}
_NO = {"0", "-1", "no", "n", "false", "f", "negative", "off"}


@dataclass(kw_only=True)
class Draft:
    """A schema, and the observations that it was drafted from."""

    schema: Schema = field(init=False)
    label: str  # the value that counts as 1, and the reason
    sample: str  # the rows that were read
    left_out: dict[str, str]  # column -> reason why no field uses it
    comments: dict[str, str] = field(default_factory=dict)  # column -> observations
    warnings: dict[str, str] = field(default_factory=dict)  # column -> what to check
    in_doubt: list[str] = field(default_factory=list)  # columns that are numerical and categorical
    leaks: list[str] = field(default_factory=list)  # columns that nearly tell the label

    def text(self, source: str = "a table") -> str:
        """Returns the schema as YAML with a comment per column."""
        lines = [f"# Drafted from {self.sample} of {one_line(source)}. Check it before use."]
        lines += [self.schema.text(self.comments).removesuffix("\n")]
        lines += ["# Left out:"] * bool(self.left_out)
        lines += [f"#   {shown_name(name)}: {one_line(why)}" for name, why in self.left_out.items()]
        return "\n".join(lines) + "\n"

    def note(self, decided: Collection[str] = ()) -> str | None:
        """Returns a line on columns, other than `decided` ones, that a user should check."""
        parts = []
        for note, columns in (
            ("left out {}", self.left_out),
            ("took {} as a number and an id, in doubt", self.in_doubt),
            ("used {}, which nearly tells the label", self.leaks),
        ):
            if rest := [shown_name(name) for name in columns if name not in decided]:
                parts.append(note.format(listed(rest)))
        return "; ".join(parts) or None


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
    field. Columns that tell a model nothing, or that `prepare` refuses, are left out. The first
    column of times is `time`: timestamps, text in ISO 8601, and numbers that count from 1970 or are
    such as 14102100, if their names are those of times. Text and booleans are categorical,
    fractions numerical. Of whole numbers, the name decides first (see `dlrm.data.tables.names`),
    then the values, then whether the label follows their order; what stays in doubt is both a
    numerical and a categorical field. `dlrm.data.tables.fields` has these rules in order.

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
    table, left_out, sample = _sample(batches, max_rows)
    single = {"--weight": weight, "--time": time}
    roles = [(flag, name) for flag, name in single.items() if name is not None]
    roles += [("--groups", name) for name in groups]
    for flag, name in (("", label), *roles):
        check_columns(flag, table.column_names, [name])
    target, why, positives = _label(label, table[label].combine_chunks(), positive, sample)
    columns = {name: Summary(name, table[name], positives, text) for name in table.column_names}
    left_out |= {} if seen is None else seen.left_out
    made = Draft(label=why, sample=sample, left_out=left_out)
    made.comments[label] = one_line(why)
    for flag, name in roles:
        _check_role(flag, columns[name])
    moment: TimeField | None = None
    if weight is not None:
        made.comments[weight] = described(columns[weight])
    if time is not None and (found := fields.time_of(columns[time], chosen=True)) is not None:
        moment, made.comments[time] = found
    numerical, categorical = list[NumericalField](), list[CategoricalField]()
    for name, column in columns.items():
        if name in (label, weight, time, *left_out):
            continue
        reason = fields.left_out(column)
        found = fields.time_of(column) if reason is None else None
        if found is not None and column.missing:
            reason = f"a time that some rows do not have; {described(column)}"
        elif found is not None and moment is not None:
            reason = f"a further time beside {moment.column}; {described(column)}"
        if reason is not None:
            left_out[name] = reason
        elif found is not None:
            moment, made.comments[name] = found
        else:
            uses = _uses(made, column, columns)
            if fields.NUMBER in uses:
                numerical.append(fields.numerical_field(column))
            if fields.ID in uses:
                categorical.append(fields.categorical_field(column))
    left_out.pop(label, None)
    if not numerical and not categorical:
        reasons = "; ".join(f"{shown_name(name)}: {why}" for name, why in left_out.items())
        raise ValueError(f"no column is left as an input ({reasons or f'{label} is the only one'})")
    made.schema = Schema(
        target,
        tuple(numerical),
        tuple(categorical),
        weight=weight,
        groups=tuple(groups),
        time=moment,
        format=None if text is None else text.remembered,
    )
    return made


def _uses(made: Draft, column: Summary, columns: Collection[str]) -> set[str]:
    """Returns whether a column is a number, an id or both, and notes what was seen of it."""
    name, (uses, reason) = column.name, fields.uses(column)
    if len(uses) > 1 and f"{name}_number" in columns:
        uses, reason = {fields.ID}, ""
    made.in_doubt += [name] * (len(uses) > 1)
    warning = fields.disguise(column)
    if fields.ID in uses:
        warning = joined(warning, fields.inexact(column.items or column))
    if (share := column.signal.share) >= _LEAK and column.rows >= fields.UNIQUE_ROWS:
        made.leaks.append(name)
        leak = f"nearly tells the label ({share:.1%} of its variance): known before it?"
        warning = joined(warning, leak)
    made.warnings |= {name: warning} if warning else {}
    made.comments[name] = joined(described(column), reason, warning)
    return uses


def _sample(
    batches: Iterable[pa.RecordBatch], max_rows: int
) -> tuple[pa.Table, dict[str, str], str]:
    """Returns the first rows, the columns of several types, and a description of the rows."""
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
            columns[name] = pa.concat_tables(tables, promote_options="permissive")[0]
        except pa.ArrowException:
            columns[name] = pa.nulls(rows)
            types = " and ".join(dict.fromkeys(str(array.type) for array in arrays))
            left_out[name] = f"the types {types}; expected one"
    return pa.table(columns), left_out, f"{'all' if whole else 'the first'} {rows:,} rows"


def _check_role(flag: str, column: Summary) -> None:
    expected = f"{flag}: column {column.name!r}: expected"
    got = f"got {column.type} with {described(column)}"
    number = column.content == NUMBERS or pa.types.is_boolean(column.type)
    if flag == "--time" and fields.time_of(column, chosen=True) is None:
        hint = "time: {format: ...} in a schema says another form"
        raise ValueError(f"{expected} times in ISO 8601 or numbers, {got}; {hint}")
    if flag == "--weight" and (not number or column.range[0] < 0 or column.range[1] == 0):
        raise ValueError(f"{expected} numbers of 0 or more, some above 0, {got}")
    if column.missing:
        lacking = f"got none in {column.missing:,} of {column.rows:,} rows"
        raise ValueError(
            f"{expected} a value in every row, {lacking}; fill it, or do without {flag}"
        )


def _label(
    name: str, array: pa.Array, positive: str | None, sample: str
) -> tuple[Label, str, np.ndarray]:
    """Returns the label, the value that counts as 1 and why, and a mask of the rows with it."""
    texts, codes = texts_of(name, array)
    rows = np.array([*map(canonical_text, texts), ""], object)[codes]
    labels = Counter[str](rows.tolist())
    if "" in labels:
        raise ValueError(
            f"column {name}, row {np.argmax(rows == '')}: expected a label that is not missing, "
            f"got none, as in {labels['']} of {len(rows)} rows"
        )
    missing = [text for text in labels if text.lower() in (*SURE_MARKERS, "na")]
    numbers = all(re.match(NUMBER, text) for text in labels if text not in missing)
    if missing and (positive is None or numbers):
        hint = "; --positive names the one that counts as 1, with all others as 0"
        raise ValueError(
            f"column {name}: expected labels that are not missing, got {missing[0]!r} in "
            f"{labels[missing[0]]:,} rows{'' if numbers else hint}"
        )
    known = listed([*map(shown, sorted(labels))])
    if positive is not None:
        whole = canonical_text(positive)
        given = [whole] if whole in labels else positive.split(",")
        positives, why = [canonical_text(text.strip()) for text in given], "as --positive says"
        if unknown := [text for text in positives if text not in labels]:
            raise ValueError(
                f"--positive {unknown[0]}: expected a label that occurs in {sample}, got none of "
                f"column {name}, which has {known}"
            )
    elif {text.lower() for text in labels} <= {"0", "1", "true", "false"}:
        mask = np.isin(rows, [text for text in labels if text.lower() in ("1", "true")])
        return Label(name), f"0 and 1; {mask.mean():.2%} of the rows are positive", mask
    elif len(labels) == 2:
        pairs = permutations(labels)
        affirmed = [yes for yes, no in pairs if yes.lower() in _YES and no.lower() in _NO]
        rarer = min(sorted(labels, reverse=True), key=labels.__getitem__)
        as_frequent = len({*labels.values()}) == 1
        why = "the later by alphabet, as both are as frequent" if as_frequent else "the rarer one"
        positives, why = (affirmed, "the affirmative one") if affirmed else ([rarer], why)
    else:
        raise ValueError(
            f"column {name}: expected two labels in {sample}, got {len(labels)}: {known}; "
            "--positive, or label: {positive: [...]} in a schema, names those that count as 1. "
            "Models predict one label of two classes, neither several classes nor numbers"
        )
    mask = np.isin(rows, positives)
    value = positives[0] if len(positives) == 1 else tuple(positives)
    label = Label(name, value, any_negative=len(labels) > len(positives) + 1)
    count = "counts" if len(positives) == 1 else "count"
    counted = f"{' and '.join(map(shown, positives))} {count} as 1, {why}"
    return label, f"{counted}: {mask.mean():.2%} of the rows", mask
