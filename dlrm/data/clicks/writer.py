"""Writes split-binary datasets: samples arrive in chunks, each feature goes to its own file."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.clicks.feature_spec import FeatureSpec


class SplitWriter:
    """Writes the files of one split, as a context manager.

    Args:
        spec: names, dtypes and files; `spec.path` is in the directory that is written to.
        split: the split to write.
    """

    def __init__(self, spec: FeatureSpec, split: str) -> None:
        self.num_rows = 0
        self._spec, self._split = spec, split
        self._files = ExitStack()

    def __enter__(self) -> "SplitWriter":
        with ExitStack() as opened:
            self._label = opened.enter_context(self._open(self._spec.label))
            self._numerical = (
                opened.enter_context(self._open(self._spec.numerical[0]))
                if self._spec.numerical
                else None
            )
            self._ids = [opened.enter_context(self._open(n)) for n in self._spec.categorical]
            self._files = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.close()

    def _open(self, feature: str):
        path = self._spec.file(self._split, feature)
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb")

    def write(
        self, labels: np.ndarray, numerical: np.ndarray, categorical: Sequence[np.ndarray]
    ) -> None:
        """Appends samples.

        Args:
            labels: `[rows]`, 0 or 1.
            numerical: `[rows, num_numerical]`, finite as float16.
            categorical: for each table, in channel order, ids `[rows]`.

        Raises:
            ValueError: an id is not in its table or a numerical overflows float16; the feature, the
                row of the split and the value are named.
        """
        for name, file, ids in zip(self._spec.categorical, self._ids, categorical, strict=True):
            self._check_ids(name, ids)
            file.write(np.ascontiguousarray(ids, self._spec.dtype(name)).data)
        if self._numerical is not None:
            self._numerical.write(self._to_half(numerical).data)
        self._label.write(np.ascontiguousarray(labels, layout.LABEL_DTYPE).data)
        self.num_rows += len(labels)

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        size = self._spec.feature_spec[name]["cardinality"]
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            row = int(np.argmax((ids < 0) | (ids >= size)))
            raise ValueError(
                f"feature {name}, row {self.num_rows + row} of {self._split}: expected an id in "
                f"[0, {size}), got {ids[row]}"
            )

    def _to_half(self, numerical: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(numerical, layout.NUMERICAL_DTYPE)
        if not np.isfinite(half).all():
            row, column = np.argwhere(~np.isfinite(half))[0]
            raise ValueError(
                f"feature {self._spec.numerical[column]}, row {self.num_rows + row} of "
                f"{self._split}: expected a number that fits {layout.NUMERICAL_DTYPE}, got "
                f"{numerical[row, column]}"
            )
        return half
