"""A CSV and the roles of its columns by flags only, as a configuration without numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlrm.data.choices import NUMERIC_TRANSFORMS, described
from dlrm.data.clicks.names import FEATURE_SPEC
from dlrm.data.sources.text_format import TextFormat
from dlrm.preproc.stages.options import SplitConfig
from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    from dlrm.preproc.tables.options import TableOptions


@dataclass(frozen=True)
class CsvConfig:
    """A CSV file, or a directory of them, and the roles of columns; fields are flag names.

    Attributes:
        input: a file, or a directory whose CSV files are read in order of their names.
        output: the dataset's directory; it must not exist, or be empty.
        label: column of the label.

    Raises:
        ValueError: a value is impossible; the message names the flag.
    """

    input: str
    output: str
    label: str
    numerical: tuple[str, ...] = setting((), "columns of numbers")
    categorical: tuple[str, ...] = setting(
        (), "columns of any other values, with one embedding table each"
    )
    positive: str | None = setting(
        None, "value of the label that counts as 1; default: labels are 0 or 1"
    )
    header: bool | None = setting(
        None,
        "files begin with a line of column names; default: yes unless --columns is given",
    )
    columns: tuple[str, ...] = setting(
        (), "names of all columns of the file; default: those of its header"
    )
    delimiter: str = setting(",", "separator of cells")
    missing_values: tuple[str, ...] = setting(
        ("?",), "cells that stand for a missing value, besides empty ones"
    )
    numeric_transform: str = setting("standardize", described(), choices=NUMERIC_TRANSFORMS)
    frequency_limit: int = setting(
        1, "values that occur in fewer training rows share id 0", least=1
    )
    test_fraction: float = setting(0.2, "share of the rows to choose at random for testing")
    seed: int = setting(
        12345, "seed of the choice of test rows and of the order of the other rows", least=0
    )
    chunk_size: int = setting(65536, "number of rows parsed at a time", least=1)
    feature_spec_out: str = setting(FEATURE_SPEC, "name of the specification to write")

    def __post_init__(self) -> None:
        if not self.numerical and not self.categorical:
            raise ValueError("--numerical, --categorical: expected one column at least, got none")
        used = [self.label, *self.numerical, *self.categorical]
        if repeated := sorted({name for name in used if used.count(name) > 1}):
            raise ValueError(
                f"--label, --numerical, --categorical: columns named twice: {', '.join(repeated)}"
            )
        check_settings(self)
        self.options()  # checks the others

    def options(self, **others: Any) -> "TableOptions":
        """Returns these options as options of the pipeline, with other ones."""
        from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
        from dlrm.preproc.tables.options import TableOptions

        schema = Schema(
            Label(self.label, self.positive, any_negative=self.positive is not None),
            tuple(NumericalField(name, self.numeric_transform) for name in self.numerical),
            tuple(
                CategoricalField(name, frequency_limit=self.frequency_limit)
                for name in self.categorical
            ),
            self.missing_values,
        )
        return TableOptions(
            schema,
            SplitConfig(test_fraction=self.test_fraction, seed=self.seed),
            TextFormat(self.columns, self.header, self.delimiter, chunk_rows=self.chunk_size),
            feature_spec_out=self.feature_spec_out,
            **others,
        )
