"""Archives of files of earlier versions, and the tolerance of scores."""

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

_ALL = sorted(Path(__file__).parent.glob("*.tar.xz"))
SEALED = [path for path in _ALL if path.name.endswith("-sealed.tar.xz")]  # of test_sealed
SLICED = [path for path in _ALL if path.name.endswith("-slices.tar.xz")]  # of test_slices
DAYS = [path for path in _ALL if path.name.endswith("-days.tar.xz")]  # of test_extended_days
SHAPES = [path for path in _ALL if path.name.endswith("-shapes.tar.xz")]  # of test_shapes
ARCHIVES = [path for path in _ALL if path not in {*SEALED, *SLICED, *DAYS, *SHAPES}]
# Logits are of order 1 and sum about ten float32 products, each rounded to 6e-8 of its size, in an
# order that depends on the processor.
SCORES = {"rtol": 1e-5, "atol": 1e-6}


class Written(NamedTuple):
    """Holds the unpacked files of a version and the content of `expected.json`."""

    folder: Path
    expected: dict[str, Any]

    def entry(self, kind: str, name: str) -> Any:
        """Returns the entry of a dataset or run; skips if that version did not write it."""
        if name not in self.expected[kind]:
            pytest.skip(f"{self.folder.name} has no {name}")
        return self.expected[kind][name]

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Returns expected arrays."""
        with np.load(self.folder / "expected" / f"{name}.npz") as arrays:
            return {key: arrays[key] for key in arrays.files}


def unpack(archive: Path, parent: Path) -> Written:
    """Unpacks an archive to a folder in `parent`."""
    folder = parent / archive.name.removesuffix(".tar.xz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return Written(folder, json.loads((folder / "expected.json").read_text()))
