"""Facts that the five source documents print: numbers in tables and prose, and commands.

`documents.json` stores them. If the environment variable DLRM_SOURCES names a folder with the
documents, a test extracts the facts again and compares.
"""

import json
import re
from pathlib import Path

FILE = Path(__file__).with_name("documents.json")
_COMMAND = re.compile(r"(python3?|poprun|git|docker|cd|mkdir|export|\./\S+) |[A-Z_]+=")
_UNITS = r"(\d+(?:\.\d+)?)\s?(images/sec|queries/sec|sent/sec|sps|%)"


def saved() -> dict:
    return json.loads(FILE.read_text())


def extracted(folder: Path) -> dict:
    texts = {path.name[:3]: path.read_text() for path in sorted(folder.glob("00*.md"))}
    return {
        "tables": {name: tables(text) for name, text in texts.items()},
        "figures": list(map(list, re.findall(_UNITS, texts["000"]))),
        "commands": {name: fenced(text) for name, text in texts.items()},
    }


def tables(text: str) -> list:
    """Returns heading and cells of each table line, column titles included."""
    heading, lines = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not all(set(cell) <= set("-: ") for cell in cells):
            lines.append([heading, [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", c) for c in cells]])
    return lines


def fenced(text: str) -> list[str]:
    """Returns the commands in fenced blocks, which also contain help texts and logs."""
    blocks = re.findall(r"^```\w*[ \t]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [f"{line.strip()} " for block in blocks for line in block.splitlines()]
    return [line.strip() for line in lines if _COMMAND.match(line)]


if __name__ == "__main__":
    import sys

    FILE.write_text(json.dumps(extracted(Path(sys.argv[1])), indent=1) + "\n")
