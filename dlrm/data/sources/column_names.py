"""Finds wanted columns by their names, and names what is missing."""

from collections.abc import Callable, Iterable, Sequence

MOST_LISTED = 20  # labels or columns in an error message


def listed(names: Sequence[str]) -> str:
    """Returns the first names for a message."""
    return ", ".join(names[:MOST_LISTED]) + ", ..." * (len(names) > MOST_LISTED)


def check_columns(
    where: object,
    names: Iterable[str],
    wanted: Iterable[str],
    hint: Callable[[str], str] = lambda missing: "",
) -> None:
    """Checks that every wanted column is there, and once.

    Args:
        where: the file, frame or flag, for the message; "" is none.
        hint: end of the message for a missing column.

    Raises:
        ValueError: a column is missing, or has the name of another.
    """
    names, begin = list(names), f"{where}: " if where else ""
    for name in wanted:
        if name not in names:
            shown = f"the columns are {listed(names)}{hint(name)}"
            raise ValueError(f"{begin}no column {name!r}; {shown}")
        if names.count(name) > 1:
            raise ValueError(f"{begin}two columns are called {name!r}")
