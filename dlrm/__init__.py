"""Click-through-rate models (DLRM): from raw logs to a trained, tested and served model.

Importing `dlrm` imports neither torch nor Spark, so that preprocessing runs where torch is not.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm.serving.predictor import load as load

__version__ = "0.2.0"


def _hide_triton_folder() -> None:
    """Keeps torch from taking this repository's `triton/` folder for the Triton compiler.

    Python started in the repository root finds the folder as a namespace package of that name;
    torch then believes the compiler is there, and `torch.optim` and `torch.compile` fail on it.
    """
    if "triton" in sys.modules:
        return
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is None:
        sys.modules["triton"] = None  # type: ignore[assignment]  # "import triton" now fails, as it should


_hide_triton_folder()


def __getattr__(name: str) -> Any:
    """Imports `dlrm.load` when it is first used, and torch with it."""
    if name == "load":
        return importlib.import_module("dlrm.serving.predictor").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
