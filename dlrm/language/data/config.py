"""Pre-training data, as configurations without numpy."""

from dataclasses import dataclass

from dlrm.limits import check_processes
from dlrm.settings import check_settings, setting

TEXT_FORMATS = ("sentences", "wikitext")
MAX_LENGTH = (1 << 16) - 1
NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]


@dataclass(frozen=True)
class RowConfig:
    """The lengths, shares and seed of rows; field names are those of the flags."""

    max_seq_length: int = setting(128, "tokens per row", least=8, most=MAX_LENGTH)
    max_predictions_per_seq: int = setting(
        20, "maximum masked tokens per row; usual: 20 of 128, 80 of 512", least=1
    )
    masked_lm_prob: float = setting(  # with more, five tokens are too few
        0.15, "share of the tokens to mask", above=0, most=0.5
    )
    short_seq_prob: float = setting(
        0.1,
        "probability of cutting a document into shorter rows than would fit",
        least=0,
        most=1,
    )
    seed: int = setting(12345, "random seed", least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_predictions_per_seq > self.max_seq_length - NUM_SPECIAL:
            raise ValueError(
                "--max_predictions_per_seq: expected 1 to --max_seq_length - 3 = "
                f"{self.max_seq_length - NUM_SPECIAL}, got {self.max_predictions_per_seq}"
            )


@dataclass(frozen=True)
class VocabularyConfig:
    """The tokens of text; field names are those of the flags."""

    vocab_file: str = setting("", "WordPiece vocabulary, one token per line")
    lower_case: bool = setting(True, "Convert text to lower case and strip accents")


@dataclass(frozen=True)
class PretrainingTextConfig(VocabularyConfig, RowConfig):
    """The options of a dataset made from raw text; field names are those of the flags."""

    dupe_factor: int = setting(
        5, "number of times that each document is cut and masked, each time differently", least=1
    )
    input_format: str = setting(
        "sentences",
        "format of the source: a sentence a line and blank lines between documents, or WikiText's "
        "paragraphs and headings",
        choices=TEXT_FORMATS,
    )
    num_shards: int | None = setting(
        None, "number of files to write; default: one per 262,144 rows", least=1
    )
    processes: int = setting(1, "number of processes, which does not change the bytes", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.vocab_file:
            raise ValueError("--vocab_file: expected the file of the vocabulary, got none")
        check_processes("--processes", self.processes)
