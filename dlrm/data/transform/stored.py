"""The files of a fitted transform.

    table.json          the schema, means, edges of bins, sizes and checksums of the dictionaries
    transform.json      for logs: the number of columns, the rule for numbers, the limits, sizes and
                        checksums
    dictionary_<i>.npy  uint32 or uint64 keys of dictionary i in the order of their ids
    texts_<i>.npy       for strings, their concatenated bytes
    ends_<i>.npy        the end of each string
    encoded_keys_<i>.npy, encoded_values_<i>.npy
                        of the i-th field with encodings; see `encodings.Encoded`

Transforms of CSV of earlier versions were `csv.json` alone, with lists of texts.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data.transform.dictionaries import (
    Dictionary,
    FrequencyLimit,
    dictionary_path,
    load_dictionary,
)
from dlrm.data.transform.encodings import Encoded
from dlrm.data.transform.logs import log_schema, rule_of
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.values import TEXT
from dlrm.documents import MAX_JSON_BYTES, brief, read_json
from dlrm.files import write_atomically

if TYPE_CHECKING:
    from dlrm.data.transform.transform import Transform

TABLE, LOG, EARLIER = "table.json", "transform.json", "csv.json"
_VERSION = 1  # of each
_EARLIER_BYTES = 1 << 30
NO_LABEL = " no label"  # no column is called so: names have no blanks around them


def facts_file(directory: Path) -> Path:
    """Returns the file that is written last; its presence shows that a transform is whole."""
    paths = [directory / name for name in (TABLE, EARLIER, LOG)]
    return next(filter(Path.is_file, paths), paths[-1])


def save(directory: Path, transform: "Transform", crcs: Sequence[Sequence[str]]) -> None:
    """Writes `table.json`, or `transform.json` for logs, after the dictionaries.

    Args:
        directory: directory of the transform.
        transform: the transform.
        crcs: checksums of each dictionary, then encodings.
    """
    if transform.is_log:
        text = json.dumps(_log_facts(transform, crcs), indent=2)
        write_atomically(directory / LOG, f"{text}\n")
        return
    facts = {
        "version": _VERSION,
        "schema": transform.schema.to_dict(),
        "numerical": [statistics.to_dict() for statistics in transform.numerical],
        "dictionaries": [
            {"size": len(dictionary), "crc32": crc}
            for dictionary, crc in zip(transform.dictionaries, crcs, strict=False)
        ],
        "negatives": None if transform.negatives is None else list(transform.negatives),
        "columns": list(transform.columns),
        "keep_negatives": transform.keep_negatives,
    }
    if transform.kinds is not None:
        facts["kinds"] = list(transform.kinds)
    if transform.encoded:
        facts["encodings"] = [
            {"size": len(encoded.keys), "crc32": crc}
            for encoded, crc in zip(transform.encoded, crcs[-len(transform.encoded) :], strict=True)
        ]
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_atomically(directory / TABLE, f"{text}\n")


def load(directory: Path, make: Callable[..., "Transform"]) -> "Transform":
    """Reads a transform, and makes it of its arguments.

    Raises:
        FileNotFoundError: there is no transform, or one of its files is missing.
        ValueError: a file differs from the form that `save` writes; the message names it.
    """
    path = facts_file(directory)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so {directory} is no fitted transform")
    readers = {TABLE: _read_table, LOG: _read_log, EARLIER: _read_earlier}
    try:
        facts = read_json(
            path, max_bytes=_EARLIER_BYTES if path.name == EARLIER else MAX_JSON_BYTES
        )
        if facts["version"] != _VERSION:
            raise ValueError(f"expected version {_VERSION}, got {brief(facts['version'])}")
        return make(**readers[path.name](directory, facts))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if str(error).startswith(str(directory)):
            raise
        raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error


def _read_table(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    schema = Schema.from_dict(facts["schema"])
    numerical = [Fitted.from_dict(statistics) for statistics in facts["numerical"]]
    types = [fields[0].type for fields in schema.dictionaries().values()]
    dictionaries = [
        Dictionary.load(directory, place, entry["size"], kind)
        for place, (entry, kind) in enumerate(zip(facts["dictionaries"], types, strict=True))
    ]
    if len(numerical) != (expected := len(schema.numerical_features)):
        raise ValueError(f"{len(numerical)} fitted of {expected} numbers")
    of_encodings = facts.get("encodings", [])
    encoded = [
        Encoded.load(directory, place, entry["size"], len(field.encodings))
        for place, (entry, (_, field)) in enumerate(zip(of_encodings, schema.encoded, strict=True))
    ]
    kinds = texts_in(facts["kinds"]) if "kinds" in facts else None
    if kinds is not None and len(kinds) != len(schema.categorical):
        raise ValueError(f"{len(kinds)} kinds of {len(schema.categorical)} fields")
    crcs = [entry["crc32"] for entry in [*facts["dictionaries"], *of_encodings]]
    lengths = [{"string": 3, "id": 0}.get(kind, 1) for kind in types] + [2] * len(encoded)
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
        "encoded": encoded,
        "kinds": kinds,
        "crcs": crcs,
        "directory": directory,
    }


def texts_in(values: Any) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, or raises ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts as columns, got {brief(values)}")
    return tuple(values)


def _log_facts(transform: "Transform", crcs: Sequence[Sequence[str]]) -> dict[str, Any]:
    limits = [field.frequency_limit for field in transform.fields]
    ((default, _),) = Counter(limits).most_common(1) or [(FrequencyLimit().default, 0)]
    return {
        "version": _VERSION,
        "num_numerical": transform.num_numerical,
        "numeric_transform": rule_of(transform.schema),
        "frequency_limit": {
            "default": default,
            "by_column": {str(i): n for i, n in enumerate(limits) if n != default},
        },
        "dictionary_sizes": [len(dictionary) for dictionary in transform.dictionaries],
        "dictionary_crc32": [crc for (crc,) in crcs],
    }


def _read_log(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    sizes, limits = facts["dictionary_sizes"], facts["frequency_limit"]
    by_column = {int(column): limit for column, limit in limits["by_column"].items()}
    limit = FrequencyLimit(limits["default"], by_column)
    num_numerical, rule = facts["num_numerical"], facts["numeric_transform"]
    crcs = facts.get("dictionary_crc32", [])  # early ones have none
    if crcs and len(crcs) != len(sizes):
        raise ValueError(f"{len(crcs)} checksums of {len(sizes)} dictionaries")
    schema = log_schema(num_numerical, limit.each(len(sizes)), rule)
    return {
        "schema": schema,
        "numerical": [Fitted()] * num_numerical,
        "dictionaries": [
            Dictionary(load_dictionary(dictionary_path(directory, i), size), kind="hexadecimal")
            for i, size in enumerate(sizes)
        ],
        "kinds": [TEXT] * len(sizes),
        "crcs": [[crc] for crc in crcs],
        "directory": directory,
    }


def _read_earlier(_directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    rule = facts["numeric_transform"]
    values: Mapping[str, list[str]] = facts["dictionaries"]
    negatives, positive = facts.get("negatives"), facts.get("positive")
    schema = Schema.from_dict(
        {
            "label": {
                "column": facts.get("label") or NO_LABEL,
                "positive": positive,
                "any_negative": positive is not None,
            },
            "numerical": [{"column": name, "transform": rule} for name in facts["scales"]],
            "categorical": list(values),
            "missing_values": facts["missing_values"],
        }
    )
    return {
        "schema": schema,
        "numerical": [
            Fitted(float(mean), float(scale)) for mean, scale in facts["scales"].values()
        ],
        "dictionaries": [Dictionary.from_texts(texts) for texts in values.values()],
        "negatives": negatives,
        "columns": texts_in(facts.get("columns", [])),
    }
