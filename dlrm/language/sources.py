"""Opens the rows of text that BERT trains and is tested on, given the flags."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.flags import Values
from dlrm.language import flags as bert_flags
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


@dataclass(frozen=True)
class Sources:
    """Rows to train on and to test on; None if there are none.

    Attributes:
        train: rows to train on.
        test: rows to test on.
        values: the flags, with the properties of the rows.
    """

    train: TextSource | None
    test: TextSource | None
    values: Values


def open_sources(values: Values, vocab_is_fixed: bool) -> Sources:
    """Opens the rows that flags name, or generates rows.

    Args:
        vocab_is_fixed: whether `--vocab_size` is that of weights, or was given; otherwise it
            becomes that of the data.
    """
    training = values["mode"] in bert_flags.TRAINING
    tested = not (training and values["no_validation"])
    if values["data"] == "dataset":
        train_path, test_path = _paths(values)
        if values["task"] in FILES:
            needed = ([train_path] if training else []) + ([test_path] if tested else [])
            for path in filter(None, needed):
                _check_is_file(path, "--dataset, --test_dataset")
        open_rows, values = _opener(values, vocab_is_fixed, train_path)
        train = open_rows(train_path) if training else None
        test = open_rows(test_path) if tested and test_path else None
    else:
        made = made_up(values, values["synthetic_dataset_num_entries"])
        train, test = made if training else None, made if tested else None
    known = train if train is not None else test
    if known is not None:
        values = values.filled({"max_seq_length": known.length})
    longest = max((source.length for source in (train, test) if source is not None), default=0)
    if longest > values["max_position_embeddings"]:
        raise ValueError(
            f"--max_position_embeddings {values['max_position_embeddings']}: expected at least the "
            f"length of the rows, {longest} tokens"
        )
    return Sources(train, test, values)


def _paths(values: Values) -> tuple[str, str | None]:
    given, test, task = values["dataset"], values["test_dataset"], values["task"]
    training = values["mode"] in bert_flags.TRAINING
    if given is None and (training or test is None):
        raise ValueError("--dataset: expected a path, or --data generated or synthetic")
    train = given or test
    if task in FILES and given and Path(given).is_dir():
        train, default = (str(Path(given, name)) for name in FILES[task])
        return train, test or default
    return train, test if training else test or given


def _opener(
    values: Values, vocab_is_fixed: bool, path: str
) -> tuple[Callable[[str], TextSource], Values]:
    """Returns a function that opens rows of the task, and the values with the vocabulary's size."""
    if values["task"] == "pretrain":
        if not vocab_is_fixed and (size := known_vocab_size(path)):
            values = values.filled({"vocab_size": size})
        return lambda path: _pretraining(values, path), values
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


def _check_is_file(path: str, flag: str) -> None:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file ({flag})")


def _pairs(path: str, tokenizer: Tokenizer, length: int) -> TextSource:
    pairs = SentencePairs(path, tokenizer, length)
    if pairs.labels is None:
        raise ValueError(f"{path}: expected labels, and its pairs have none")
    return pairs


def _pretraining(values: Values, path: str) -> TextSource:
    """Opens pre-training rows; sizes that are not given are those of the files, if known."""
    flags = {"max_seq_length": "max_seq_length", "max_predictions": "max_predictions_per_seq"}
    sizes: dict[str, Any] = {
        name: values[flag] for name, flag in flags.items() if flag in values.given
    }
    return PretrainingDataset(
        path,
        pad_to_seq_length=values["pad_to_seq_length"],
        vocab_size=values["vocab_size"],
        unknown_id=values["unknown_id"],
        verify_data=values["verify_data"],
        allow_links=values["allow_links"],
        **sizes,
    )


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


class SameBatch:
    """A loader that repeats the first batch of another from the device, without any input.

    Args:
        loader: loader of the first batch, with the same number of batches.
    """

    def __init__(self, loader: TextLoader, device: str):
        self._length, self.num_samples = len(loader), loader.num_samples
        self._batch = loader.epoch(0).batch(0).map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return self._length

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[TextBatch, None, None]:
        """Yields the batch."""
        for _ in range(start, len(self)):
            yield self._batch


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
