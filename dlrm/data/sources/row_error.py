"""The error of a row, from the parser of a cell to the line that a command prints."""

LEAVES_OUT = "; --bad_lines quarantine leaves such rows out"  # for errors of preparations
_LONGEST_SHOWN = 64  # characters of a value in a message


class RowError(ValueError):
    """A row that cannot be read, transformed or scored; readers of tables collect them.

    Whoever knows more of the row sets the attributes, and raises the error again: the parser of a
    cell knows its index, the reader its column, and the command its file.

    Attributes:
        row: index of the row.
        problem: what was expected, and what came.
        column: name of the column; None if the whole row is at fault.
        where: location of the row, such as "a.csv, line 3"; None is the index alone.
    """

    def __init__(
        self, row: int, problem: str, column: str | None = None, where: str | None = None
    ) -> None:
        super().__init__(row, problem, column, where)
        self.row, self.problem, self.column, self.where = row, problem, column, where

    @property
    def reason(self) -> str:
        """Returns the message without the row."""
        return self.problem if self.column is None else f"column {self.column}: {self.problem}"

    def __str__(self) -> str:
        where = f"row {self.row}" if self.where is None else self.where
        return f"{where}{':' if self.column is None else ','} {self.reason}"


class LineError(ValueError):
    """A line of text that is no row, such as one with too few cells."""


def shown_text(text: str | bytes) -> str:
    """Returns a value in quotes, shortened, for messages."""
    if not text:
        return "an empty cell"
    shown = repr(text[:_LONGEST_SHOWN])
    return shown if len(text) <= _LONGEST_SHOWN else f"{shown[:-1]}...{shown[-1]}"
