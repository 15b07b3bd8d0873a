"""The files of a fitted transform.

table.json          the schema, means, edges of bins, sizes and checksums of the dictionaries
dictionary_<i>.<k>.npy, texts_<i>.<k>.npy, ends_<i>.<k>.npy
                    segment k > 0 of a dictionary that was extended
transform.json      for logs: the number of columns, the rule for numbers, the limits, sizes and
                    checksums
dictionary_<i>.npy  uint32 or uint64 keys of dictionary i in the order of their ids
texts_<i>.npy       for strings, their concatenated bytes
ends_<i>.npy        the end of each string
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.data.transform.dictionaries import (
    Dictionary,
    FrequencyLimit,
    segments_of,
)
from dlrm.data.transform.logs import log_schema, rule_of
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.values import TEXT
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

if TYPE_CHECKING:
    from dlrm.data.transform.transform import Transform

TABLE, LOG = "table.json", "transform.json"
_VERSION, _OF_CHAIN = 1, 2  # versions: of each, and of transforms in a chain of days


class Increment(NamedTuple):
    """The place of a transform in a chain of days, each of which extends the one before.

    Attributes:
        day: the day, a number, a date or an hour.
        numerics: "keep" or "refit", for bins and means.
        days: facts of each day, the last being its own. `transform` is the digest of an earlier
            day's facts file; `new`, `candidates` and `forgotten` are numbers of values by
            dictionary. `admission_probability` is there if it is above 0.
    """

    day: str
    numerics: str
    days: tuple[dict[str, Any], ...]

    @classmethod
    def from_dict(cls, facts: Any) -> "Increment":
        """Makes an increment of `to_dict()`, or raises ValueError."""
        made = cls(facts["day"], facts["numerics"], tuple(facts["days"]))
        for day in made.days:
            if not isinstance(day["day"], str) or not _COUNTS.issubset(day):
                raise ValueError(f"expected the facts of a day, got {brief(day)}")
        if not made.days or made.days[-1]["day"] != made.day:
            raise ValueError(f"expected day {made.day} as the last of the days")
        return made

    def to_dict(self) -> dict[str, Any]:
        """Returns the increment as JSON values."""
        return {"day": self.day, "numerics": self.numerics, "days": list(self.days)}


_COUNTS = {"transform", "rows", "content", "new", "candidates", "forgotten"}


def digest(directory: Path) -> str:
    """Returns the digest of a transform, that of the file with its schema and checksums."""
    return hashlib.sha256(facts_file(directory).read_bytes()).hexdigest()


def facts_file(directory: Path) -> Path:
    """Returns the file that is written last; its presence shows that a transform is whole."""
    table = directory / TABLE
    return table if table.is_file() else directory / LOG


def save(directory: Path, transform: "Transform", crcs: Sequence[Sequence[str]]) -> None:
    """Writes `table.json`, or `transform.json` for logs, after the dictionaries."""
    if transform.is_log:
        text = json.dumps(_log_facts(transform, crcs), indent=2)
        write_atomically(directory / LOG, f"{text}\n")
        return
    facts = {
        "version": _VERSION if transform.increment is None else _OF_CHAIN,
        "schema": transform.schema.to_dict(),
        "numerical": [statistics.to_dict() for statistics in transform.numerical],
        "dictionaries": [
            {"size": len(dictionary), "crc32": crc} | _segments(dictionary)
            for dictionary, crc in zip(transform.dictionaries, crcs, strict=True)
        ],
        "negatives": None if transform.negatives is None else list(transform.negatives),
        "columns": list(transform.columns),
        "keep_negatives": transform.keep_negatives,
        "kinds": list(transform.kinds),
    }
    if transform.increment is not None:
        facts["increment"] = transform.increment.to_dict()
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_atomically(directory / TABLE, f"{text}\n")


def _segments(dictionary: Dictionary) -> dict[str, list[int]]:
    """Returns the sizes of a dictionary's segments, if it has several."""
    sizes = list(map(len, segments_of(dictionary)))
    return {"segments": sizes} if len(sizes) > 1 else {}


def load(directory: Path, make: Callable[..., "Transform"]) -> "Transform":
    """Reads a transform, and makes it of its arguments.

    Raises:
        FileNotFoundError: there is no transform, or one of its files is missing.
        ValueError: a file differs from the form that `save` writes; the message names it.
    """
    path = facts_file(directory)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so {directory} is no fitted transform")
    readers = {TABLE: _read_table, LOG: _read_log}
    try:
        facts = read_json(path)
        if facts["version"] not in (_VERSION, _OF_CHAIN):
            raise ValueError(f"expected version {_VERSION}, got {brief(facts['version'])}")
        made = readers[path.name](directory, facts)
        if facts["version"] == _OF_CHAIN:
            made["increment"] = Increment.from_dict(facts["increment"])
        return make(**made)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if str(error).startswith(str(directory)):
            raise
        raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error


def _read_table(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    schema = Schema.from_dict(facts["schema"])
    numerical = [Fitted.from_dict(statistics) for statistics in facts["numerical"]]
    types = [fields[0].type for fields in schema.dictionaries().values()]
    dictionaries = [
        Dictionary.load(directory, place, entry["size"], kind, _sizes(entry))
        for place, (entry, kind) in enumerate(zip(facts["dictionaries"], types, strict=True))
    ]
    if len(numerical) != (expected := len(schema.numerical)):
        raise ValueError(f"{len(numerical)} fitted of {expected} numbers")
    kinds = texts_in(facts["kinds"])
    if len(kinds) != len(schema.categorical):
        raise ValueError(f"{len(kinds)} kinds of {len(schema.categorical)} fields")
    crcs = [entry["crc32"] for entry in facts["dictionaries"]]
    lengths = [
        {"string": 3, "id": 0}.get(kind, 1) * len(segments_of(dictionary))
        for kind, dictionary in zip(types, dictionaries, strict=True)
    ]
    for length, crc in zip(lengths, crcs, strict=True):
        if not isinstance(crc, list) or len(crc) != length:
            raise ValueError(f"expected {length} checksums, got {brief(crc)}")
    return {
        "schema": schema,
        "numerical": numerical,
        "dictionaries": dictionaries,
        "negatives": facts["negatives"],
        "columns": texts_in(facts["columns"]),
        "keep_negatives": float(facts["keep_negatives"]),
        "kinds": kinds,
        "crcs": crcs,
        "directory": directory,
    }


def _sizes(entry: Mapping[str, Any]) -> list[int]:
    """Returns the sizes of the segments of a dictionary, none for a single one."""
    sizes = entry.get("segments", [])
    if not all(type(size) is int for size in sizes) or (sizes and sum(sizes) != entry["size"]):
        raise ValueError(f"expected segments of {entry['size']} values, got {brief(sizes)}")
    return sizes


def texts_in(values: Any) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, or raises ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts as columns, got {brief(values)}")
    return tuple(values)


def _log_facts(transform: "Transform", crcs: Sequence[Sequence[str]]) -> dict[str, Any]:
    limits = [field.frequency_limit for field in transform.fields]
    ((default, _),) = Counter(limits).most_common(1) or [(FrequencyLimit().default, 0)]
    increment = transform.increment
    facts = {
        "version": _VERSION if increment is None else _OF_CHAIN,
        "num_numerical": transform.num_numerical,
        "numeric_transform": rule_of(transform.schema),
        "frequency_limit": {
            "default": default,
            "by_column": {str(i): n for i, n in enumerate(limits) if n != default},
        },
        "dictionary_sizes": [len(dictionary) for dictionary in transform.dictionaries],
        "dictionary_crc32": [crc[0] if increment is None else crc for crc in crcs],
    }
    if increment is not None:
        segments = [list(map(len, segments_of(d))) for d in transform.dictionaries]
        facts |= {"dictionary_segments": segments, "increment": increment.to_dict()}
    return facts


def _read_log(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    sizes, limits = facts["dictionary_sizes"], facts["frequency_limit"]
    by_column = {int(column): limit for column, limit in limits["by_column"].items()}
    limit = FrequencyLimit(limits["default"], by_column)
    num_numerical, rule = facts["num_numerical"], facts["numeric_transform"]
    crcs = facts["dictionary_crc32"]
    if len(crcs) != len(sizes):
        raise ValueError(f"{len(crcs)} checksums of {len(sizes)} dictionaries")
    schema = log_schema(num_numerical, limit.each(len(sizes)), rule)
    segments = facts.get("dictionary_segments", [[]] * len(sizes))
    entries = [{"size": n, "segments": s} for n, s in zip(sizes, segments, strict=True)]
    return {
        "schema": schema,
        "numerical": [Fitted()] * num_numerical,
        "dictionaries": [
            Dictionary.load(directory, i, entry["size"], "hexadecimal", _sizes(entry))
            for i, entry in enumerate(entries)
        ],
        "kinds": [TEXT] * len(sizes),
        "crcs": [crc if isinstance(crc, list) else [crc] for crc in crcs],
        "directory": directory,
    }
