"""Fits a transform to a day of a chain: the stage "dictionary" of such rows."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data.clicks import layout
from dlrm.data.transform import stored
from dlrm.data.transform.dictionaries import Dictionary, checksum, segments_of
from dlrm.data.transform.encodings import Encoded
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.transform.values import canonical_text
from dlrm.files import link_or_copy, write_atomically
from dlrm.manifest import read_manifest
from dlrm.preproc.increments.candidates import Admission, bytes_of, quotas
from dlrm.preproc.increments.known import FROZEN, GROWS, KEPT, OTHER, KnownValues
from dlrm.preproc.increments.segments import DAY, SegmentJob, write_segments
from dlrm.preproc.stages.counting import counted_columns
from dlrm.preproc.stages.dictionary_merge import CountedColumn, write_lookups
from dlrm.preproc.stages.division import TRAIN
from dlrm.preproc.stages.fitting import (
    TransformFacts,
    fit_counted,
    numbers_of,
    shared_out,
    with_totals,
)
from dlrm.preproc.stages.options import day_number
from dlrm.preproc.stages.stage import PreparationRun

if TYPE_CHECKING:
    from dlrm.preproc.increments.growth import Growth


def lookups_of_parent(run: PreparationRun) -> Path | None:
    """Returns the folder of the parent's lookups, made first if it has none; None without one."""
    growth: Growth | None = run.growth
    if growth is None or growth.parent is None:
        return None
    parent = growth.parent
    if parent.state is not None:
        return parent.state
    folder = run.work.folder("parent")
    if run.work.result("parent") is None:
        places = range(len(parent.fitted.dictionaries))
        task = partial(write_lookups, transform=str(parent.transform), folder=str(folder))
        with run.stage("parent") as stage:
            stage.tasks("parent", task, shared_out(places))
        run.work.finish("parent", True)
    return folder


def extend(
    growth: "Growth",
    run: PreparationRun,
    counted: Sequence[dict[str, Any]],
    directory: Path,
    facts: TransformFacts,
) -> Transform:
    """Writes the transform of a day, and what the next day needs; see `dlrm.preproc.stages.fit`.

    Raises:
        ValueError: no row is positive, or the rows are those of an earlier day.
    """
    schema, chain = run.options.schema, directory.parent / layout.CHAIN
    num_rows = sum(result["rows"][TRAIN] for result in counted)
    positives = sum(result["positives"][TRAIN] for result in counted)
    if not positives:
        raise ValueError(
            f"--day {growth.day}: expected rows with label 1 among its {num_rows} training rows, "
            "got none"
        )
    _check_labels(growth, schema, facts.negatives)
    places = list(schema.dictionaries().values())
    columns = with_totals(counted_columns(schema), counted)
    known = _known(run, growth, columns)
    kept = [
        column._replace(kind="kept", encoded=None)
        if role == KEPT or (role == FROZEN and growth.parent is not None)
        else column
        for role, column in zip(known.roles, columns, strict=True)
    ]
    made_of = [
        column._replace(most=max(column.most - sum(known.sizes[place]), 0))
        if known.roles[place] == GROWS and column.most is not None
        else column
        for place, column in enumerate(kept)
    ]
    grown, lookups = run.work.folder("grown"), run.work.folder("lookups")
    results = fit_counted(run, len(counted), num_rows, made_of, grown, known)
    merged = run.work.result("merged")
    content = _content([num_rows, positives], merged)
    for day in growth.parent.days if growth.parent else ():
        if day["content"] == content:
            raise ValueError(
                f"--day {growth.day}: expected rows of another day, got those of day {day['day']}, "
                f"which {growth.config.extend} has already"
            )
    before = growth.parent.days[-1]["rows"] if growth.parent else None
    if before is not None and 100 * num_rows <= before:
        run.say(f"note: day {growth.day} has {num_rows:,} training rows, the last had {before:,}")
    directory.mkdir(parents=True, exist_ok=True)
    chain.mkdir(parents=True, exist_ok=True)
    folders = map(str, (grown, directory, chain, lookups))
    kinds = [fields[0].type for fields in places]
    new = [results[place] or 0 for place in range(len(places))]
    job = _segment_job(growth, known, kinds, new, merged, [*folders])
    with run.stage("segments") as stage:
        parts = stage.tasks(
            "segments", partial(write_segments, job=job), shared_out(range(len(places)))
        )
    for folder in (directory, chain):
        run.work.fetch(folder)
    of_place = {int(place): made for part in parts for place, made in part.items()}
    made = [of_place[place] for place in range(len(places))]
    linked = {name: source for one in made for name, source in one["linked"].items()}
    linked |= _link_encodings(run, growth, grown, directory, lookups)
    run.work.share(lookups, keep=False)
    run.work.finish("linked", _checksums(growth, linked))
    for one, result in zip(made, results, strict=False):
        one["greatest"] = result  # of ids
    fitted = None if growth.keeps_numerics else numbers_of(run, counted, results, directory)
    return _transform(run, growth, facts, made, fitted, {"rows": num_rows, "content": content})


def _check_labels(growth: "Growth", schema: Schema, negatives: Sequence[str] | None) -> None:
    """Raises ValueError if a day has a label that the days before do not have."""
    label, known = schema.label, growth.parent and growth.parent.fitted.known_labels
    if not known or label.any_negative:
        return
    forms = set(map(canonical_text, known))
    if others := [text for text in negatives or () if canonical_text(text) not in forms]:
        raise ValueError(
            f"--day {growth.day}: column {label.column}: expected the labels of "
            f"{growth.config.extend}, {' or '.join(map(repr, known))}, got {others[0]!r}"
        )


def _known(run: PreparationRun, growth: "Growth", columns: Sequence[CountedColumn]) -> KnownValues:
    schema, parent, config = run.options.schema, growth.parent, growth.config
    roles, texts, sizes = list[str](), list[bool](), list[list[int]]()
    places = list(schema.dictionaries().values())
    for place, column in enumerate(columns):
        texts.append(column.kind == "texts")
        sizes.append([])
        if place >= len(places):
            roles.append(KEPT if growth.keeps_numerics else OTHER)
        elif column.kind == "ids":
            roles.append(OTHER)
        else:
            is_hashed = any(field.hash_buckets for field in places[place])
            roles.append(FROZEN if is_hashed else GROWS)  # as buckets follow the dictionary
            if parent is not None:
                sizes[-1] = list(map(len, segments_of(parent.fitted.dictionaries[place])))
    lookups = lookups_of_parent(run)
    return KnownValues(
        roles,
        texts,
        _admissions(run, growth, columns),
        sizes,
        str(lookups or ""),
        None if parent is None or parent.state is None else str(parent.state),
        run.work.result("count.buckets"),
        day_number(growth.day),
        config.half_life,
        str(run.work.folder("left")),
    )


def _admissions(
    run: PreparationRun, growth: "Growth", columns: Sequence[CountedColumn]
) -> list[Admission]:
    """Returns the values of each column that get ids, with a seed of its own for each."""
    names, made = list(run.options.schema.dictionaries()), []
    for place, column in enumerate(columns):
        text = f"{run.options.seed} {growth.day} {names[place] if place < len(names) else ''}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        made.append(Admission(column.limit, growth.config.admission_probability, seed))
    return made


def _content(rows: Sequence[int], merged: Sequence[dict[str, Any]]) -> str:
    """Returns a digest of a day's training values, which depends on no order or division."""
    sums = [sum(column) % (1 << 64) for column in zip(*(b["content"] for b in merged), strict=True)]
    return hashlib.sha256(json.dumps([*rows, *sums]).encode()).hexdigest()


def _segment_job(
    growth: "Growth",
    known: KnownValues,
    kinds: list[str],
    new: list[int],
    merged: Sequence[dict[str, Any]],
    folders: Sequence[str],
) -> SegmentJob:
    left = [bucket["left"] for bucket in merged]
    needs = []
    for place in range(len(kinds)):
        values, size = (sum(bucket[place][i] for bucket in left) for i in range(2))
        needs.append(bytes_of(values, size if known.texts[place] else None))
    parent = growth.parent
    of_parent = ("", []) if parent is None else (str(parent.transform), parent.fitted.checksums())
    rooms = quotas(needs, growth.config.candidates)
    return SegmentJob(kinds, *of_parent, known, new, left, rooms, *folders)


def _link_encodings(
    run: PreparationRun, growth: "Growth", grown: Path, directory: Path, lookups: Path
) -> dict[str, str]:
    """Links the files of encodings, and the lookups that training rows need, to their places."""
    schema, linked = run.options.schema, {}
    names = [
        f"encoded_{name}_{place}.npy"
        for place in range(len(schema.encoded))
        for name in ("keys", "values")
    ]
    source = grown
    if growth.keeps_numerics and growth.parent is not None:
        source = growth.parent.transform
        linked = {f"{layout.TRANSFORM}/{name}": f"{layout.TRANSFORM}/{name}" for name in names}
    pairs = [(source / name, directory / name) for name in names]
    if not growth.keeps_numerics:
        first = len(schema.dictionaries())
        for place in range(len(schema.encoded)):
            files = [f"{name}_{first + place}" for name in ("hashes", "ids", "directory")]
            files += [f"folds_{place}.npy"] if (grown / f"folds_{place}.npy").exists() else []
            pairs += [(grown / name, lookups / name) for name in files]
    for path, target in pairs:
        target.unlink(missing_ok=True)
        link_or_copy(str(path), str(target))
    return linked


def _checksums(growth: "Growth", linked: dict[str, str]) -> dict[str, str]:
    """Returns the checksums of the files that are the parent's, from its manifest."""
    if growth.parent is None:
        return {}
    files = read_manifest(growth.parent.directory, growth.parent.kind)["files"]
    return {name: files[of]["crc32"] for name, of in linked.items() if of in files}


def _transform(
    run: PreparationRun,
    growth: "Growth",
    facts: TransformFacts,
    made: Sequence[dict[str, Any]],
    fitted: tuple[list[Fitted], list[Encoded]] | None,
    own: dict[str, Any],
) -> Transform:
    """Makes and saves the transform, and the file that is last in `chain/`.

    Without `fitted` numbers, those of the parent are kept.
    """
    schema, parent = run.options.schema, growth.parent
    directory = run.work.output / layout.TRANSFORM
    before = [0] * len(made)
    if parent is not None:
        before = list(map(len, parent.fitted.dictionaries))
    merged, new, dictionaries = run.work.result("merged"), [], []
    for place, (one, fields) in enumerate(zip(made, schema.dictionaries().values(), strict=True)):
        kind, segments = fields[0].type, one["segments"]
        size = max(before[place], one["greatest"]) if kind == "id" else sum(segments)
        dictionaries.append(Dictionary.load(directory, place, size, kind, segments))
        new.append(size - before[place])
        enough = sum(bucket["kept"][place][0] for bucket in merged)
        if fields[0].max_ids is not None and not any(field.hash_buckets for field in fields):
            one["forgotten"] += max(enough - new[-1], 0)
    crcs = [one["crcs"] for one in made]
    if fitted is not None:
        numbers, encoded = fitted
        crcs += [[checksum(array) for array in one.arrays.values()] for one in encoded]
    else:
        assert parent is not None
        numbers = parent.fitted.numerical
        crcs += parent.fitted.checksums()[len(made) :]
        encoded = [
            Encoded.load(directory, place, len(one.keys), one.values.shape[1])
            for place, one in enumerate(parent.fitted.encoded)
        ]
    own |= {"new": new}
    own |= {name: [one[name] for one in made] for name in ("candidates", "forgotten")}
    if chance := growth.config.admission_probability:
        own["admission_probability"] = chance
    if parent is not None:
        kinds, negatives = parent.fitted.kinds, parent.fitted.negatives
        facts = facts._replace(kinds=kinds, negatives=negatives)
    transform = Transform(
        facts.schema,
        numbers,
        dictionaries,
        facts.kinds,
        facts.negatives,
        facts.columns,
        facts.keep_negatives,
        encoded,
        crcs,
        increment=growth.increment(own),
    )
    transform.save_facts(directory)
    day = {"version": 1, "day": growth.day, "transform": stored.digest(directory)}
    write_atomically(directory.parent / layout.CHAIN / DAY, json.dumps(day, indent=1) + "\n")
    names = list(schema.dictionaries())
    run.say(
        f"{'day ' + growth.day + ':':<12}{sum(new):>14,} new values with ids in {len(names)} "
        f"dictionaries, {sum(own['candidates']):,} candidates kept, "
        f"{sum(own['forgotten']):,} forgotten"
    )
    return transform
