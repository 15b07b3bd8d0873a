"""Settings of commands that read tables, such as the format of CSV, or prepare them."""

import re
from dataclasses import dataclass
from typing import Any

from dlrm.data.choices import TABLE_FORMATS
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import Values
from dlrm.preproc.options import PreparationOptions, RunConfig
from dlrm.settings import setting, settings_of

TEXT_FLAGS = tuple(settings_of(TextFormat))
# Options of preparation that commands whose flags determine the schema do not have.
NOT_OPTIONS = ("output_ordering", "split_bytes", "output_format")


@dataclass(frozen=True)
class FilesConfig:
    """The files of tables; field names are those of the flags."""

    input_format: str | None = setting(
        None, "kind of the files; default: by their names and content", choices=TABLE_FORMATS
    )


PREPARATION = (("Preparation", PreparationOptions), ("Preparation", RunConfig))


def text_format(values: Values) -> TextFormat:
    """Returns the format of CSV that the flags describe."""
    given = values["delimiter"]
    escaped = given is not None and re.fullmatch(r"\\(t|x[01][0-9a-fA-F])", given)
    if escaped:  # which a shell does not turn into a character
        return values.config(TextFormat, delimiter=given.encode().decode("unicode_escape"))
    return values.config(TextFormat)


def preparation(values: Values) -> dict[str, Any]:
    """Returns the fields of `PreparationOptions` that the flags determine."""
    return {name: values[name] for name in settings_of(PreparationOptions) if name in values}
