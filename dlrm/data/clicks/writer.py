"""Writes split-binary datasets from chunks of samples, each feature to a file of its own."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from dlrm.data import bags, layout
from dlrm.data.bags import Ids, Jagged
from dlrm.data.clicks.feature_spec import FeatureSpec


class SplitWriter:
    """Writes the files of one split, as a context manager.

    A file is open only while it is written to, since a process may have too few for every field.

    Args:
        spec: names, dtypes and files; `spec.path` is in the directory to write to.
    """

    def __init__(self, spec: FeatureSpec, split: str) -> None:
        self.num_rows = 0
        self._spec = spec
        names = [spec.label, *spec.numerical[:1], *spec.categorical]
        self._files = {name: spec.files(split, name) for name in names}
        self._totals = dict.fromkeys(spec.lists, 0)  # ids of each list field

    def __enter__(self) -> "SplitWriter":
        for path in chain(*self._files.values()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        return self

    def __exit__(self, *error: object) -> None:
        for name, total in self._totals.items():
            _append(self._files[name][2], [total], bags.STARTS_DTYPE)

    def write(self, labels: np.ndarray, numerical: np.ndarray, categorical: Sequence[Ids]) -> None:
        """Appends samples, whose values fit the specification.

        Args:
            labels: `[rows]`, 0 or 1.
            numerical: `[rows, num_numerical]`, finite as float16.
            categorical: for each table, in channel order, ids `[rows]`, or bags of ids for a
                feature of `spec.lists`.
        """
        spec = self._spec
        for name, ids in zip(spec.categorical, categorical, strict=True):
            files = self._files[name]
            _append(files[0], bags.ids_in(ids), spec.dtype(name))
            if isinstance(ids, Jagged):
                total = self._totals[name]
                _, starts = bags.starts_within(ids.lengths, self.num_rows, total)
                _append(files[1], ids.lengths, spec.lists[name].lengths_dtype)
                _append(files[2], starts, bags.STARTS_DTYPE)
                if ids.weights is not None:
                    _append(files[3], ids.weights, bags.WEIGHTS_DTYPE)
                self._totals[name] = total + len(ids.values)
        if spec.numerical:
            _append(self._files[spec.numerical[0]][0], numerical, layout.NUMERICAL_DTYPE)
        _append(self._files[spec.label][0], labels, layout.LABEL_DTYPE)
        self.num_rows += len(labels)


def _append(path: Path, rows: np.ndarray | list[int], dtype: np.dtype) -> None:
    with open(path, "ab") as file:
        file.write(np.ascontiguousarray(rows, dtype).data)
