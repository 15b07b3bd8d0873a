"""The version of this package, without importing the package's public names."""

import os
import sys

__version__ = "0.2.0"


def version_line() -> str:
    """Returns the versions of dlrm, torch and Python, and the native parts, without importing any.

    An operator that was built for another machine counts; `dlrm doctor` tries them.
    """
    from importlib import metadata, util  # which takes 30 ms

    folder = os.path.dirname(__file__)
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    operators = [name for name in ("cpu", "cuda") if os.path.isfile(f"{folder}/_ops_{name}.so")]
    parser = "yes" if util.find_spec("dlrm._host") else "no"
    return (
        f"dlrm {__version__} (torch {torch}; native operators: "
        f"{' and '.join(operators) or 'none'}; log parser: {parser}; "
        f"Python {sys.version.split()[0]})"
    )
