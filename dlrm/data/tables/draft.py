"""Drafts a schema from the data, with the reasons for its choices."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.sources.csv_rows import Spans, check_names
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.columns import column_of, texts_of
from dlrm.data.tables.files import CSV, PARQUET, TableFile
from dlrm.data.tables.json_lines import Cell, Number
from dlrm.data.tables.parquet import partition_of, parts_of, read_part, schema_of
from dlrm.data.tables.summaries import BOOLEANS, OTHER, TEXT, TIMES, Summary
from dlrm.data.tables.text import text_of
from dlrm.data.transform.schema import (
    TIME_UNITS,
    CategoricalField,
    Label,
    NumericalField,
    Schema,
    TimeField,
)
from dlrm.data.transform.values import number_text
from dlrm.documents import one_line
from dlrm.files import write_atomically

SAMPLE_ROWS = 1_000_000
FEW_VALUES = 12  # integers with up to so many values are categories, such as months
MANY_VALUES = 1000  # beyond this, rare values do not need a row of a table each
RARE = 5  # times in the sample
HUGE = 100_000  # distinct values
_HUGE_LIMIT, _MAX_IDS, _MOST_BUCKETS = 15, 1_000_000, 1 << 20
_FAR = 10.0  # standard deviations from the mean to the largest value
_NEAR = 20.0  # from the mean to the largest value, below which no logarithm is needed
_UNIQUE_ROWS = 100  # from this many rows, a distinct value in every row is no coincidence
_MOST_SHOWN, _LONGEST_SHOWN, _MOST_LABELS = 10, 24, 1000
_LARGEST_INTEGER = float(1 << 63)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_IDS = {"id", "ids", "uid", "uuid", "guid", "key", "code", "zip", "zipcode", "postcode", "hash"}
_IDS |= {"sku", "isbn", "ip"}
_CALENDAR = {"hour": 24, "day": 31, "weekday": 7, "dow": 7, "week": 53, "month": 12}  # at most
_TIMES = {"time", "timestamp", "ts", "date", "datetime", "at", "epoch"}
_NUMBERED_IDS, _NUMBERED_NUMBERS = {"c", "cat", "categorical"}, {"i", "int", "n", "num"}
# Texts that mean "missing" in columns of other kinds, and that no category has as its name.
_SURE_MARKERS = {"?", "n/a", "nan", "null", "\\n"}
_YES, _NO = {"1", "yes", "y", "true", "t", "positive"}, {"0", "-1", "no", "n", "false", "f"}
_NO |= {"negative"}
_ZERO_OR_ONE = {"0", "1", "0.0", "1.0", "true", "false"}
_EPOCHS = (946_684_800, 2_524_608_000)  # the years 2000 and 2050, in seconds


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
    """

    schema: Schema
    comments: dict[str, str]
    left_out: dict[str, str]
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
        if self.left_out:
            lines += ["# Left out:"]
            lines += [f"#   {_shown_name(name)}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines) + "\n"

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
) -> Draft:
    """Drafts a schema from the first rows of a table.

    Text that is all numbers is read as numbers, except texts such as "?" and "NA", which become
    `missing_values`. Then the first rule that fits decides:

    * Columns with fewer than two values, of maps and of lists of lists, and of text or ids that are
      distinct in every row, are left out.
    * Lists of Parquet and JSON lines are list fields of the longest length; those of numbers with a
      fraction are left out, as they may be weights or vectors.
    * Timestamps, text in ISO 8601, and integers of seconds, milliseconds or microseconds since 1970
      with a name to match are times. The first such column is `time`; others are left out.
    * Booleans and text are categorical, and numbers with a leading zero.
    * Numbers with a fraction are numerical. Whole numbers, including whole floats, are categorical
      if they have up to 12 values, if the name shows that they are ids (`user_id`, `zip`, `c7`) or
      a part of a date (`hour`, `day`), if they are beyond 2^53, or if they number more than 1000
      things without gaps; otherwise, and if the name shows it (`i7`, `num_3`), numerical.
    * A numerical column whose largest value is more than 10 deviations, and more than 20, above the
      mean gets the transform "log", or "quantile" if it has values below 0; the others
      "standardise".
    * A categorical column of more than 1000 values, most of which occur less than 5 times, gets
      `frequency_limit: 5`; one of 100,000 gets 15, at most 1,000,000 ids, and, if a fifth of the
      rows hold rare values, hash buckets for them.

    The label needs no `positive` if it is 0 and 1, or false and true. Of two other values, such as
    yes and no, the affirmative one is positive, otherwise the rarer, otherwise the later one in
    alphabetical order.

    Args:
        batches: the table; a column that a batch lacks is missing in its rows.
        label: the column of labels.
        positive: the value that counts as 1, with every other value as 0.
        weight, groups, time: columns with these roles; groups can be inputs too.
        max_rows: maximum number of rows to read.

    Raises:
        ValueError: a column is missing or occurs twice, weights are not numbers, labels are missing
            or do not have two values, or no column is left as an input.
    """
    columns, labels, rows, whole = _summaries(batches, label, max_rows)
    if not rows:
        raise ValueError("the input has no rows; expected one or more")
    for role, name in (("weight", weight), ("time", time), *(("groups", name) for name in groups)):
        if name is not None and name not in columns:
            shown = ", ".join(list(columns)[:20])
            raise ValueError(f"--{role}: no column {name!r}; the columns are {shown}")
    if weight is not None:
        _check_weight(columns[weight])
    said, label_comment = _label(columns[label], labels, positive, whole)
    drafter = _Drafter(columns, time)
    for name, summary in columns.items():
        if name not in (label, weight, time):
            drafter.add(summary)
    if not drafter.numerical and not drafter.categorical:
        why = "; ".join(f"{name}: {why}" for name, why in drafter.left_out.items())
        raise ValueError(f"no column is left as an input ({why or f'{label} is the only one'})")
    if missing := sorted(set(labels) & set(drafter.missing_values)):
        raise ValueError(
            f"column {label}: expected labels that are not missing, got {missing[0]!r}, which "
            "means so in other columns"
        )
    schema = Schema(
        said,
        tuple(drafter.numerical),
        tuple(drafter.categorical),
        tuple(drafter.missing_values),
        weight,
        tuple(groups),
        drafter.time,
    )
    comments = drafter.comments | {label: label_comment}
    if weight is not None:
        comments[weight] = _described(columns[weight])
    return Draft(schema, comments, drafter.left_out, label_comment, rows, whole)


def _check_weight(summary: Summary) -> None:
    if summary.is_number or summary.kind in (None, BOOLEANS):
        return
    shown = f"the type {', '.join(summary.types)}"
    if summary.examples:
        shown += f" with {', '.join(map(_shown, summary.examples))}"
    raise ValueError(f"--weight: column {summary.name!r}: expected numbers, got {shown}")


@dataclass
class Seen:
    """What reading the files of a draft revealed, besides the values.

    Attributes:
        nested: column of JSON -> its first value that is a map or a list of them.
        twice: columns whose name occurs several times, of which none is read.
        spans: file -> rows that quoted cells extend over several lines.
    """

    nested: dict[str, str] = field(default_factory=dict)
    twice: dict[str, None] = field(default_factory=dict)
    spans: dict[Path, Spans] = field(default_factory=dict)


def batches_of(
    files: Sequence[TableFile],
    text: TextFormat,
    needed: Collection[str] = (),
    seen: Seen | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of files with all their columns, those of folders included.

    Args:
        files: files of one kind.
        text: format of CSV.
        needed: columns that every CSV file must have.
        seen: receives what is not in the batches.

    Raises:
        ValueError: a file is damaged, or lacks a column; the message names it.
    """
    seen = seen or Seen()
    for file in files:
        partition = partition_of(file.path, file.root)
        if file.kind == PARQUET:
            for part in parts_of([(file.path, file.path, file.root)], 1 << 62):
                names = schema_of(file.path).names
                yield from read_part(part, list(dict.fromkeys([*names, *part.partition])))
            continue
        spans = seen.spans.setdefault(file.path, Spans())
        for names, lines, read in text_of(file, text, spans=spans, nested=seen.nested):
            if file.kind == CSV:
                check_names(file.path, names, text, [n for n in needed if n not in partition])
            twice = {name for name in names if names.count(name) > 1}
            seen.twice |= dict.fromkeys(sorted(twice))
            arrays = {
                name: _array(file, name, column)
                for name, column in read
                if name not in partition and name not in twice
            }
            arrays |= {
                name: pa.array([value] * len(lines), pa.string())
                for name, value in partition.items()
            }
            yield pa.record_batch(list(arrays.values()), names=list(arrays))


def _array(file: TableFile, name: str, column: pa.Array | list[Cell]) -> pa.Array:
    """Returns the cells of a column; numbers of JSON have the text of typed ones."""
    if isinstance(column, pa.Array):
        return column
    kinds = {list if isinstance(cell, list) else str for cell in column if cell is not None}
    if len(kinds) > 1:
        raise ValueError(
            f"{file.path}: column {name}: expected values or lists in all rows, got both"
        )
    if not kinds:
        return pa.nulls(len(column))
    cells = [
        [number_text(one) if isinstance(one, Number) else one for one in cell]
        if isinstance(cell, list)
        else number_text(cell)
        if isinstance(cell, Number)
        else cell
        for cell in column
    ]
    return pa.array(cells, pa.list_(pa.string()) if list in kinds else pa.string())


def _summaries(
    batches: Iterable[pa.RecordBatch], label: str, max_rows: int
) -> tuple[dict[str, Summary], dict[str, int], int, bool]:
    """Returns the columns' summaries, the counts of labels, the rows, and whether they are all."""
    columns: dict[str, Summary] = {}
    labels: dict[str, int] = {}
    rows = 0
    for batch in batches:
        if rows == max_rows:
            return columns, labels, rows, batch.num_rows == 0
        whole = batch.num_rows <= max_rows - rows
        batch = batch.slice(0, max_rows - rows)
        if len(labels) <= _MOST_LABELS:
            texts, codes = texts_of(label, column_of(batch, label))
            counts = np.bincount(codes[codes >= 0], minlength=len(texts))
            for text, count in zip(texts, counts.tolist(), strict=True):
                if count and text:
                    labels[text] = labels.get(text, 0) + count
        for name in batch.schema.names:
            summary = columns.setdefault(name, Summary(name))
            summary.add_missing(rows - summary.rows)  # rows of batches without the column
            summary.add(column_of(batch, name))
        rows += batch.num_rows
        for summary in columns.values():
            summary.add_missing(rows - summary.rows)
        if not whole:
            return columns, labels, rows, False
    return columns, labels, rows, True


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
    shown = ", ".join(map(_shown, sorted(labels)[:_MOST_SHOWN]))
    shown += ", ..." if len(labels) > _MOST_SHOWN else ""
    if positive is not None:
        if positive not in labels:
            raise ValueError(
                f"--positive {positive}: expected a label that occurs in {rows}, got none of "
                f"column {name}, which has {shown}"
            )
        label, why = Label(name, positive, any_negative=len(labels) > 2), "as --positive says"
    elif {text.lower() for text in labels} <= _ZERO_OR_ONE:
        true = sum(n for text, n in labels.items() if text.lower() in ("1", "1.0", "true"))
        return Label(name), f"0 and 1; {true / summary.rows:.2%} of the rows are positive"
    elif len(labels) != 2:
        raise ValueError(
            f"column {name}: expected two labels in {rows}, got {len(labels)}: {shown}; --positive "
            "names the one that counts as 1, with all others as 0"
        )
    else:
        value, why = _positive(labels)
        label = Label(name, value)
    share = labels[label.positive or ""] / summary.rows
    return label, f"{_shown(label.positive or '')} counts as 1, {why}: {share:.2%} of the rows"


def _positive(labels: dict[str, int]) -> tuple[str, str]:
    """Returns the one of two labels that counts as 1, and the reason."""
    for yes, no in itertools.permutations(labels):
        if yes.lower() in _YES and no.lower() in _NO:
            return yes, "the affirmative one"
    first, second = sorted(labels)
    if labels[first] == labels[second]:
        return second, "the later by alphabet, as both are as frequent"
    return min(labels, key=lambda text: labels[text]), "the rarer one"


class _Drafter:
    """Assigns columns to fields, with reasons."""

    def __init__(self, columns: dict[str, Summary], time: str | None) -> None:
        self.numerical: list[NumericalField] = []
        self.categorical: list[CategoricalField] = []
        self.comments: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.missing_values: dict[str, None] = {}
        self.time: TimeField | None = None
        if time is not None:
            self.time = _time_field(columns[time])
            self.comments[time] = _described(columns[time]) + _zone_note(self.time, columns[time])

    def add(self, summary: Summary) -> None:
        """Makes a field of a column, or leaves it out."""
        name = summary.name
        if (why := _useless(summary)) is not None:
            self.left_out[name] = why
        elif summary.values is not None:
            self._add_list(summary, summary.values)
        elif summary.is_time or _is_epoch(summary):
            self._add_time(summary)
        elif summary.is_number:
            why = _category(summary)
            if why is None:
                self._add_numerical(summary)
            else:
                self._add_categorical(summary, why)
        else:
            self._add_categorical(summary, _text_note(summary))

    def _add_list(self, summary: Summary, values: Summary) -> None:
        if values.is_number and not _whole(values):
            why = f"a list of numbers, up to {summary.longest}; {_described(values)}"
            self.left_out[summary.name] = f"{why} (weights: {summary.name} in another list field?)"
            return
        self._add_categorical(values, "")
        self.categorical[-1] = replace(self.categorical[-1], max_length=max(summary.longest, 1))
        lists = f"lists of up to {summary.longest}, {values.rows / summary.rows:.3g} on average"
        empty = (summary.empty + summary.missing) / summary.rows
        lists += f", {empty:.2%} empty" if empty else ""
        self.comments[summary.name] = f"{lists}; {self.comments[summary.name]}"

    def _add_time(self, summary: Summary) -> None:
        described = _described(summary)
        if self.time is not None:
            self.left_out[summary.name] = f"a further time beside {self.time.column}; {described}"
        elif summary.missing:
            self.left_out[summary.name] = f"a time that some rows do not have; {described}"
        else:
            self.time = _time_field(summary)
            self.comments[summary.name] = described + _zone_note(self.time, summary)

    def _add_numerical(self, summary: Summary) -> None:
        numbers, transform = summary.numbers, "standardise"
        far = numbers.most - numbers.mean > max(_FAR * numbers.deviation, _NEAR)
        if far:
            transform = "log" if numbers.least >= 0 else "quantile"
        self._note_markers(summary)
        if summary.not_a_number:
            self.missing_values["nan"] = None
        self.numerical.append(NumericalField(summary.name, transform))
        note = "; infinite values, which prepare refuses" if summary.infinite else ""
        self.comments[summary.name] = _described(summary) + note

    def _add_categorical(self, summary: Summary, why: str) -> None:
        kind, distinct = "string", len(summary.distinct)
        numbers = summary.numbers
        if summary.is_number and numbers.whole and numbers.most < _LARGEST_INTEGER:
            kind = "integer"
        self._note_markers(summary)
        if summary.not_a_number:
            self.missing_values["nan"] = None
        limit, max_ids, buckets = 1, None, 0
        rare, _ = summary.distinct.below(RARE)
        if distinct >= HUGE:
            limit, max_ids = _HUGE_LIMIT, _MAX_IDS
            _, rows = summary.distinct.below(_HUGE_LIMIT)
            if rows > summary.present / 5:
                buckets = min(1 << (distinct // 10).bit_length(), _MOST_BUCKETS)
        elif distinct > MANY_VALUES and rare > distinct / 2:
            limit = RARE
        self.categorical.append(CategoricalField(summary.name, kind, limit, max_ids, buckets))
        self.comments[summary.name] = _described(summary) + (f"; {why}" if why else "")

    def _note_markers(self, summary: Summary) -> None:
        for text in summary.markers:
            if summary.is_number or text.lower() in _SURE_MARKERS:
                self.missing_values[text] = None


def _useless(summary: Summary) -> str | None:
    """Returns the reason why a column is no input, or None."""
    if summary.kind is None:
        return "no value"
    if summary.kind == OTHER:
        return f"the type {' and '.join(summary.types)}"
    if summary.values is not None:
        return None if summary.longest else "no value in any list"
    distinct = len(summary.distinct)
    if distinct < 2 and not summary.missing:
        value = summary.examples[0] if summary.examples else f"{summary.numbers.least:.9g}"
        return f"one value, {_shown(value)}, in every row"
    unique = summary.distinct.most == 1 and summary.present >= _UNIQUE_ROWS
    is_id = not summary.is_number or _named(summary.name, _IDS) or _gapless(summary)
    if unique and is_id and not summary.is_time and (not summary.is_number or _whole(summary)):
        return f"a value of its own in every row; {_described(summary)}"
    return None


def _category(summary: Summary) -> str | None:
    """Returns the reason why numbers are a category, or None."""
    if not _whole(summary):
        return None
    distinct, numbers = len(summary.distinct), summary.numbers
    stem = re.fullmatch(r"(.*?)[_-]?\d+", summary.name)
    stem_name = stem[1].lower() if stem else ""
    if stem_name in _NUMBERED_NUMBERS:
        return None
    if stem_name in _NUMBERED_IDS or _named(summary.name, _IDS):
        return "an id by its name"
    if distinct <= FEW_VALUES:
        return "few values"
    if _is_calendar(summary):
        return "part of a date by its name"
    if max(abs(numbers.least), abs(numbers.most)) > 1 << 53:
        return "too large for an exact number"
    if _gapless(summary):
        return "numbers without gaps"
    return None


def _whole(summary: Summary) -> bool:
    return summary.numbers.whole and not summary.infinite


def _gapless(summary: Summary) -> bool:
    numbers, distinct = summary.numbers, len(summary.distinct)
    return distinct > MANY_VALUES and numbers.most - numbers.least < 1.25 * distinct


def _is_calendar(summary: Summary) -> bool:
    most = _CALENDAR.get(_last_word(summary.name), -1)
    return summary.numbers.least >= 0 and summary.numbers.most <= most


def _named(name: str, words: Collection[str]) -> bool:
    return _last_word(name) in words


def _last_word(name: str) -> str:
    return (_WORDS.findall(name) or [""])[-1].lower()


def _text_note(summary: Summary) -> str:
    if summary.kind != TEXT:
        return ""
    strays, numbers = summary.strays, summary.numbers.count
    if strays and numbers > 0.9 * summary.present:
        shown = ", ".join(_shown(text) for text in list(strays)[:3])
        return f"numbers but for {shown}: numerical once missing_values has them"
    return "numbers that begin with 0" if summary.padded and not strays and numbers else ""


def _unit(summary: Summary) -> str | None:
    """Returns the unit in which integers may count from 1970, or None."""
    numbers = summary.numbers
    for unit, nanoseconds in TIME_UNITS.items():
        first, last = (edge * TIME_UNITS["s"] // nanoseconds for edge in _EPOCHS)
        if numbers.count and first <= numbers.least and numbers.most <= last:
            return unit
    return None


def _is_epoch(summary: Summary) -> bool:
    there = summary.is_number and summary.numbers.whole and _named(summary.name, _TIMES)
    return there and _unit(summary) is not None


def _time_field(summary: Summary) -> TimeField:
    if summary.is_number:
        return TimeField(summary.name, unit=_unit(summary) or "s")
    return TimeField(summary.name, zone=None if summary.zoned else "UTC")


def _zone_note(field: TimeField, summary: Summary) -> str:
    if field.unit is not None:
        return f"; unit {field.unit} by its size"
    return "" if summary.zoned else "; has no zone, UTC is assumed"


def _described(summary: Summary) -> str:
    """Returns a line that describes a column."""
    distinct = len(summary.distinct)
    parts = [f"{'' if summary.distinct.exact else 'about '}{distinct:,} distinct"]
    if summary.kind == TIMES:
        ends = (summary.numbers.least, summary.numbers.most)
        parts += [" .. ".join(str(np.datetime64(int(e), "us"))[:19] for e in ends)]
    elif summary.is_number and summary.numbers.count:
        parts += [f"{summary.numbers.least:.9g} .. {summary.numbers.most:.9g}"]
    elif summary.kind in (TEXT, BOOLEANS):
        parts += [", ".join(map(_shown, summary.examples))]
    missing = summary.missing + summary.not_a_number
    if missing:
        parts += [f"{missing / summary.rows:.2%} missing"]
    if markers := summary.markers:
        parts += [f"{text!r} in {n:,} rows" for text, n in markers.items()]
    return ", ".join(parts)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")


def _shown_name(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else _shown(name)
