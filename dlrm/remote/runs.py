"""The checkpoints of a training at a URI: which are whole, and which is the best.

They lie as in the directory of a run: `URI/step-<step>/...`, each with a manifest that is written
last, and `URI/best.json`.
"""

import re
from collections.abc import Mapping, Sequence

from dlrm.documents import parse_json
from dlrm.files import MANIFEST
from dlrm.manifest import parse_sealed
from dlrm.remote.publish import find_published
from dlrm.remote.store import Entry, Store, open_store
from dlrm.remote.uri import Uri

BEST = "best.json"
_PROGRESS = "progress.json"  # of a checkpoint
_STEP = re.compile(rf"(step-[0-9]{{9}})/{re.escape(MANIFEST)}")


def checkpoint_among(
    uri: Uri,
    entries: Sequence[Entry],
    names: Mapping[str, str] | None = None,
    newest: bool = False,
) -> Uri | None:
    """Returns the URI of a run's best checkpoint, or else of its newest.

    Args:
        names: key -> key of the file that it shows, see `dlrm.remote.publish.Listing`.
        newest: the newest, even if another is the best.

    Returns:
        Its URI; None if there is no whole checkpoint of a run among the objects.

    Raises:
        OSError: the store cannot be read.
        ValueError: a record is damaged, or the best checkpoint is missing.
    """
    steps = whole_steps(uri, entries, names)
    if not steps:
        return None
    return uri.below([*steps][-1] if newest else best_step(open_store(uri), uri, steps))


def whole_steps(
    uri: Uri, entries: Sequence[Entry], names: Mapping[str, str] | None = None
) -> dict[str, Entry]:
    """Returns names and manifests of the whole checkpoints in a listing, by step."""
    shown = ((names or {}).get(entry.key, entry.key) for entry in entries)
    matches = (_STEP.fullmatch(key.removeprefix(uri.folder)) for key in shown)
    found = zip(matches, entries, strict=True)
    return dict(sorted((match[1], entry) for match, entry in found if match))


def best_step(store: Store, uri: Uri, steps: dict[str, Entry]) -> str:
    """Returns the name of the best of a run's checkpoints; the newest, if none was tested.

    As in a directory, the progress of the newest decides, and `best.json` only where the newest was
    saved before its test.

    Raises:
        OSError: an object cannot be read.
        ValueError: a record is damaged, or the best checkpoint is missing.
    """
    newest, place = [*steps][-1], uri.below(BEST)
    try:
        pointer = parse_sealed(bytes(store.read(store.entry(place.key))), str(place))
    except FileNotFoundError:
        pointer = {}
    if not pointer or _name(pointer, place) != newest:
        place = uri.below(f"{newest}/{_PROGRESS}")
        published = find_published(uri.below(newest))
        if published is None:
            raise FileNotFoundError(f"{uri.below(newest)}: was removed")
        progress = parse_json(bytes(store.read(published.entries[_PROGRESS])), str(place))
        pointer = progress.get("best") or pointer
    best = _name(pointer, place) if pointer else newest
    if best not in steps:
        raise ValueError(
            f"{uri}: expected the best checkpoint, {best}, as {place} says, got none; name a "
            f"checkpoint instead, as {uri.below(newest)}"
        )
    return best


def _name(record: dict, place: Uri) -> str:
    try:
        return f"step-{int(record['step']):09d}"
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{place}: expected the best step: damaged") from None
