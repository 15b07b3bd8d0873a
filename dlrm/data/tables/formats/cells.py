"""The meaning of cells of text, by the fields of a schema."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.transform.rows import split_text

Cell = str | list[str | None] | None


@dataclass(frozen=True)
class Cells:
    """The meaning of cells of text that depends on the file, and not on the field alone.

    Attributes:
        separators: column of lists -> separator of its values in CSV.
        missing_values: column -> texts that mean "missing", as they are written.
        numbers: columns of numbers, which may have the marks of a format.
        plain: columns of numbers of which most values differ.
    """

    separators: Mapping[str, str] = field(default_factory=dict)
    missing_values: Mapping[str, Collection[str]] = field(default_factory=dict)
    numbers: Collection[str] = ()
    plain: Collection[str] = ()

    @classmethod
    def from_schema(cls, schema: Schema) -> "Cells":
        """Returns the meaning of a schema's cells."""
        missing: dict[str, Collection[str]] = {
            field.column: schema.missing_of(field) for field in schema.numerical
        }
        missing |= {schema.weight: schema.missing_values} if schema.weight else {}
        numbers = {field.column for field in schema.numerical}
        numbers |= {schema.weight} if schema.weight else set()
        plain = numbers.copy()
        for categorical in schema.categorical:
            columns = [categorical.column, *([categorical.weights] if categorical.weights else [])]
            missing |= dict.fromkeys(columns, schema.missing_of(categorical))
            plain -= {categorical.column}
            if categorical.type == "integer":
                numbers.add(categorical.column)
            if categorical.weights:
                numbers.add(categorical.weights)
        return cls(schema.separators, missing, numbers, plain)

    def type_of(self, name: str) -> pa.DataType:
        """Returns the type of a column whose cells are text."""
        return pa.list_(pa.string()) if name in self.separators else pa.string()

    def array(
        self, name: str, cells: pa.Array | Iterable[Cell], text: TextFormat | None = None
    ) -> pa.Array:
        """Returns the cells of a column; numbers of CSV may have the marks of its format."""
        separator, missing = self.separators.get(name), self.missing_values.get(name, ())
        if separator is None:
            array = cells if isinstance(cells, pa.Array) else pa.array(list(cells), pa.string())
        else:
            of = cells.to_pylist() if isinstance(cells, pa.Array) else cells
            rows = [split_text(c, separator, missing) if isinstance(c, str) else c for c in of]
            array = pa.array(rows, self.type_of(name))
        if text is None or not text.has_marks or name not in self.numbers:
            return array
        if separator is None:
            return _without_marks(array, text, missing)
        values = _without_marks(array.flatten(), text, missing)
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())


def _without_marks(array: pa.Array, text: TextFormat, missing: Collection[str]) -> pa.Array:
    """Returns numbers in text without the marks of a format, and missing ones as they are."""
    coded = array.dictionary_encode()
    texts = [
        cell if cell.strip() in missing else text.plain_number(cell.strip())
        for cell in coded.dictionary.to_pylist()
    ]
    values = pa.array(texts, pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, values).dictionary_decode()
