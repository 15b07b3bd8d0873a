"""Options of preparing tables, which determine the dataset."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from dlrm.data.clicks import layout
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.schema import Schema
from dlrm.preproc.stages.stage import BAD_LINES, ORDERINGS
from dlrm.preproc.tables.division import Division, facts


@dataclass(frozen=True)
class TableOptions:
    """Options of preparing tables. All except `split_bytes` and `max_bad_lines` change the output.

    Attributes:
        schema: the meaning of the columns.
        division: division of rows into train, test and validation.
        text: format of CSV, whose entries take precedence over those of the schema.
        output_ordering: "total_random" shuffles the training rows, "input" keeps their order.
        split_bytes: size on disk of a task's input.
        bad_lines: "fail", or "quarantine": leave out unreadable rows, and list them.
        max_bad_lines: maximum share of all rows to leave out.
        report: write `report.html` and `report.json`.
        output_format: format of the dataset.
        feature_spec_out: name of the specification to write.
        default_names: whether features have NVIDIA's names in the specification, such as num_0.
    """

    schema: Schema
    division: Division = Division()
    text: TextFormat = TextFormat()
    output_ordering: str = "total_random"
    split_bytes: int | None = None
    bad_lines: str = "fail"
    max_bad_lines: float = 0.001
    report: bool = True
    output_format: str = "split_binary"
    feature_spec_out: str = layout.FEATURE_SPEC
    default_names: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("output_ordering", ORDERINGS), ("bad_lines", BAD_LINES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: expected one of {allowed}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"--split_bytes {self.split_bytes}: expected 1 or more")
        if self.output_format == "binary" and self.schema.separators:
            raise ValueError(
                "--output_format binary: expected a schema without list fields, as its rows have "
                f"one id a table, got {next(iter(self.schema.separators))}; split_binary has lists"
            )
        layout.check_spec_name(self.feature_spec_out)
        if not 0 <= self.max_bad_lines <= 1:
            raise ValueError(f"--max_bad_lines {self.max_bad_lines}: expected a share, 0 to 1")

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
        numerical, categorical = self.schema.numerical_names, self.schema.categorical_names
        if not self.default_names:
            return self.schema.label.column, numerical, categorical
        numerical = list(map(layout.numerical_name, range(len(numerical))))
        return layout.LABEL, numerical, list(map(layout.categorical_name, range(len(categorical))))

    @property
    def quarantine(self) -> bool:
        """Returns whether unreadable rows are left out."""
        return self.bad_lines == "quarantine"

    @property
    def seed(self) -> int:
        """Returns the seed of the order of the training rows."""
        return self.division.seed

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, the options that determine the bytes of the dataset."""
        text = asdict(self.text)
        del text["chunk_rows"]
        names = ["output_ordering", "bad_lines", "report", "output_format"]
        names += ["feature_spec_out", "default_names"]
        values = text | vars(self.division) | {name: getattr(self, name) for name in names}
        return {"--schema": self.schema.facts()} | {f"--{k}": v for k, v in values.items()}

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest's entries about the options."""
        return {
            "schema": self.schema.facts(),
            "division": facts(self.division),
            "output_ordering": self.output_ordering,
            "bad_lines": self.bad_lines,
        }
