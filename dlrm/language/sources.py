"""The rows of text that BERT trains and is tested on: those of files, and random ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dlrm.flags import Values
from dlrm.language.flags import TRAINING
from dlrm.language.loader import NO_TOKEN, TextBatch, TextSource
from dlrm.language.pairs import SentencePairs
from dlrm.language.pretraining import PretrainingDataset, known_vocab_size
from dlrm.language.squad import SquadFeatures, read_squad
from dlrm.language.wordpiece import Tokenizer

FILES = {  # files in a directory: training and test rows
    "squad": ("train-v1.1.json", "dev-v1.1.json"),
    "mrpc": ("train.tsv", "dev.tsv"),
}
_MOST = 1024  # distinct generated rows; others are copies of them


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
        open_rows, values = _opener(values, vocab_is_fixed, paths[0])
        needed = (path if use else None for path, use in zip(paths, used, strict=True))
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
    """Returns the files of training and test rows."""
    given, test, task = values["dataset"], values["test_dataset"], values["task"]
    trains = values["mode"] in TRAINING
    if given is None and (trains or test is None):
        raise ValueError("--dataset: expected a path, or --data generated or synthetic")
    if task in FILES and given and Path(given).is_dir():
        train, default = (str(Path(given, name)) for name in FILES[task])
        return train, test or default
    return given or test, test if trains else test or given


def _opener(
    values: Values, vocab_is_fixed: bool, path: str
) -> tuple[Callable[[str], TextSource], Values]:
    """Returns a function that opens rows of the task, and the values with the vocabulary's size."""
    length, vocabulary = values["max_seq_length"], values["vocab_file"]
    if values["task"] == "pretrain":
        if not vocab_is_fixed and (size := known_vocab_size(path)):
            values = values.filled({"vocab_size": size})
        options = {n: values[n] for n in ("vocab_size", "unknown_id", "verify_data", "allow_links")}
        for name in ("max_seq_length", "max_predictions_per_seq"):
            if name in values.given:  # else those of the files
                options[name] = values[name]
        return partial(PretrainingDataset, **options), values
    if not vocabulary:
        raise ValueError(f"--task {values['task']} needs --vocab_file, a WordPiece vocabulary")
    known = values["vocab_size"] if vocab_is_fixed else None
    tokenizer = Tokenizer(vocabulary, values["lower_case"], vocab_size=known)
    if not vocab_is_fixed:
        values = values.filled({"vocab_size": tokenizer.vocab_size})
    if values["task"] == "mrpc":
        return lambda path: SentencePairs(path, tokenizer, length), values
    sizes = (length, values["doc_stride"], values["max_query_length"])
    return lambda path: SquadFeatures(read_squad(path), tokenizer, *sizes), values


def made_up(values: Values, rows: int) -> "GeneratedText":
    """Returns rows of random tokens for the task of the flags."""
    return GeneratedText(
        values["task"],
        rows,
        length=values["max_seq_length"],
        vocab_size=values["vocab_size"],
        max_predictions=values["max_predictions_per_seq"],
        seed=values["seed"],
    )


class GeneratedText:
    """Rows of random tokens without padding, made once, which are copied when they are read.

    Args:
        task: "pretrain" has masked tokens and next-sentence labels, "squad" spans, "mrpc" labels.
        num_samples: number of rows; beyond 1,024, row i repeats row i modulo 1,024.
        length: tokens of a row, at least 8.
        vocab_size: ids are in [1, vocab_size).
        max_predictions: masked tokens of each row, at least 1; at most half of the tokens are.
        seed: seed of all random numbers.
    """

    def __init__(
        self,
        task: str,
        num_samples: int,
        *,
        length: int = 128,
        vocab_size: int = 30522,
        max_predictions: int = 20,
        seed: int = 0,
    ) -> None:
        sizes = {"synthetic_dataset_num_entries": (num_samples, 1), "max_seq_length": (length, 8)}
        sizes |= {"vocab_size": (vocab_size, 2), "max_predictions_per_seq": (max_predictions, 1)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"--{name} {value}: expected {least} or more")
        self.num_samples, self.length = num_samples, length
        random = np.random.default_rng(seed)
        made = min(num_samples, _MOST)
        ids = random.integers(1, vocab_size, (made, length), np.int32)
        own = np.full(made, length)
        segments = np.arange(length) >= random.integers(2, own - 1)[:, None]
        others: dict[str, np.ndarray] = {}
        if task == "squad":
            others["spans"] = np.sort(random.integers(0, own[:, None], (made, 2)), axis=1)
        else:
            others["labels"] = random.integers(0, 2, made)
        self.lengths, self.num_masked = np.full(num_samples, length), None
        if task == "pretrain":
            masked = min(max_predictions, length // 2)
            self.num_masked = np.full(num_samples, masked)
            inner = random.random((made, length))
            inner[:, [0, -1]] = 2
            places = np.sort(np.argsort(inner, axis=1)[:, :masked], axis=1)
            tokens = random.integers(1, vocab_size, (made, max_predictions), np.int32)
            tokens[:, masked:] = NO_TOKEN
            unused = ((0, 0), (0, max_predictions - masked))
            others |= {"masked_positions": np.pad(places, unused).astype(np.int32)}
            others |= {"masked_ids": tokens}
        rows = (ids, segments.astype(np.int8), own.astype(np.int32))
        self._batch = TextBatch.of(np.arange(made), *rows, **others)

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        made = torch.from_numpy(rows % len(self._batch.ids))
        numbers = torch.from_numpy(np.asarray(rows, np.int64))
        return self._batch.map(lambda tensor: tensor[made])._replace(indices=numbers)
