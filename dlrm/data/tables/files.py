"""Files of tables: which files of a folder are read, and of what format each is."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dlrm.data.sources.text_files import BROKEN, PACKED, open_bytes, unpacked_name
from dlrm.data.tables.formats.base import FileFormat, TableFile
from dlrm.data.tables.formats.columnar import ArrowIpc, Orc, Parquet
from dlrm.data.tables.formats.json_lines import JsonLines
from dlrm.data.tables.formats.text import Csv, Text


class _Frame(FileFormat):
    name = "a table in memory"


PARQUET, ARROW, CSV, JSON_LINES, FRAME = Parquet(), ArrowIpc(), Csv(), JsonLines(), _Frame()
FORMATS: dict[str, FileFormat] = {one.name: one for one in (PARQUET, Orc(), ARROW, CSV, JSON_LINES)}
_BY_SUFFIX = {suffix: one for one in FORMATS.values() for suffix in one.suffixes}
_NO_TABLES = {".md", ".yaml", ".yml", ".html", ".htm", ".pdf", ".png", ".jpg", ".py", ".sh"}
_NO_TABLES |= {".crc", ".md5", ".sha1", ".sha256", ".names"}
_START = 1 << 12  # bytes that show what a file is
_MOST_NAMED = 3


def format_of(path: Path) -> FileFormat | None:
    """Returns the format of a file by its name, or None."""
    file_format = _BY_SUFFIX.get(_suffix(path))
    is_named = unpacked_name(path.name) == path.name.lower() or isinstance(file_format, Text)
    return file_format if is_named else None


def find_tables(
    inputs: Sequence[str | Path],
    input_format: str | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> list[TableFile]:
    """Returns files of tables; those of a folder, with its subfolders, are sorted by name.

    All files of a folder are read, except for those whose names, or whose folders' names, begin
    with "." or "_", and for documents such as README.md, which a printed line lists.

    Args:
        inputs: files, or folders of them.
        input_format: name of the format, one of `FORMATS`, of files with any names; None
            derives it from the names, and from the content of files with other names.
        say: called with a line about files that are left out.

    Raises:
        FileNotFoundError: a file does not exist, or a folder has none.
        ValueError: a file is of an unknown format, or files are of several.
    """
    file_format = None if input_format is None else FORMATS[input_format]
    files: list[TableFile] = []
    documents: list[Path] = []
    for given in map(Path, inputs):
        paths, root = [given], _root_of(given.parent) if "=" in given.parent.name else None
        if given.is_dir():
            root, paths = _root_of(given), sorted(_files_below(given, frozenset()))
            if file_format is None:  # otherwise the user knows better
                named = [one for one in paths if format_of(one) or _suffix(one) not in _NO_TABLES]
                documents += sorted({*paths}.difference(named))
                paths = named
            if not paths:
                usual = ", ".join(f"*{one.suffixes[0]}" for one in FORMATS.values())
                raise FileNotFoundError(f"{given}: no {usual} or the like in it (--input)")
        elif not given.exists():
            raise FileNotFoundError(f"{given}: no such file or directory (--input)")
        elif not given.is_file():
            raise ValueError(f"{given}: expected a regular file or a folder (--input)")
        for path in paths:
            of_file = file_format or format_of(path) or _format_by_content(path)
            files.append(TableFile(path, of_file, root))
    if not files:
        raise ValueError("--input: expected a file or a folder, got none")
    for file in files:
        try:
            str(file.path).encode()
        except UnicodeEncodeError:
            shown = os.fsencode(file.path).decode("utf-8", "backslashreplace")
            raise ValueError(f"{shown}: expected UTF-8 in the names of files and folders") from None
    formats = {file.format: file.path for file in files}
    if len(formats) > 1:
        shown = ", ".join(f"{path.name} ({name})" for name, path in formats.items())
        raise ValueError(
            f"--input: expected files of one kind, got {shown}; --input_format names the kind of "
            "all files"
        )
    if documents:
        suffixes = Counter(path.suffix for path in documents)
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.items())
        names = ", ".join(path.name for path in documents[:_MOST_NAMED])
        more = ", ..." * (len(documents) > _MOST_NAMED)
        number = f"{len(documents):,} file{'s' * (len(documents) > 1)}"
        say(f"left out: {number} ({counts}: {names}{more}), which --input_format would read")
    return files


def _suffix(path: Path) -> str:
    return Path(unpacked_name(path.name)).suffix


def _root_of(folder: Path) -> Path:
    """Returns the folder above those, at the end of a path, whose names encode columns."""
    while "=" in folder.name:
        folder = folder.parent
    return folder


def _files_below(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, also linked ones, except hidden ones.

    Raises:
        OSError: a folder cannot be read.
        ValueError: an entry is neither a file nor a folder, or a folder links to one above it.
    """
    real = folder.resolve()
    if real in above:
        raise ValueError(
            f"{folder}: expected a folder, got a link to a folder that contains it (--input)"
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


def _format_by_content(path: Path) -> FileFormat:
    """Returns the format of a file with any name, of which the first bytes must be clear."""
    try:
        with open_bytes(path) as file:
            start = file.read(_START)
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        start = b"\0"
    suffix = _suffix(path)
    may_be_text = not suffix or suffix[1:].isdigit() or suffix in (".dat", ".part")
    for one in FORMATS.values():
        if (may_be_text or not isinstance(one, Text)) and one.begins(start):
            return one
    known = [f"{one.title} ({', '.join(one.suffixes[:2])})" for one in FORMATS.values()]
    raise ValueError(
        f"{path}: expected the name of {', '.join(known[:-1])} or {known[-1]}, text plain or "
        f"packed ({', '.join(PACKED)}); --input_format names the kind of files with other names"
    )
