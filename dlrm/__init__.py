"""Click-through-rate models (DLRM): from raw logs to a trained, tested and served model.

    model = dlrm.fit(frame, label="click")  # a table of pandas, Polars, DuckDB or Arrow
    print(model)                            # its columns and the metrics of its test rows
    scores = model.predict(frame)           # the probability of a click for each row
    model.save("model")                     # `dlrm.load("model")` returns it again

`dlrm.Dataset` holds prepared rows for several trainings, and `dlrm.Schema` says what columns mean.
docs/guide/python.md is the guide, and docs/reference/python.md lists everything.

Importing `dlrm` imports neither torch nor Spark, so that preprocessing runs where torch is not. It
sets environment variables that make training faster (`dlrm/variables.py`), so import it before
torch and LightGBM.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from dlrm.variables import set_variables as _set_variables
from dlrm.version import __version__

if TYPE_CHECKING:
    from dlrm.api.classifier import Classifier as Classifier
    from dlrm.api.dataset import Dataset as Dataset
    from dlrm.api.training import fit as fit
    from dlrm.api.updating import update as update
    from dlrm.data.schema.schema import Schema as Schema
    from dlrm.serving.loading import load as load


def _hide_triton_folder() -> None:
    """Keeps torch from taking this repository's `triton/` folder for the Triton compiler.

    Python started in the repository root finds the folder as a namespace package of that name;
    torch then believes the compiler is there, and `torch.optim` and `torch.compile` fail on it.
    `python -m triton.deployer` has imported it already.
    """
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is None:
        sys.modules["triton"] = None  # type: ignore[assignment]  # "import triton" now fails, as it should


_hide_triton_folder()
_set_variables()


_LAZY = {
    "Classifier": "dlrm.api.classifier",
    "Dataset": "dlrm.api.dataset",
    "Schema": "dlrm.data.schema.schema",
    "fit": "dlrm.api.training",
    "load": "dlrm.serving.loading",
    "update": "dlrm.api.updating",
}
_MISSING = {"Classifier"} if importlib.util.find_spec("sklearn") is None else set()
__all__ = [*(name for name in _LAZY if name not in _MISSING), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Imports `dlrm.fit` and others when they are first used, and torch with what needs it."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the names for users; modules are imported by their own."""
    return sorted(__all__)
