"""Layout and contents of a dataset of pre-training rows on disk.

manifest.json       sequence length, most predictions, vocabulary, rows of each shard, and how they
                    were made
tokens_00000.bin    [rows, length + 2 predictions], little-endian uint16, or int32 where the
                    vocabulary is larger: ids; positions of masked tokens; these tokens
rows_00000.bin      little-endian uint16 [rows, 4]: length, where B begins, number of masked tokens,
                    and whether B comes from elsewhere (1) or follows A (0)

Unused entries of a row are 0. If the manifest has `output_format` "hdf5", rows are in part_*.hdf5
instead, which `dlrm.language.pretraining.formats` reads.
"""

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.verification import CheckedFile, Verifier
from dlrm.files import MANIFEST
from dlrm.language.data.config import MAX_LENGTH as MAX_LENGTH
from dlrm.manifest import Checksum, read_manifest, write_manifest
from dlrm.mapped_files import map_file

KIND = "pre-training dataset"
FACT_DTYPE = np.dtype("<u2")
LENGTH, SECOND, NUM_MASKED, LABEL = range(4)  # columns of rows_*.bin


class TextRows(NamedTuple):
    """Pre-training rows as arrays, of any integer dtype.

    Attributes:
        ids: [CLS] A [SEP] B [SEP] and zeros, some tokens masked, `[rows, length]`.
        facts: `[rows, 4]`, by the columns LENGTH, SECOND, NUM_MASKED and LABEL.
        masked_positions: ascending positions, then zeros, `[rows, predictions]`.
        masked_ids: the original tokens at these positions, then zeros, `[rows, predictions]`.
    """

    ids: np.ndarray
    facts: np.ndarray
    masked_positions: np.ndarray
    masked_ids: np.ndarray


def shard_files(directory: Path, shard: int) -> tuple[Path, Path]:
    """Returns the files of the tokens and of the facts of a shard."""
    return directory / f"tokens_{shard:05}.bin", directory / f"rows_{shard:05}.bin"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype that tokens of a vocabulary are stored in."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


def write_shard(
    directory: Path, shard: int, blocks: Iterable[TextRows], vocab_size: int
) -> dict[str, str]:
    """Writes a shard block by block; returns the checksums of its files by their names."""
    dtype, paths = token_dtype(vocab_size), shard_files(directory, shard)
    sums = Checksum(), Checksum()
    with open(paths[0], "wb") as tokens_file, open(paths[1], "wb") as facts_file:
        for rows in blocks:
            parts = (rows.ids, rows.masked_positions, rows.masked_ids)
            tokens = np.concatenate([part.astype(dtype, copy=False) for part in parts], axis=1)
            facts = np.ascontiguousarray(rows.facts, FACT_DTYPE)
            for which, (file, array) in enumerate(((tokens_file, tokens), (facts_file, facts))):
                file.write(array.data)
                sums[which].update(array.data)
    return {path.name: str(value) for path, value in zip(paths, sums, strict=True)}


def write_text_manifest(
    directory: Path, rows: list[int], checksums: dict[str, str] | None = None, **facts: Any
) -> None:
    """Writes the manifest, last of all files.

    Args:
        rows: rows of each shard.
        checksums: results of `write_shard`.
        facts: `max_seq_length` and `max_predictions` of a row, `vocab_size`, and further entries.
    """
    write_manifest(directory, KIND, checksums, rows=rows, **facts)


def read_text_manifest(directory: Path, allow_links: bool = False) -> dict[str, Any]:
    """Returns the manifest of a dataset; only `allow_links` lets its files be links out of it.

    Raises:
        FileNotFoundError: there is no manifest, or a file is missing.
        ValueError: an entry is missing or wrong, or a file has another size.
    """
    manifest = read_manifest(directory, KIND, allow_links=allow_links)
    rows, path = manifest.get("rows"), directory / MANIFEST
    if not (isinstance(rows, list) and rows and all(type(n) is int and n >= 0 for n in rows)):
        raise ValueError(f"{path}: rows: expected the rows of each shard, got {reprlib.repr(rows)}")
    for name, most in (
        ("max_seq_length", MAX_LENGTH),
        ("max_predictions", MAX_LENGTH),
        ("vocab_size", np.iinfo(np.int32).max),
    ):
        value = manifest.get(name)
        if type(value) is not int or not 1 <= value <= most:
            got = reprlib.repr(value)
            raise ValueError(f"{path}: {name}: expected a number in [1, {most}], got {got}")
    return manifest


class Shard(NamedTuple):
    """A shard of a dataset, mapped.

    Attributes:
        path: file of its tokens.
        facts: `[rows, 4]`, in memory.
        tokens: `[rows, length + 2 predictions]`.
        checked: compares the tokens' file with its checksum, if there is one.
    """

    path: Path
    facts: np.ndarray
    tokens: np.ndarray
    checked: CheckedFile | None = None

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns the tokens of rows."""
        if self.checked:
            self.checked.touch_rows(rows, self.tokens.strides[0])
        return self.tokens[rows]


def open_shards(
    directory: Path, verifier: Verifier, allow_links: bool = False
) -> tuple[dict[str, Any], list[Shard]]:
    """Returns the manifest of a dataset, and its shards.

    Args:
        allow_links: whether they may be symbolic links out of the directory.

    Raises:
        FileNotFoundError: there is no manifest, or a file is missing.
        ValueError: an entry of the manifest is missing or wrong, shards and files do not match, or
            a file has another size or is damaged.
    """
    manifest = read_text_manifest(directory, allow_links)
    names = {
        path.name
        for shard in range(len(manifest["rows"]))
        for path in shard_files(directory, shard)
    }
    if wrong := sorted(names ^ {name for name in manifest["files"] if name.endswith(".bin")}):
        raise ValueError(
            f"{directory / MANIFEST}: rows: expected the shards that have files, differing: "
            f"{', '.join(wrong[:4])}"
        )
    dtype = token_dtype(manifest["vocab_size"])
    width = manifest["max_seq_length"] + 2 * manifest["max_predictions"]
    files = [shard_files(directory, number) for number in range(len(manifest["rows"]))]
    verifier.check(facts_file for _, facts_file in files)
    shards = []
    for count, (tokens_file, facts_file) in zip(manifest["rows"], files, strict=True):
        facts = np.array(_map(facts_file, FACT_DTYPE, (count, 4)))
        tokens = _map(tokens_file, dtype, (count, width))
        shards.append(Shard(tokens_file, facts, tokens, verifier.open(tokens_file)))
    return manifest, shards


def _map(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    expected = dtype.itemsize * shape[0] * shape[1]
    if (size := path.stat().st_size) != expected:
        raise ValueError(
            f"{path}: truncated or too long: expected {expected} bytes for {shape[0]} rows, got "
            f"{size}"
        )
    return map_file(path, dtype, shape)
