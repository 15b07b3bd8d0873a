"""Measures fine-tuning of BERT-base on the CPU: our trainer beside a loop over transformers.

    python benchmarks/language.py [--data_dir MRPC --vocab_file VOCAB] [--rounds 5] [--steps 2]

Both sides classify pairs of sentences, from MRPC (`train.tsv` in --data_dir) or generated, padded
to the same length, with AdamW and clipped gradients. The plain loop is that of a careful user:
batches as tensors in memory, transformers' network with torch's attention, autocast, fused AdamW.
The sides take turns, and medians over rounds are compared. For MRPC a second line has our command's
own batches, of similar length, cut after their longest row. transformers is in the extra "peers".
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from train import StepLog
from vision import declared_operators

from dlrm.language.bert import BertConfig
from dlrm.language.loader import TextLoader, TextSource
from dlrm.language.pairs import SentencePairs
from dlrm.language.sources import GeneratedText
from dlrm.language.task import SequenceClassification
from dlrm.language.wordpiece import Tokenizer
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.optim.config import NetworkOptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.trainer import Trainer

LR, CLIP = 2e-5, 1.0
WINDOW = 8  # batches whose rows are sorted by length; a round of the second line


def ours(dtype: str, source: TextSource, batch_size: int) -> Callable[[int, bool], float]:
    """Returns what takes so many steps of the trainer, maybe cutting, and gives their seconds."""
    task = SequenceClassification(BertConfig(), precision=PrecisionConfig(amp=dtype == "bf16"))
    optimizers = task.optimizers(NetworkOptimizerConfig("adamw"))
    epochs = itertools.count()

    def run(steps: int, cut: bool) -> float:
        options = {"window": WINDOW, "cut": True} if cut else {"cut": False}
        train = TextLoader(
            source, batch_size, shuffle=True, drop_last=True, seed=next(epochs), **options
        )
        none = TextLoader(source, batch_size)
        none.num_samples = 0
        config = TrainConfig(print_freq=10**6, max_steps=steps)
        scaler = LossScaler(max_grad_norm=CLIP)
        trainer = Trainer(
            task,
            optimizers=optimizers,
            schedule=lambda step: LR,
            config=config,
            log=StepLog(),
            scaler=scaler,
        )
        began = time.perf_counter()
        trainer.fit(train, none)
        return time.perf_counter() - began

    return run


def plain(dtype: str, source: TextSource, batch_size: int) -> Callable[[int, bool], float]:
    """The same of a bare loop over transformers' network."""
    with declared_operators():  # transformers imports torchvision where there is one
        import transformers

        config = transformers.BertConfig(attn_implementation="sdpa")
        model = transformers.BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    half = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
    batches = itertools.cycle(list(_tensors(source, batch_size)))

    def run(steps: int, cut: bool) -> float:
        assert not cut
        began = time.perf_counter()
        for inputs, labels in itertools.islice(batches, steps):
            with half:
                logits = model(**inputs).logits
            F.cross_entropy(logits.float(), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return run


def _tensors(source: TextSource, batch_size: int) -> Iterator[tuple[dict, torch.Tensor]]:
    """Some batches as transformers takes them."""
    loader = TextLoader(source, batch_size, shuffle=True, drop_last=True, cut=False)
    with closing(loader.batches()) as batches:
        for batch in itertools.islice(batches, WINDOW):
            assert batch.labels is not None
            mask = torch.arange(source.length) < batch.lengths[:, None]
            inputs = {"input_ids": batch.ids.long(), "attention_mask": mask.long()}
            yield inputs | {"token_type_ids": batch.segments.long()}, batch.labels


def compare(dtype: str, source: TextSource, batch_size: int, rounds: int, steps: int) -> None:
    """Prints the medians of all sides in sequences a second, and ours as ratios."""
    mine, theirs = (make(dtype, source, batch_size) for make in (ours, plain))
    sides = {"ours": (mine, steps, False), "plain loop": (theirs, steps, False)}
    if isinstance(source, SentencePairs):
        sides["ours, cut"] = (mine, WINDOW, True)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for run in (mine, theirs):
        run(1, False)
    for _ in range(rounds):
        for side, (run, count, cut) in sides.items():
            rates[side].append(count * batch_size / run(count, cut))
    medians = {side: statistics.median(values) for side, values in rates.items()}
    for side, rate in medians.items():
        ratio = rate / medians["plain loop"]
        print(f"{dtype}  {side:<10}  {rate:6.2f} sequences/s  {ratio:.2f}x the plain loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", help="MRPC; default: random sequences")
    parser.add_argument("--vocab_file", help="WordPiece vocabulary, for --data_dir")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a round, of padded batches")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], action="append")
    options = parser.parse_args()
    if (options.data_dir is None) != (options.vocab_file is None):
        parser.error("--data_dir and --vocab_file: expected both or none")
    length, batch_size = options.max_seq_length, options.batch_size
    source: TextSource
    if options.data_dir:
        tokenizer = Tokenizer(options.vocab_file)
        source = SentencePairs(Path(options.data_dir) / "train.tsv", tokenizer, length)
    else:
        rows = batch_size * max(WINDOW, options.steps)
        source = GeneratedText("mrpc", rows, length=length)
    print(
        f"BERT-base, pairs of {source.lengths.mean():.0f} tokens, padded to {length}, batch "
        f"{batch_size}, {torch.get_num_threads()} threads"
    )
    for dtype in options.dtype or ["fp32", "bf16"]:
        compare(dtype, source, batch_size, options.rounds, options.steps)


if __name__ == "__main__":
    main()
