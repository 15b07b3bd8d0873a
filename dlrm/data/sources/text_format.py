"""The format of text files, as a schema keeps it: how lines become cells, and cells numbers."""

import codecs
import itertools
import re
from dataclasses import dataclass, fields, replace

from dlrm.data.names import field_names
from dlrm.limits import check_features
from dlrm.settings import setting

NONE = "none"  # no quote, escape or mark, against those of a schema
COMPRESSIONS = ("none", "gzip", "bz2", "xz", "zstd")
MARKS = (".", ",", " ", "'", "_", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}")
_OTHERWISE = "default: that of the schema, otherwise"
_SPECIAL = "\r\n\0"
_PLAIN = re.compile(r"\s*[+-]?[\d.]+([eE][+-]?\d+)?\s*", re.ASCII)


@dataclass(frozen=True)
class TextFormat:
    """The format of CSV; each entry that is None has its default.

    A quote in quotes is doubled, unless there is an escape character. That one takes its meaning
    from a quote, a delimiter or itself that follows, within quotes or if there are none; before
    others it is itself. "none" is no quote, escape or mark, against that of a schema.

    Raises:
        ValueError: an entry has another form, or two have the same character.
    """

    columns: tuple[str, ...] = setting((), "names of a CSV's columns; default: those of its header")
    header: bool | None = setting(
        None,
        "a CSV begins with a line of column names; default: yes unless --columns is given",
    )
    delimiter: str | None = setting(
        None,
        f"separator of a CSV's cells; {_OTHERWISE} a tab for .tsv, and a comma for other files",
    )
    quote: str | None = setting(
        None,
        f"character around a CSV's cells, or none, if quotes are part of the text; {_OTHERWISE} \"",
    )
    escape: str | None = setting(
        None,
        f"character before quotes and delimiters in a CSV's cells, such as \\; {_OTHERWISE} none",
    )
    encoding: str | None = setting(
        None, f"encoding of text, such as latin-1 or utf-16; {_OTHERWISE} UTF-8"
    )
    decimal: str | None = setting(
        None, f"decimal mark of a CSV's numbers, a point or a comma; {_OTHERWISE} a point"
    )
    thousands: str | None = setting(
        None, f"mark between groups of three digits in a CSV; {_OTHERWISE} none"
    )
    compression: str | None = setting(
        None,
        f"compression of text; {_OTHERWISE} that of each file's content",
        choices=COMPRESSIONS,
    )

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote", "escape"):
            value = getattr(self, name)
            if value is None or (name != "delimiter" and value == NONE):
                continue
            if len(value) != 1 or value in _SPECIAL or value == " " or not value.isascii():
                also = "" if name == "delimiter" else f", or {NONE}"
                raise ValueError(
                    f"--{name}: expected one character of ASCII, no blank or line end{also}, got "
                    f"{value!r}"
                )
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
                "".encode(self.encoding)
            except (LookupError, ValueError):
                raise ValueError(
                    "--encoding: expected a name such as utf-8, latin-1, cp1252 or utf-16, got "
                    f"{self.encoding!r}"
                ) from None
        if self.decimal not in (None, ".", ","):
            raise ValueError(f"--decimal: expected a point or a comma, got {self.decimal!r}")
        if self.thousands not in (None, NONE, *MARKS):
            raise ValueError(
                f"--thousands: expected a point, comma, apostrophe, underscore or blank, got "
                f"{self.thousands!r}"
            )
        if self.compression not in (None, *COMPRESSIONS):
            raise ValueError(
                f"--compression: expected one of {', '.join(COMPRESSIONS)}, got "
                f"{self.compression!r}"
            )
        for name, other in itertools.combinations(("delimiter", "escape", "quote"), 2):
            if (value := getattr(self, name)) == getattr(self, other) and value not in (None, NONE):
                raise ValueError(f"--{name}, --{other}: expected two characters, got {value!r}")
        if (self.decimal or ".") == self.thousands:
            raise ValueError(
                f"--decimal, --thousands: expected two characters, got {self.thousands!r} for both"
            )

    def over(self, other: "TextFormat | None") -> "TextFormat":
        """Returns this format with the entries of another where it has none."""
        if other is None:
            return self
        values = vars(self)
        own = {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}
        if self.columns:
            own["header"] = self.header  # not that of the other's columns
        return replace(other, **own)

    @property
    def remembered(self) -> "TextFormat | None":
        """Returns the entries that later readers follow, but the names, which a transform has."""
        kept = replace(self, columns=(), header=None)
        return None if kept == TextFormat() else kept

    @property
    def has_marks(self) -> bool:
        """Returns whether numbers are written otherwise than 1234.5."""
        return self.decimal == "," or self.thousands not in (None, NONE)

    def plain_number(self, text: str) -> str:
        """Returns a number without its marks: 1234.5 for 1.234,5; other texts as they are."""
        thousands = None if self.thousands == NONE else self.thousands
        return plain_number(text, self.decimal or ".", thousands)


def plain_number(text: str, decimal: str, thousands: str | None) -> str:
    """Returns a number without its marks, and other texts as they are.

    A number with another decimal mark becomes a text that is none, and shows the mark.
    """
    mark = re.escape(thousands or "")
    groups = rf"\d{{1,3}}(?:{mark}\d{{3}})+|\d+" if thousands else r"\d+"
    pattern = rf"\s*([+-]?)({groups})?(?:{re.escape(decimal)}(\d*))?([eE][+-]?\d+)?\s*"
    match = re.fullmatch(pattern, text, re.ASCII)
    if match is None or not (match[2] or match[3]):
        return f"{text.strip()} (decimal mark {decimal})" if _PLAIN.fullmatch(text) else text
    whole = (match[2] or "").replace(thousands or "\0", "")
    fraction = "" if match[3] is None else f".{match[3]}"
    return f"{match[1]}{whole}{fraction}{match[4] or ''}"


@dataclass(frozen=True)
class LogFormat:
    """Columns of a line: the label (column 0, if there are labels), integers, then hashes."""

    num_numerical: int = setting(13, "number of integer columns")
    num_categorical: int = setting(26, "number of hexadecimal columns")
    labeled: bool = True

    def __post_init__(self) -> None:
        check_features("--num_numerical", self.num_numerical)
        check_features("--num_categorical", self.num_categorical)
        if not self.num_features:
            raise ValueError("--num_numerical 0 --num_categorical 0: expected a feature")

    @property
    def num_features(self) -> int:
        """Fields of a line, without the label."""
        return self.num_numerical + self.num_categorical

    @property
    def num_columns(self) -> int:
        """Fields of a line, with the label if there is one."""
        return self.labeled + self.num_features

    def describe(self, column: int) -> str:
        """Returns the number of a column in the line, and its meaning."""
        feature = column - self.labeled
        if feature < 0:
            return "0 (label)"
        numerical, categorical = field_names(self.num_numerical, self.num_categorical)
        return f"{column} ({[*numerical, *categorical][feature]})"
