"""Datasets from Python: opened from disk, or made from tables in memory."""

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from dlrm.api.temporary import temporary_directory
from dlrm.data import layout
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.files import FRAME, TableFile
from dlrm.files import MANIFEST, check_all_local
from dlrm.preproc.duckdb_engine import thread_engine
from dlrm.preproc.errors import TaskError
from dlrm.preproc.options import IncrementConfig, SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables
from dlrm.remote.localize import check_path, errors_shown, local_path, output_at
from dlrm.remote.publish import find_published
from dlrm.remote.uri import Uri, is_uri, shown
from dlrm.serving.wording import in_python
from dlrm.settings import nearest_names, settings_of

TEST_FRACTION = 0.2  # share of the rows, unless the caller divides them otherwise
_DIVISION = [field.name for field in fields(SplitConfig)]
_OPTIONS = ["output_ordering", "bad_lines", "max_bad_lines", "report"]
_INCREMENT = tuple(settings_of(IncrementConfig))
OPTIONS = (*_DIVISION, *_OPTIONS, *_INCREMENT)  # keyword arguments of `Dataset.from_arrow`


class Dataset:
    """A dataset on disk, as `dlrm.fit` and `dlrm train --dataset` read it.

    Args:
        path: the directory of a dataset that this package wrote, or its URI.

    Attributes:
        path: the directory; that of a URI is a copy, which stays as long as this object, and which
            `dlrm.preproc.run` leaves to the first use.
        origin: the directory, or the URI.
        rows: split -> number of rows.
        cardinalities: rows of each embedding table.
        is_temporary: whether the directory is removed together with this object.

    Raises:
        FileNotFoundError, ValueError: the dataset does not exist or is damaged.
        OSError: a URI cannot be read, or its copy does not fit on the disk.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        with errors_shown():
            self._copy = local_path(path, "path")
            self.path = Path(self._copy)
            if self.path.is_file():
                raise ValueError(
                    f"{self.path}: expected a table in memory or a dataset's directory, got a "
                    "file; read it into a table, or make a dataset with dlrm prepare"
                )
            manifest = layout.read_dataset_manifest(self.path)
            if manifest is None:
                raise FileNotFoundError(f"{self.path}: no dataset here (expected {MANIFEST})")
            self._describe(shown(str(self.path)), manifest)

    def _describe(self, origin: str, manifest: Mapping[str, Any]) -> None:
        self.origin, self.is_temporary = origin, False
        self.rows: dict[str, int] = manifest["rows"]
        self.cardinalities: list[int] = manifest["cardinalities"]

    @classmethod
    def _at(cls, uri: Uri) -> "Dataset":
        """Returns a published dataset that has not been copied yet."""
        found = find_published(uri)
        assert found is not None, uri
        dataset = cls.__new__(cls)
        dataset._describe(str(uri), found.manifest)
        return dataset

    @cached_property
    def path(self) -> Path:
        """The directory, which is fetched."""
        self._copy = local_path(self.origin, "path")
        return Path(self._copy)

    def __repr__(self) -> str:
        rows = ", ".join(f"{split} {count:,}" for split, count in self.rows.items())
        return f"Dataset({self.origin!r}; rows: {rows})"

    @classmethod
    def from_arrow(
        cls,
        frame: Any,
        schema: Schema | str | os.PathLike | Mapping[str, Any],
        output: str | os.PathLike | None = None,
        *,
        test: Any = None,
        validation: Any = None,
        overwrite: bool = False,
        cores: int | None = None,
        verbose: bool = False,
        **options: Any,
    ) -> "Dataset":
        """Makes a dataset from a table in memory, byte for byte as `dlrm prepare` does.

        Args:
            frame: a table of pyarrow, Polars, DuckDB or pandas: any object with Arrow's PyCapsule
                interface (`__arrow_c_stream__`), or a pandas DataFrame, whose NaN are missing
                values. Columns that the schema does not name are ignored. Times without a zone
                are in UTC, unless the schema names another zone.
            schema: the meaning of the columns: a `dlrm.Schema`, the path of a `schema.yaml`, or its
                content as a dict.
            output: the directory of the dataset, or a URI; None writes to a temporary one, which is
                removed together with this object.
            test, validation: tables with the rows of these splits. Without them a random fifth of
                the rows is used for testing, unless `options` divide the rows otherwise.
            overwrite: replace an earlier dataset at `output`.
            cores: number of threads; None uses all cores of this machine.
            verbose: print the stages.
            options: fields of `dlrm.preproc.splits.SplitConfig`, such as `test_fraction`,
                `split_key`, `test_from` and `seed`; and `output_ordering`, `bad_lines`,
                `max_bad_lines` and `report` (no report is written by default); and `extend` and
                `numerics`, for rows that extend the dictionaries of an earlier dataset.

        Raises:
            TypeError: an unknown option.
            ValueError: the schema does not fit the table, a value cannot be read, or an option has
                another type; the message names column and row, or the option.
            FileExistsError: `output` already exists.
            OSError: the dataset cannot be written.
        """
        tables = {
            split: [TableFile(Path(name), FRAME, frame=table)]
            for split, name, table in (
                ("train", "frame", frame),
                ("test", "test frame", test),
                ("validation", "validation frame", validation),
            )
            if table is not None
        }
        given = {"report": False} | options
        say = print if verbose else say_nothing
        with in_python():
            made = preparation(cls.from_arrow, schema, given, divided=len(tables) > 1)
            is_local = output is not None and not is_uri(output)
            temporary = None if is_local else temporary_directory()
            folder = temporary.name if temporary else None
            place = Path(folder or "", "dataset") if output is None else output
            engine = partial(thread_engine, cores or os.cpu_count() or 1)
            with output_at(place, "output", layout.KIND if overwrite else False, folder) as path:
                prepare(made, tables, path, engine, replace=overwrite, say=say)
        dataset = cls(path)
        dataset.is_temporary = output is None
        if temporary:
            weakref.finalize(dataset, temporary.cleanup)
        return dataset


def preparation(
    function: Callable,
    schema: Schema | str | os.PathLike | Mapping[str, Any],
    options: Mapping[str, Any],
    divided: bool = False,
    fetch: Callable[[str], str | Path] = Path,
) -> TableOptions:
    """Returns the checked options of preparing tables; a fifth of the rows are test rows.

    Args:
        function: the function that the caller has called, for messages.
        schema: the meaning of the columns: a schema, its path or its content.
        options: options by name, see `OPTIONS`; those that divide the rows take precedence.
        divided: whether tables of their own have the test or validation rows.
        fetch: returns a path for `extend`, which may be a URI.

    Raises:
        TypeError: an unknown option.
        OSError, ValueError: the schema is none or breaks a rule, or an option is impossible.
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise unexpected(function, unknown[0], OPTIONS)
    given = plain(options)
    if isinstance(given.get("extend"), str):
        given["extend"] = Path(fetch(given["extend"]))
    check_all_local(given.items())
    check_types(given, (SplitConfig, TableOptions, IncrementConfig))
    check_path(schema, "schema")
    division, others, increment = (
        {name: given[name] for name in names if name in given}
        for names in (_DIVISION, _OPTIONS, _INCREMENT)
    )
    if not divided and not {"test_fraction", "test_from", "split_column"} & division.keys():
        division["test_fraction"] = TEST_FRACTION
    others["increment"] = IncrementConfig(**increment)
    return TableOptions(_as_schema(schema), SplitConfig(**division), **others)


def _as_schema(schema: Any) -> Schema:
    if isinstance(schema, Schema):
        return schema
    if isinstance(schema, str | os.PathLike):
        return Schema.load(schema)
    if isinstance(schema, Mapping):
        return Schema.from_dict(dict(schema))
    raise ValueError(
        f"schema: expected a Schema, the path of one or a dict, got {type(schema).__name__}"
    )


def prepare(
    options: TableOptions,
    tables: Mapping[str, Sequence[TableFile]],
    path: Path,
    engine: Callable[[Path], Any],
    **how: Any,
) -> None:
    """Calls `prepare_tables`; an error of a task becomes the caller's."""
    try:
        prepare_tables(options, tables, path, engine, **how)
    except TaskError as error:
        if isinstance(error.__cause__, OSError):  # a full disk is no fault of the table
            raise error.__cause__ from None
        raise ValueError(str(error)) from error


def say_nothing(line: str) -> None:
    """Prints no line about a stage."""


def unexpected(function: Callable, name: str, options: Iterable[str]) -> TypeError:
    """Returns the error for an argument that is neither a function's own nor one of its options."""
    parameters = inspect.signature(function).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    known = list(dict.fromkeys([*own, *options]))
    if similar := nearest_names(name, known):
        return TypeError(f"{function.__name__}(): got {name!r}; did you mean {similar[0]!r}?")
    return TypeError(
        f"{function.__name__}(): got {name!r}; expected one of its arguments, which "
        f"help({function.__qualname__}) has, or a setting, which `dlrm train --help` and "
        "`dlrm prepare --help` list"
    )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with numbers, arrays and paths as Python's own numbers, lists and texts."""
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def check_types(settings: Mapping[str, Any], configs: Iterable[type]) -> None:
    """Raises ValueError if a setting is not of the type that its field of a configuration has.

    A whole number is accepted for a float, and a list for a tuple. If two configurations
    have a field of the same name, the later one decides.
    """
    hints = {name: hint for config in configs for name, hint in get_type_hints(config).items()}
    for name, value in settings.items():
        if name in hints and not _is_of_type(value, hints[name]):
            hint = hints[name]
            expected = hint if get_args(hint) or not isinstance(hint, type) else hint.__name__
            raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _is_of_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is UnionType:
        return any(_is_of_type(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        is_list = isinstance(value, tuple | list)
        return is_list and all(_is_of_type(one, get_args(hint)[0]) for one in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)
