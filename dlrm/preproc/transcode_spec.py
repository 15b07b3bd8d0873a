"""Turns CSV into split-binary NVIDIA's way: by a feature specification with csv chunks.

Ids are integers, and rows keep their order; `dlrm.preproc.transcode` reads any other CSV.
"""

from pathlib import Path
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import CHANNELS, is_list_of_text, read_sections
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.kinds.csv_chunks import Chunk, CsvChunks
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.documents import brief
from dlrm.files import within
from dlrm.preproc.preset import prepare_preset
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.transcode import Report


def transcode_spec(
    input: str,
    output: str,
    feature_spec_in: str = layout.FEATURE_SPEC,
    feature_spec_out: str = layout.FEATURE_SPEC,
    chunk_size: int = 65536,
    allow_links: bool = False,
    cores: int | None = None,
    restart: bool = False,
    **options: Any,
) -> Report:
    """Writes a split-binary dataset from the CSV files (no header) of a feature specification.

    Ids are integers and are kept; a cardinality "auto" is the greatest id of all splits plus one,
    and a declared one must be greater than every id. Numbers are kept, and missing ones become 0.
    Columns without a channel are ignored. Files are in the specification's directory; links out of
    it need `allow_links`.

    Args:
        input, output, feature_spec_in, feature_spec_out, chunk_size, allow_links: as the flags.
        cores, restart: see `prepare_preset`.
        options: further fields of `TableOptions`.

    Raises:
        FileNotFoundError, FileExistsError: there is no input, or the output exists.
        ValueError: the input is bad; the message has file, line, column and value.
    """
    layout.check_spec_name(feature_spec_out)
    path = Path(input) / feature_spec_in
    sections = read_sections(path)
    label, numerical, declared = check_csv_spec(path, sections, allow_links)
    made = TableOptions(
        Schema(
            Label(label),
            tuple(NumericalField(name, "none") for name in numerical),
            tuple(CategoricalField(name, "id", cardinality=n) for name, n in declared.items()),
        ),
        text=TextFormat(chunk_rows=chunk_size),
        output_ordering="input",
        feature_spec_out=feature_spec_out,
        **options,
    )
    tables = {}
    for split, chunks in sections["source_spec"].items():
        parts = [Chunk(tuple(chunk["features"]), tuple(chunk["files"])) for chunk in chunks]
        tables[split] = [TableFile(path, kind := CsvChunks(path.parent, parts))]
        if missing := [file for file in kind.files if not file.is_file()]:
            raise FileNotFoundError(f"{missing[0]}: no such file")
    return Report.from_result(
        made, prepare_preset(made, tables, Path(output), cores, restart=restart)
    )


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
        columns = []
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            if not _is_csv_chunk(chunk):
                raise ValueError(
                    f"{path}: source_spec {split}: expected chunks of type csv with features and "
                    f"files, got {brief(chunk)}"
                )
            for name in chunk["files"]:
                within(path.parent, name, path, allow_links)
            columns += chunk["features"]
        for name in [name for names in channels.values() for name in names]:
            if columns.count(name) != 1:
                raise ValueError(
                    f"{path}: source_spec {split}: expected feature {name} once, got it "
                    f"{columns.count(name)} times"
                )
    cardinalities: dict[str, int | None] = {}
    for name in channels["categorical"]:
        facts = sections["feature_spec"].get(name)
        if isinstance(facts, dict) and "list" in facts:
            raise ValueError(
                f"{path}: feature {name}: expected one id a row, got a list field, which "
                "dlrm prepare reads"
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
