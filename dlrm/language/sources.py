"""Opens the rows of text that BERT trains and is tested on, given the flags."""

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from dlrm.flags import Values
from dlrm.language.flags import TRAINING
from dlrm.language.generated import GeneratedText
from dlrm.language.loader import TextBatch, TextLoader, TextSource
from dlrm.language.pairs import SentencePairs
from dlrm.language.pretraining import PretrainingDataset, known_vocab_size
from dlrm.language.squad import SquadFeatures, read_squad
from dlrm.language.wordpiece import Tokenizer

FILES = {  # files in a directory: training and test rows
    "squad": ("train-v1.1.json", "dev-v1.1.json"),
    "mrpc": ("train.tsv", "dev.tsv"),
}


def open_sources(
    values: Values, vocab_is_fixed: bool
) -> tuple[TextSource | None, TextSource | None, Values]:
    """Opens the rows that flags name, or generates rows.

    Args:
        vocab_is_fixed: whether `--vocab_size` is that of weights, or was given; otherwise it
            becomes that of the data.

    Returns:
        Rows to train on and to test on, None if there are none, and the flags with the properties
        of the rows.
    """
    trains = values["mode"] in TRAINING
    used = (trains, not (trains and values["no_validation"]))
    if values["data"] == "dataset":
        paths = _paths(values)
        needed = [path if use else None for path, use in zip(paths, used, strict=True)]
        if values["task"] in FILES:
            for path in filter(None, needed):
                _check_is_file(path, "--dataset, --test_dataset")
        open_rows, values = _opener(values, vocab_is_fixed, paths[0])
        train, test = (open_rows(path) if path else None for path in needed)
    else:
        made = made_up(values, values["synthetic_dataset_num_entries"])
        train, test = (made if use else None for use in used)
    lengths = [source.length for source in (train, test) if source is not None]
    if lengths:
        values = values.filled({"max_seq_length": lengths[0]})
    if max(lengths, default=0) > values["max_position_embeddings"]:
        raise ValueError(
            f"--max_position_embeddings {values['max_position_embeddings']}: expected at least the "
            f"length of the rows, {max(lengths)} tokens"
        )
    return train, test, values


def _paths(values: Values) -> tuple[str, str | None]:
    given, test, task = values["dataset"], values["test_dataset"], values["task"]
    trains = values["mode"] in TRAINING
    if given is None and (trains or test is None):
        raise ValueError("--dataset: expected a path, or --data generated or synthetic")
    if task in FILES and given and Path(given).is_dir():
        train, default = (str(Path(given, name)) for name in FILES[task])
        return train, test or default
    return given or test, test if trains else test or given


def _check_is_file(path: str, flag: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file ({flag})")


def _opener(
    values: Values, vocab_is_fixed: bool, path: str
) -> tuple[Callable[[str], TextSource], Values]:
    """Returns a function that opens rows of the task, and the values with the vocabulary's size."""
    if values["task"] == "pretrain":
        if not vocab_is_fixed and (size := known_vocab_size(path)):
            values = values.filled({"vocab_size": size})
        names = ("pad_to_seq_length", "vocab_size", "unknown_id", "verify_data", "allow_links")
        options = {name: values[name] for name in names}
        for flag, name in (
            ("max_seq_length", "max_seq_length"),
            ("max_predictions_per_seq", "max_predictions"),
        ):
            if flag in values.given:  # else those of the files
                options[name] = values[flag]
        return partial(PretrainingDataset, **options), values
    if not values["vocab_file"]:
        raise ValueError(f"--task {values['task']} needs --vocab_file, a WordPiece vocabulary")
    _check_is_file(values["vocab_file"], "--vocab_file")
    known = values["vocab_size"] if vocab_is_fixed else None
    tokenizer = Tokenizer(values["vocab_file"], values["lower_case"], vocab_size=known)
    if not vocab_is_fixed:
        values = values.filled({"vocab_size": tokenizer.vocab_size})
    length = values["max_seq_length"]
    if values["task"] == "mrpc":
        return lambda path: _pairs(path, tokenizer, length), values
    sizes = (length, values["doc_stride"], values["max_query_length"])
    return lambda path: SquadFeatures(read_squad(path), tokenizer, *sizes), values


def _pairs(path: str, tokenizer: Tokenizer, length: int) -> TextSource:
    pairs = SentencePairs(path, tokenizer, length)
    if pairs.labels is None:
        raise ValueError(f"{path}: expected labels, and its pairs have none")
    return pairs


def made_up(values: Values, rows: int) -> GeneratedText:
    """Returns rows of random tokens for the task of the flags."""
    return GeneratedText(
        values["task"],
        rows,
        length=values["max_seq_length"],
        vocab_size=values["vocab_size"],
        max_predictions=values["max_predictions_per_seq"],
        seed=values["seed"],
    )


class ReadWhenAsked:
    """A loader that reads each batch on request, and prefetches none."""

    def __init__(self, loader: TextLoader, device: str):
        self._loader, self._device = loader, device
        self.num_samples = loader.num_samples

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[TextBatch, None, None]:
        """Yields the batches of an epoch from index `start` on."""
        read = self._loader.epoch(epoch)
        for index in range(start, len(self)):
            yield read.batch(index).map(lambda tensor: tensor.to(self._device))
