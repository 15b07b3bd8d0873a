"""Lets MkDocs build a site from the pages as they are in the repository.

Pages outside `docs` join the site at their own paths, and files that a page links, such as
programs, are copied into it. Links are rewritten, so that the same link works on a code host.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def place_of(path: Path) -> str:
    """Returns the path in the site's sources of a file of the repository."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def links(text: str, folder: Path) -> dict[str, Path]:
    """Returns the relative links of a page, and the files that they lead to."""
    prose = "".join(part for part in _FENCE.split(text) if not part.startswith("```"))
    return {link: (folder / link).resolve() for link in _LINK.findall(prose)}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside `docs`, and every file that a page links."""
    waiting, seen = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))], set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file() or not path.is_relative_to(ROOT):
            continue
        seen.add(path)
        if files.get_file_from_path(place_of(path)) is None:
            files.append(File.generated(config, place_of(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += links(path.read_text(), path.parent).values()
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to places in the site."""
    path = Path(page.file.abs_src_path)
    found = links(markdown, path.parent)
    parent = os.path.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = found[match[1]]
        if target.is_dir() or not target.exists():
            return match[1]
        return os.path.relpath(place_of(target), parent or ".")

    parts = _FENCE.split(markdown)
    return "".join(p if p.startswith("```") else _LINK.sub(rewritten, p) for p in parts)
