"""The command line of `dlrm.scripts.predict`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, setting

OUTPUT_KINDS = ("probability", "logit")


@dataclass(frozen=True)
class PredictConfig:
    """The rows to score, and what is written of them; field names are those of the flags."""

    output: Path = setting(
        REQUIRED,
        "File to write the scores to, in NumPy's format, with a name that ends in .npy; an earlier "
        "file is replaced",
        uri="replace",
    )
    input: str | None = setting(
        None, "Log, table or dataset to score; -: standard input", uri="read"
    )
    output_kind: str = setting(
        "probability",
        "Scores to write: the probability of a click, or the model's logit",
        choices=OUTPUT_KINDS,
    )
    explain: int | None = setting(
        None,
        "Print the contribution of each field to the logit of this row, counted from 0 (gradient "
        "x input)",
        least=0,
    )
