"""Runs a command several times in one process: python run_often.py MODULE FILE

MODULE has `main`; FILE is a list of command lines in JSON.
"""

import importlib
import json
import sys
from pathlib import Path


def main(name: str, lines: str) -> None:
    module = importlib.import_module(name)
    for words in json.loads(Path(lines).read_text()):
        if code := module.main(words):
            sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
