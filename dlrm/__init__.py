"""Click-through-rate models (DLRM): from raw logs to a trained, tested and served model.

Importing `dlrm` imports neither torch nor Spark, so that preprocessing runs where torch is not.
"""

import importlib.util
import sys

__version__ = "0.1.0"


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
