"""Text datasets; the loader is imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm.language.data.loader import TextLoader as TextLoader


def __getattr__(name: str) -> Any:
    if name == "TextLoader":
        return importlib.import_module("dlrm.language.data.loader").TextLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
