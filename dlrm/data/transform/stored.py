"""The files of a fitted transform.

transform.json      the schema, means, edges of bins, sizes and checksums of the dictionaries
dictionary_<i>.npy  uint32 or uint64 keys of dictionary i in the order of their ids
texts_<i>.npy       for strings, their concatenated bytes
ends_<i>.npy        the end of each string
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import Schema
from dlrm.data.transform.dictionaries import Dictionary, arrays_of
from dlrm.documents import brief, read_json
from dlrm.files import write_atomically

if TYPE_CHECKING:
    from dlrm.data.transform.transform import Transform

_VERSION = 1


def digest(directory: Path) -> str:
    """Returns the digest of a transform, that of the file with its schema and checksums."""
    return hashlib.sha256(facts_file(directory).read_bytes()).hexdigest()


def facts_file(directory: Path) -> Path:
    """Returns the file that is written last; its presence shows that a transform is whole."""
    return directory / "transform.json"


def save(directory: Path, transform: "Transform", crcs: Sequence[Sequence[str]]) -> None:
    """Writes `transform.json`, after the dictionaries."""
    facts = {
        "version": _VERSION,
        "schema": transform.schema.to_dict(),
        "numerical": [
            {name: _hexadecimal(value) for name, value in fitted._asdict().items()}
            for fitted in transform.numerical
        ],
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
    write_atomically(facts_file(directory), f"{text}\n")


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
        if (version := facts.pop("version")) != _VERSION:
            raise ValueError(f"expected version {_VERSION}, got {brief(version)}")
        return make(**_arguments(directory, facts), directory=directory)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if str(error).startswith(str(directory)):
            raise
        raise ValueError(f"{path}: not a fitted transform ({brief(error)})") from error


def _arguments(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    schema = Schema.from_dict(facts["schema"])
    dictionaries, crcs = [], []
    shared = schema.dictionaries().values()
    for i, (entry, (field, *_)) in enumerate(zip(facts["dictionaries"], shared, strict=True)):
        dictionaries.append(Dictionary.load(directory, i, index(entry["size"]), field.type))
        crcs.append(_texts(entry["crc32"]))
        if len(crcs[i]) != (expected := len(arrays_of(dictionaries[i], i))):
            raise ValueError(f"expected {expected} checksums, got {brief(crcs[i])}")
    arguments: dict[str, Any] = {
        "schema": schema,
        "numerical": list(map(_fitted, facts["numerical"])),
        "dictionaries": dictionaries,
        "negatives": facts["negatives"],
        "columns": _texts(facts["columns"]),
        "keep_negatives": float(facts["keep_negatives"]),
        "types": _texts(facts["types"]),
        "crcs": crcs,
    }
    for name, fields in (("numerical", schema.numerical), ("types", schema.categorical)):
        if len(arguments[name]) != len(fields):
            raise ValueError(f"{len(arguments[name])} {name} of {len(fields)} fields")
    return arguments


def _hexadecimal(value: float | np.ndarray) -> Any:
    """Returns numbers as JSON values, exact."""
    return value.hex() if isinstance(value, float) else [one.hex() for one in value.tolist()]


def _fitted(facts: dict[str, Any]) -> Fitted:
    mean, deviation = float.fromhex(facts["mean"]), float.fromhex(facts["deviation"])
    edges, shares = (np.array(list(map(float.fromhex, facts[n]))) for n in ("edges", "shares"))
    finite = np.isfinite([mean, deviation, *edges]).all()
    if not finite or deviation <= 0 or (np.diff(edges) <= 0).any() or len(edges) != len(shares):
        raise ValueError(f"expected finite numbers, edges ascending, got {brief(facts)}")
    return Fitted(mean, deviation, edges, shares)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of texts, got {brief(values)}")
    return values
