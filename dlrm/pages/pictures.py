"""Pictures by matplotlib, an optional package that is imported when one is drawn.

Figures are made without pyplot, so the backend of the program around them stays as it is.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.command_line import missing_extra
from dlrm.files import atomic_file
from dlrm.pages.charts import COLORS, REFERENCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GRAY = *COLORS[:2], REFERENCE
_DPI = 130


def write_picture(path: Path, draw: Callable[["Figure"], object]) -> str | None:
    """Writes a picture as PNG, whole or not at all.

    Args:
        draw: draws on an empty figure, whose size it sets.

    Returns:
        None, or the reason why there is no picture: no matplotlib, or no place to write.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it logs about its font cache
    try:
        from matplotlib.figure import Figure

        figure = Figure(dpi=_DPI, layout="constrained")
        draw(figure)
        if not path.parent.is_dir():  # where `atomic_file` would try again and again
            raise FileNotFoundError(f"{path}: expected its directory to exist")
        with atomic_file(path) as staged:
            figure.savefig(staged, format="png")
    except ImportError as error:
        return missing_extra(error, "plots")
    except OSError as error:
        return str(error)
    return None
