"""The files of a fitted transform.

transform.json      the schema, means, edges of bins, sizes and checksums of the dictionaries
dictionary_<i>.npy  uint32 or uint64 keys of dictionary i in the order of their ids
texts_<i>.npy       for strings, their concatenated bytes
ends_<i>.npy        the end of each string
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import Schema
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

if TYPE_CHECKING:
    from dlrm.data.transform.transform import Transform

FACTS = "transform.json"
_VERSION = 1


def digest(directory: Path) -> str:
    """Returns the digest of a transform, that of the file with its schema and checksums."""
    return hashlib.sha256(facts_file(directory).read_bytes()).hexdigest()


def facts_file(directory: Path) -> Path:
    """Returns the file that is written last; its presence shows that a transform is whole."""
    return directory / FACTS


def save(directory: Path, transform: "Transform", crcs: Sequence[Sequence[str]]) -> None:
    """Writes `transform.json`, after the dictionaries."""
    facts = {
        "version": _VERSION,
        "schema": transform.schema.to_dict(),
        "numerical": [statistics.to_dict() for statistics in transform.numerical],
        "dictionaries": [
            {"size": len(dictionary), "crc32": crc}
            for dictionary, crc in zip(transform.dictionaries, crcs, strict=True)
        ],
        "negatives": None if transform.negatives is None else list(transform.negatives),
        "columns": list(transform.columns),
        "keep_negatives": transform.keep_negatives,
        "types": list(transform.types),
    }
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_atomically(directory / FACTS, f"{text}\n")


def load(directory: Path, make: Callable[..., "Transform"]) -> "Transform":
    """Reads a transform, and makes it of its arguments.

    Raises:
        FileNotFoundError: there is no transform, or one of its files is missing.
        ValueError: a file differs from the form that `save` writes; the message names it.
    """
    path = facts_file(directory)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so {directory} is no fitted transform")
    try:
        facts = read_json(path)
        if facts["version"] != _VERSION:
            raise ValueError(f"expected version {_VERSION}, got {brief(facts['version'])}")
        return make(**_read(directory, facts))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if str(error).startswith(str(directory)):
            raise
        raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error


def _read(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    schema = Schema.from_dict(facts["schema"])
    numerical = [Fitted.from_dict(statistics) for statistics in facts["numerical"]]
    types = [fields[0].type for fields in schema.dictionaries().values()]
    dictionaries = [
        Dictionary.load(directory, place, entry["size"], kind)
        for place, (entry, kind) in enumerate(zip(facts["dictionaries"], types, strict=True))
    ]
    if len(numerical) != (expected := len(schema.numerical)):
        raise ValueError(f"{len(numerical)} fitted of {expected} numbers")
    value_types = texts_in(facts["types"])
    if len(value_types) != len(schema.categorical):
        raise ValueError(f"{len(value_types)} types of {len(schema.categorical)} fields")
    crcs = [entry["crc32"] for entry in facts["dictionaries"]]
    for kind, crc in zip(types, crcs, strict=True):
        length = {"string": 3, "id": 0}.get(kind, 1)
        if not isinstance(crc, list) or len(crc) != length:
            raise ValueError(f"expected {length} checksums, got {brief(crc)}")
    return {
        "schema": schema,
        "numerical": numerical,
        "dictionaries": dictionaries,
        "negatives": facts["negatives"],
        "columns": texts_in(facts["columns"]),
        "keep_negatives": float(facts["keep_negatives"]),
        "types": value_types,
        "crcs": crcs,
        "directory": directory,
    }


def texts_in(values: Any) -> tuple[str, ...]:
    """Returns a list of texts as a tuple, or raises ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts as columns, got {brief(values)}")
    return tuple(values)
