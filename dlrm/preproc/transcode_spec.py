"""Turns CSV into split-binary NVIDIA's way: by a feature specification with csv chunks.

Ids are integers, and rows keep their order; `dlrm.preproc.transcode` reads any other CSV.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import CHANNELS, FeatureSpec, is_list_of_text, read_sections
from dlrm.data.clicks.writer import SplitWriter
from dlrm.data.sources.columns import Parsed
from dlrm.data.sources.csv_cells import Parser, id_parser, label_parser, number_parser
from dlrm.data.sources.csv_columns import Columns
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.numeric_transforms import NUMERIC_TRANSFORMS
from dlrm.documents import brief
from dlrm.files import staged_directory, within
from dlrm.preproc.transcode import Report


def transcode_spec(
    input: str,
    output: str,
    feature_spec_in: str = layout.FEATURE_SPEC,
    feature_spec_out: str = layout.FEATURE_SPEC,
    chunk_size: int = 65536,
    allow_links: bool = False,
) -> Report:
    """Writes a split-binary dataset from the CSV files (no header) of a feature specification.

    Ids are integers and are kept; a cardinality "auto" is the greatest id of all splits plus one,
    and a declared one must be greater than every id. Numbers are kept, and missing ones become 0.
    Columns without a channel are ignored. Files are in the specification's directory; links out of
    it need `allow_links`.

    Raises:
        FileNotFoundError, FileExistsError: there is no input, or the output exists.
        ValueError: the input is bad; the message has file, line, column and value.
    """
    layout.check_spec_name(feature_spec_out)
    path = Path(input) / feature_spec_in
    sections = read_sections(path)
    label, numerical, declared = check_csv_spec(path, sections, allow_links)
    with staged_directory(output) as staging:
        splits = {}
        for split, chunks in sections["source_spec"].items():
            parsers: dict[str, Parser] = {
                label: label_parser(),
                **{name: number_parser(()) for name in numerical},
                **{name: id_parser(size) for name, size in declared.items()},
            }
            splits[split] = _read_chunks(
                path.parent, chunks, parsers, staging / "columns" / split, chunk_size
            )
            if not splits[split].num_rows:
                raise ValueError(f"{path}: split {split}: its files have no rows")
        report = Report()
        for name, size in declared.items():
            greatest = max(int(c.load(name).max(initial=0)) for c in splits.values())
            report.cardinalities[name] = size or greatest + 1

        spec = FeatureSpec.named(
            staging / feature_spec_out, label, numerical, report.cardinalities, splits
        )
        for split, columns in splits.items():
            ids = {name: columns.load(name) for name in declared}
            _write_split(spec, split, columns, ids, report)
        shutil.rmtree(staging / "columns")
        spec.save()
        layout.write_model_size(spec.directory, spec.cardinalities)
        facts = {"transcode": {"numeric_transform": "none"}}
        layout.write_dataset_manifest(spec.directory, report.rows, spec.cardinalities, facts)
    return report


def _write_split(
    spec: FeatureSpec, split: str, columns: Columns, ids: dict[str, np.ndarray], report: Report
) -> None:
    """Writes the files of a split, and adds their counts to `report`.

    Raises:
        ValueError: a number is too large for float16; the message has file, line and column.
    """
    labels = columns.load(spec.label)
    report.rows[split], report.positives[split] = len(labels), int(labels.sum())
    numerical = np.empty((len(labels), len(spec.numerical)), layout.NUMERICAL_DTYPE)
    unchanged = NUMERIC_TRANSFORMS["none"]
    for index, name in enumerate(spec.numerical):
        values = columns.load(name)
        missing = np.isnan(values)
        numbers = Parsed(np.where(missing, 0.0, values), missing)
        numerical[:, index], _ = unchanged.apply(numbers)
        finite = np.isfinite(numerical[:, index])
        if not finite.all():
            row = int(finite.argmin())
            raise ValueError(f"{columns.where(name, row)}: {unchanged.overflow(values[row])}")
    with SplitWriter(spec, split) as writer:
        writer.write(labels, numerical, [ids[name] for name in spec.categorical])


def _read_chunks(
    folder: Path, chunks: list[dict], parsers: dict[str, Parser], columns: Path, chunk_size: int
) -> Columns:
    """Parses the CSV files of a split, chunk by chunk, into files of columns."""
    parsed = Columns(columns)
    for chunk in chunks:
        text = TextFormat(tuple(chunk["features"]), False, ",", chunk_rows=chunk_size)
        files = [folder / file for file in chunk["files"]]
        used = {name: parsers[name] for name in chunk["features"] if name in parsers}
        parsed.append_part(files, text, used)
    return parsed


def check_csv_spec(
    path: Path, sections: dict[str, Any], allow_links: bool
) -> tuple[str, list[str], dict[str, int | None]]:
    """Returns the label, the numericals, and each categorical's cardinality, None for "auto".

    Raises:
        ValueError: the specification breaks a rule; the message has file, rule and value.
    """
    channels = sections["channel_spec"]
    lists = all(is_list_of_text(names) for names in channels.values())
    if set(channels) != set(CHANNELS) or not lists or len(channels["label"]) != 1:
        raise ValueError(
            f"{path}: channel_spec: expected categorical, numerical and label, with one label, got "
            f"{brief(channels)}"
        )
    if not {"train", "test"} <= set(sections["source_spec"]) <= set(layout.SPLITS):
        raise ValueError(
            f"{path}: source_spec: expected the splits train and test, and possibly validation, "
            f"got {brief(list(sections['source_spec']))}"
        )
    for split, chunks in sections["source_spec"].items():
        found = []
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            if not _is_csv_chunk(chunk):
                raise ValueError(
                    f"{path}: source_spec {split}: expected chunks of type csv with features and "
                    f"files, got {brief(chunk)}"
                )
            for name in chunk["files"]:
                within(path.parent, name, path, allow_links)
            found += chunk["features"]
        for name in [name for names in channels.values() for name in names]:
            if found.count(name) != 1:
                raise ValueError(
                    f"{path}: source_spec {split}: expected feature {name} once, got it "
                    f"{found.count(name)} times"
                )
    cardinalities: dict[str, int | None] = {}
    for name in channels["categorical"]:
        facts = sections["feature_spec"].get(name)
        if isinstance(facts, dict) and "list" in facts:
            raise ValueError(
                f"{path}: feature {name}: expected one id a row, got a list field, which "
                "dlrm.scripts.prepare reads"
            )
        size = facts.get("cardinality") if isinstance(facts, dict) else facts
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f'{path}: feature {name}: expected a cardinality of 1 or more, or "auto", got '
                f"{brief(size)}"
            )
        cardinalities[name] = None if size == "auto" else size
    return channels["label"][0], channels["numerical"], cardinalities


def _is_csv_chunk(chunk: Any) -> bool:
    if not isinstance(chunk, dict) or chunk.get("type") != "csv" or not chunk.get("files"):
        return False
    return is_list_of_text(chunk["files"]) and is_list_of_text(chunk.get("features"))
