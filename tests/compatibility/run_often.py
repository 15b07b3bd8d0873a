"""Runs a command several times in one process: python run_often.py MODULE FILE

MODULE has `define_flags` and `main`; FILE is a list of command lines in JSON.
"""

import importlib
import json
import sys
from pathlib import Path

from absl import flags
from absl.testing import flagsaver


def main(name: str, lines: str) -> None:
    module = importlib.import_module(name)
    module.define_flags()
    for words in json.loads(Path(lines).read_text()):
        with flagsaver.flagsaver():
            module.main(flags.FLAGS([name, *words]))


if __name__ == "__main__":
    main(*sys.argv[1:])
