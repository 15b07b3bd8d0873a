"""Options of preparing tables."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from dlrm.data import layout
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_format import TextFormat
from dlrm.preproc.options import PreparationOptions, SplitConfig
from dlrm.preproc.splits import facts


@dataclass(frozen=True)
class TableOptions(PreparationOptions):
    """Options of preparing tables, besides those of all rows.

    Attributes:
        schema: the meaning of the columns.
        division: division of rows into train, test and validation.
        text: format of CSV, whose entries take precedence over those of the schema.
        feature_spec_out: name of the specification to write.
    """

    schema: Schema
    division: SplitConfig = SplitConfig()
    text: TextFormat = TextFormat()
    feature_spec_out: str = layout.FEATURE_SPEC

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_format == "binary" and self.schema.separators:
            raise ValueError(
                "--output_format binary: expected a schema without list fields, as its rows have "
                f"one id a table, got {next(iter(self.schema.separators))}; split_binary has lists"
            )
        layout.check_spec_name(self.feature_spec_out)

    @property
    def format(self) -> TextFormat:
        """Returns the format of CSV."""
        return self.text.over(self.schema.format)

    @property
    def remembered_schema(self) -> Schema:
        """Returns the schema with the format of CSV that was read, for later readers."""
        if (text := self.text.remembered) is None:
            return self.schema
        return replace(self.schema, format=text.over(self.schema.format))

    @property
    def feature_names(self) -> tuple[str, list[str], list[str]]:
        """Returns the names of the label, numerical and categorical features in a specification."""
        schema = self.schema
        return schema.label.column, schema.numerical_names, schema.categorical_names

    @property
    def seed(self) -> int:
        """Returns the seed of the order of the training rows."""
        return self.division.seed

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, the options that determine the bytes of the dataset."""
        values = asdict(self.text) | vars(self.division)
        values["feature_spec_out"] = self.feature_spec_out
        flags = {"--schema": self.schema.to_dict()} | {f"--{k}": v for k, v in values.items()}
        return flags | self.common_facts()

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest's entries about the options."""
        return {
            "schema": self.schema.to_dict(),
            "division": facts(self.division),
            "output_ordering": self.output_ordering,
            "bad_lines": self.bad_lines,
        }
