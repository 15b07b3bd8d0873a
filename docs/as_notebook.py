"""Writes a page with Python and shell blocks as a Jupyter notebook, and draws its pictures.

python docs/as_notebook.py    runs the tutorial's programs and copies pictures to docs/pictures
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
_BLOCK = re.compile(r"^((?:<!-- .+? -->\n)?)```(\w*)\n(.*?)^```\n", re.M | re.S)


def as_notebook(page: str) -> str:
    """Returns a notebook, as JSON, of the text of a page.

    Blocks of `python` and `bash` become cells of code, unless a comment stands before them; the
    text between becomes cells of Markdown. There are no outputs.
    """
    cells, shown, end = [], "", 0
    for block in _BLOCK.finditer(page):
        note, language, text = block.groups()
        shown += page[end : block.start()]
        end = block.end()
        if note or language not in ("python", "bash"):
            shown += block[0].removeprefix(note)
            continue
        cells += [_cell("markdown", shown), _cell("code", _code(language, text))]
        shown = ""
    cells.append(_cell("markdown", shown + page[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": [cell | {"id": f"cell-{i}"} for i, cell in enumerate(cells) if cell["source"]],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _code(language: str, text: str) -> str:
    """Returns the code of a cell; lines of a shell begin with `!`."""
    if language == "python":
        return text
    return re.sub(r"(?<!\\\n)^(?=.)", "!", text, flags=re.M)


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.strip().splitlines(keepends=True)}


def draw_pictures(page: str, folder: Path) -> None:
    """Runs the Python blocks of a page, and copies the pictures that they save to a folder."""
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for note, language, text in _BLOCK.findall(page):
            if language == "python" and not note:
                exec(text, names)
        for path in Path(work).glob("*.png"):
            shutil.copy(path, folder)


if __name__ == "__main__":
    draw_pictures((DOCS / "tutorial.md").read_text(), DOCS / "pictures")
