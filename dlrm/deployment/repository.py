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
from contextlib import AbstractContextManager
from pathlib import Path

from dlrm.files import atomic_directory, make_directories
from dlrm.locks import new_suffix

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


def keep_bytecode_out(directory: Path) -> None:
    """Keeps Python from writing bytecode beside the modules of a version.

    A polling server would take it for a change and load the version a second time. Where it makes
    a directory of bytecode there is an empty file of that name, which Python accepts silently.
    The server's Python reads no environment variable that would prevent it.
    """
    for folder in {path.parent for path in directory.rglob("*.py")}:
        (folder / "__pycache__").touch()


def _imported() -> set[Path]:
    """Returns the files of all modules of dlrm that `model.py` and its modules import."""
    found, waiting = set[Path](), [_SCRIPT]
    while waiting:
        imports = _Imports()
        imports.visit(ast.parse(waiting.pop().read_text(encoding="utf-8")))
        for name in imports.names:
            module = _PACKAGE.parent.joinpath(*name.split("."))
            packages = [path for path in (module, *module.parents) if path.is_relative_to(_PACKAGE)]
            files = [module.with_suffix(".py"), *(path / "__init__.py" for path in packages)]
            new = {path for path in files if path.is_file()} - found
            found |= new
            waiting += new
    return found


class _Imports(ast.NodeVisitor):
    """Collects what a file imports from dlrm, except for type checkers only."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == "dlrm":
            self.names += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
