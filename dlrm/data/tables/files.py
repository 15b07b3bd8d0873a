"""Files of tables: which files of a folder are read, and of what kind each is."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.sources.text_files import BROKEN, PACKED, open_bytes, unpacked_name

KINDS = PARQUET, CSV, JSON_LINES = ("parquet", "csv", "jsonl")
FRAME = "a table in memory"
_KINDS = {
    **dict.fromkeys((".parquet", ".pq", ".parq"), PARQUET),
    **dict.fromkeys((".csv", ".tsv", ".data", ".txt"), CSV),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSON_LINES),
}
_NO_TABLES = {".md", ".yaml", ".yml", ".html", ".htm", ".pdf", ".png", ".jpg", ".py", ".sh"}
_NO_TABLES |= {".crc", ".md5", ".sha1", ".sha256", ".names"}
_START = 1 << 12  # bytes that show what a file is
_MOST_NAMED = 3


class TableFile(NamedTuple):
    """A file of rows, or a table in memory.

    Attributes:
        path: the file; of a table in memory, its name for messages.
        kind: `PARQUET`, `CSV`, `JSON_LINES` or `FRAME`.
        root: the folder below which folder names encode columns, which is above the folder that was
            named if that encodes one; None for no such columns.
        frame: the table in memory; see `dlrm.data.tables.frames`.
    """

    path: Path
    kind: str
    root: Path | None = None
    frame: Any = None


def kind_of(path: Path) -> str | None:
    """Returns the kind of a file by its name, or None."""
    name = unpacked_name(path.name)
    kind = _KINDS.get(Path(name).suffix)
    return None if kind == PARQUET and name != path.name.lower() else kind


def find_tables(
    inputs: Sequence[str | Path],
    kind: str | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> list[TableFile]:
    """Returns files of tables; those of a folder, with its subfolders, are sorted by name.

    Of a folder every file is read, except for those whose names, or whose folders' names, begin
    with "." or "_", and for documents such as README.md, which a line names.

    Args:
        inputs: files, or folders of them.
        kind: kind of the files, which may then have any name; None derives it from their names, and
            from the content of files with other names.
        say: called with a line about files that are left out.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has none.
        ValueError: a file is of an unknown kind, or files are of several.
    """
    found: list[TableFile] = []
    left_out: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            found += _of_folder(given, kind, left_out)
        elif not given.exists():
            raise FileNotFoundError(f"{given}: no such file or directory (--input)")
        elif not given.is_file():
            raise ValueError(f"{given}: expected a regular file or a folder (--input)")
        else:
            one = kind or kind_of(given) or _kind_by_content(given)
            found.append(TableFile(given, one, _root_of(given.parent, None)))
    if not found:
        raise ValueError("--input: expected a file or a folder, got none")
    for file in found:
        try:
            str(file.path).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(file.path).decode("utf-8", "backslashreplace")
            raise ValueError(f"{shown}: expected UTF-8 in the names of files and folders") from None
    kinds = {file.kind: file.path for file in found}
    if len(kinds) > 1:
        shown = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
        raise ValueError(
            f"--input: expected files of one kind, got {shown}; --input_format names the kind of "
            "all files"
        )
    if left_out:
        say(_left_out_line(left_out))
    return found


def _of_folder(folder: Path, kind: str | None, left_out: list[Path]) -> list[TableFile]:
    """Returns the files of a folder, and adds those that are left out."""
    files = sorted(_files_below(folder, frozenset()))
    documents = [path for path in files if kind_of(path) is None and _is_document(path)]
    if kind is None:
        left_out += documents
    else:  # which the user knows better
        documents = []
    tables = [path for path in files if path not in set(documents)]
    if not tables:
        raise FileNotFoundError(
            f"{folder}: no *.parquet, *.csv, *.tsv, *.jsonl or the like in it (--input)"
        )
    root = _root_of(folder, folder)
    return [
        TableFile(path, kind or kind_of(path) or _kind_by_content(path), root) for path in tables
    ]


def _files_below(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, also linked ones, except hidden ones.

    Raises:
        OSError: a folder cannot be read.
        ValueError: an entry is neither a file nor a folder, or a folder links to one above it.
    """
    real = folder.resolve()
    if real in above:
        raise ValueError(
            f"{folder}: expected a folder, got a link to one that it lies in (--input)"
        )
    for path in folder.iterdir():
        if path.name.startswith((".", "_")):
            continue
        if path.is_dir():
            yield from _files_below(path, above | {real})
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path}: expected a regular file or a folder (--input)")


def _root_of(folder: Path, otherwise: Path | None) -> Path | None:
    """Returns the folder above those, at the end of a path, whose names encode columns."""
    root = otherwise
    while "=" in folder.name:
        root = folder = folder.parent
    return root


def _is_document(path: Path) -> bool:
    return Path(unpacked_name(path.name)).suffix in _NO_TABLES


def _left_out_line(paths: Sequence[Path]) -> str:
    suffixes = Counter(path.suffix for path in paths)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.items())
    names = ", ".join(path.name for path in paths[:_MOST_NAMED])
    more = ", ..." * (len(paths) > _MOST_NAMED)
    files = f"{len(paths):,} file{'s' * (len(paths) > 1)}"
    return f"left out: {files} ({kinds}: {names}{more}), which --input_format would read"


def _kind_by_content(path: Path) -> str:
    """Returns the kind of a file with any name, of which the first bytes must be clear."""
    try:
        with open_bytes(path) as file:
            start = file.read(_START)
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        start = b"\0"
    if start.startswith(b"PAR1"):
        return PARQUET
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    suffix = Path(unpacked_name(path.name)).suffix
    known = not suffix or suffix[1:].isdigit() or suffix in (".dat", ".part")
    if known and text.startswith(b"{"):
        return JSON_LINES
    if known and b"\0" not in start and (text or not start):
        return CSV
    raise ValueError(
        f"{path}: expected the name of a Parquet file (.parquet), CSV (.csv, .tsv) or JSON lines "
        f"(.jsonl), the latter two plain or packed ({', '.join(PACKED)}); --input_format names the "
        "kind of files with other names"
    )
