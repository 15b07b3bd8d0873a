"""A Triton model repository: where its files are written, and the script of the python backend.

REPO/NAME/config.pbtxt            see model_config.py
REPO/NAME/warmup/                 of models of lists, the lengths of the rows to warm up with
REPO/NAME/1/model.pt              TorchScript
REPO/NAME/1/model.onnx/           ONNX, weights beside it
REPO/NAME/1/model.py              python backend: scores `model.onnx/` by ONNX Runtime
REPO/NAME/1/dlrm/                 and what it imports, with the native libraries
REPO/NAME/1/transform/            the fitted transform, for raw rows
REPO/NAME/1/model.json            tables, types and the kind of output
REPO/NAME/1/report.json           its agreement with the checkpoint
"""

import ast
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from dlrm.files import atomic_directory, make_directories
from dlrm.locks import new_suffix
from dlrm.manifest import write_manifest
from dlrm.serving.server.names import KIND

_PACKAGE = Path(__file__).resolve().parents[1]
_SCRIPT = Path(__file__).with_name("model.py")  # of the python backend


def staged(path: Path, repository: Path) -> AbstractContextManager[Path]:
    """Returns `atomic_directory(path)`, filled where a polling server does not look.

    Such a server takes every directory of the repository for a model, and loads all versions of a
    model again if anything in its directory changes. If nothing can be written beside the
    repository, or it is a file system of its own, it logs an error until the export is complete.
    """
    make_directories(repository)
    parent, name = repository.resolve().parent, f".{new_suffix()}"
    is_near = parent.stat().st_dev == repository.stat().st_dev
    try:
        # Fails otherwise across a bind mount: mounts are compared before the file is looked for.
        os.rename(parent / name, repository / name)
    except OSError as error:
        is_near &= isinstance(error, FileNotFoundError) and os.access(parent, os.W_OK | os.X_OK)
    return atomic_directory(path, beside=repository if is_near else repository / "model")


def write_backend(directory: Path) -> None:
    """Puts `model.py` into a version, with the modules of dlrm that it imports.

    Native libraries are included if they were built: one for any Python, and one for this Python.
    """
    shutil.copyfile(_SCRIPT, directory / _SCRIPT.name)
    for source in (*_imported(), *_PACKAGE.glob("_host*.so"), *_PACKAGE.glob("_served.so")):
        target = directory / source.relative_to(_PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _imported() -> set[Path]:
    """Returns the files of all modules of dlrm that `model.py` and its modules import."""
    found, waiting = set[Path](), [_SCRIPT]
    while waiting:
        tree = ast.parse(waiting.pop().read_text(encoding="utf-8"))
        for node in _imports(tree):
            for name in (f"{node.module}", *(f"{node.module}.{one.name}" for one in node.names)):
                module = _PACKAGE.parent.joinpath(*name.split("."))
                packages = [path / "__init__.py" for path in (module, *module.parents)]
                own = [path for path in packages if path.is_relative_to(_PACKAGE)]
                new = {path for path in (module.with_suffix(".py"), *own) if path.is_file()} - found
                found |= new
                waiting += new
    return found


def _imports(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yields what a file imports from dlrm, except for type checkers only."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dlrm":
        yield node
    elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for part in ast.iter_child_nodes(node):
            yield from _imports(part)


def seal(directory: Path) -> None:
    """Completes a version, and keeps Python from writing bytecode beside its modules.

    A polling server would take that for a change and load the version a second time. Where Python
    makes a directory of bytecode there is an empty file of that name, which it accepts silently.
    The server's Python reads no environment variable that would prevent it.
    """
    write_manifest(directory, KIND)
    for folder in {path.parent for path in directory.rglob("*.py")}:
        (folder / "__pycache__").touch()
