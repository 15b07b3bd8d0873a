"""The rows of Graphcore's IPUs: image networks (source 003) and BERT (source 004).

A row's flags are the translation of the command line that the document prints. If the heading
differs, "as printed" is the command, and a row that ends in "-as-titled" the heading.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dlrm.published.documents import ipu_commands
from dlrm.published.documents.benchmark_row import BenchmarkRow, by_id
from dlrm.published.documents.ipu_commands import M2000, POD16, POD64, pretraining, squad_inference
from dlrm.published.documents.translation import translate

_PADDING = "convolutions pad both sides alike; upstream pads by TensorFlow's SAME"
_ROUNDING = "16-bit numbers are rounded to nearest; upstream rounds stochastically"
_LAST_NORMS = "the last norm of a block starts at 1; upstream at 0 in blocks without projection"


def _row(
    name: str, source: str, printed: str, meant: str | None = None, **more: Any
) -> BenchmarkRow:
    """Returns a row of a printed command, with the flags of `meant` if that differs."""
    translation = translate(meant or printed)
    return BenchmarkRow(
        id=f"ipu/{name}",
        source=source,
        command=translation.command,
        flags=translation.flags,
        processes=translation.processes,
        nodes=translation.nodes,
        data=translation.dataset,
        printed=printed,
        **more,
    )


def _to_the_end(row: BenchmarkRow, command: str) -> BenchmarkRow:
    """Returns the training of the document's results: all epochs, and a checkpoint after each."""
    command = re.sub(r" --epochs? \d+| --ckpts-per-epoch 0", "", command)
    if not command.startswith("poprun"):
        command = command.replace(" --no-validation", "")
    return replace(
        row,
        id=f"{row.id}/full",
        source=f"{row.source} and C12",
        flags=translate(command).flags,
        quotation="To use these command lines for training instead of benchmarking you need to "
        "remove the `--epochs <n>` option.",
        notes="; ".join(filter(None, (row.notes, "without the flags of a benchmark"))),
    )


def _standard(printed: str) -> str:
    """The command with the values of upstream's configuration mk2_efficientnet_b4_g1_16ipus."""
    for old, new in (
        ("--group-dim=16", "--group-dim=1"),
        ("--expand-ratio=4", "--expand-ratio=6"),
        ("--batch-size=5", "--batch-size=3"),
        ("--gradient-accumulation-count=40", "--gradient-accumulation-count=64"),
        ("block2c block4c block6a", "block2b block4b block6c"),
    ):
        assert old in printed
        printed = printed.replace(old, new)
    return printed


def _image_training(
    number: int, network: str, heading: str, printed: Mapping[str, str], notes: str = ""
) -> Iterator[BenchmarkRow]:
    """Returns the rows of a heading, one per machine: as printed, as titled if different, in full.

    `printed` has the command of each machine, and `notes` are of those that name no configuration.
    """
    resnets = (_LAST_NORMS,) if network.startswith("rn") else ()
    for index, (machine, command) in enumerate(printed.items()):
        meant = {"": command}
        if network == "effb4-g1" and machine != POD64:
            meant["-as-titled"] = _standard(command)
        for end, own in meant.items():
            row = _row(
                f"{network}/train-{machine.removeprefix('1 x IPU-').lower()}{end}",
                f"003 C{number + index}{chr(39) if end else ''}",
                command,
                own,
                quotation=f"{heading}, {machine}",
                hardware=machine,
                rule="ipu",
                notes="" if end or "--config" in command else notes,
                approximated=(_PADDING, _ROUNDING, *resnets),
            )
            yield from (row, _to_the_end(row, own))


def _image_trainings() -> Iterator[BenchmarkRow]:
    yield from _image_training(
        1,
        "rn50",
        "ResNet-50 v1.5 Training",
        ipu_commands.RESNET_50,
        "no schedule is printed: the program's, 8.0 in steps after a warm-up of five epochs, is "
        "for throughput only",
    )
    yield from _image_training(4, "rnx101", "ResNext-101 Training", ipu_commands.RESNEXT_101)
    yield from _image_training(
        6,
        "effb4-g1",
        "EfficientNet-B4 Training, Standard (Group Dim 1)",
        ipu_commands.EFFICIENTNET_B4_STANDARD,
        "the heading says group dim 1, the command 16 and expand ratio 4",
    )
    yield from _image_training(
        9,
        "effb4-g16",
        "EfficientNet-B4 Training, Modified (Group Dim 16)",
        ipu_commands.EFFICIENTNET_B4_MODIFIED,
    )


def _image_inference() -> Iterator[BenchmarkRow]:
    yield BenchmarkRow(
        id="ipu/cnn/validate-checkpoints",
        source="003 C13",
        command="cnn",
        flags=("--mode=validate", "--recipe=graphcore", "--restore_path=checkpoints"),
        quotation="If the training command line uses `poprun` then you will have to use the "
        "`validation.py` script to run validation separately.",
        rule="checkpoint",
        notes="of any model; the checkpoints know theirs",
        approximated=(_PADDING,),
    )
    networks = {  # sizes of synthetic data, and of generated
        "rn50": ("resnet --model-size 50", (1, 4, 16, 32, 64, 90), (1, 4, 16, 32, 64, 80)),
        "rnx101": ("resnext --model-size 101", (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        "effb0": ("efficientnet --model-size 0", (1, 8, 16, 32), (1, 8, 16, 32)),
    }
    number = 14
    for data, end in (("synthetic", "synthetic"), ("generated", "generated-x4")):
        for network, (model, synthetic, generated) in networks.items():
            sizes = synthetic if data == "synthetic" else generated
            for size in sizes:
                yield _row(
                    f"{network}/infer-{end}/b{size}",
                    f"003 C{number}",
                    ipu_commands.image_inference(model, size, data),
                    quotation=f"Change the --batch-size argument to be one of {_listed(sizes)}",
                    hardware="1 x IPU" if data == "synthetic" else M2000,
                    rule="ipu_inference",
                    notes="" if data == "synthetic" else "the sum over the processes",
                    approximated=(_PADDING,),
                )
                number += 1


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


_LARGE_1 = "BERT-Large Phase 1 Pre-training (Sequence length 128)"
_LARGE_2 = "BERT-Large Phase 2 Pre-training (Sequence length 384)"
_BASE_1 = "BERT-Base Phase 1 Pre-training (Sequence length 128)"
_BASE_2 = "BERT-Base Phase 3 Pre-training (Sequence length 384)"
_REST = "--no-model-save --no-validation --steps-per-log 1"
_16_REPLICAS = f"{_REST} --gradient-accumulation-factor 512 --replication-factor 16"
_SCALED = (
    "--replication-factor 16 --loss-scaling 128 --available-memory-proportion 0.15 0.2 0.2 0.2 "
)


def _bert_trainings() -> Iterator[BenchmarkRow]:
    def row(
        number: str, name: str, heading: str, machine: str, printed: str, **more
    ) -> BenchmarkRow:
        quotation = f"{heading}, {machine}"
        own = {"quotation": quotation, "hardware": machine, "rule": "ipu", **more}
        return _row(f"bert-{name}", f"004 D{number}", printed, **own)

    large = pretraining("python", "large_128", 128, after=_REST)
    yield row("1", "large/pretrain-128-pod16", _LARGE_1, POD16, large)
    large = pretraining("python3", "large_128", 128, after=_16_REPLICAS)
    yield row("2", "large/pretrain-128-pod64", _LARGE_1, POD64, large)
    longer = pretraining("python", "large_384", 384, after=_REST)
    yield row("3", "large/pretrain-384-pod16", _LARGE_2, POD16, longer)
    longer = pretraining("python3", "large_384", 384, after=f"--epochs 10 {_16_REPLICAS}")
    notes = "--epochs is printed twice, 1 and 10; the last is taken"
    yield row("4", "large/pretrain-384-pod64-a", _LARGE_2, POD64, longer, notes=notes)
    wrong = pretraining("python", "large_384", 128, "--replication-factor 16 ", _REST)
    notes = "reads rows of 128 tokens with the configuration of 384: that is an error"
    yield row("5", "large/pretrain-384-pod64-b", _LARGE_2, POD64, wrong, notes=notes)
    right = wrong.replace("sequence_128", "sequence_384")
    name = "large/pretrain-384-pod64-b-as-titled"
    yield row("5'", name, _LARGE_2, POD64, wrong, meant=right, notes="reads rows of 384 tokens")
    base = pretraining("python", "base_128", 128, after=_REST)
    yield row("6", "base/pretrain-128-pod16", _BASE_1, POD16, base)
    wrong = pretraining("python", "large_128", 128, _SCALED, _REST)
    notes = "the heading says base, the command names the large configuration"
    yield row("7", "base/pretrain-128-pod64", _BASE_1, POD64, wrong, notes=notes)
    right = wrong.replace("large_128", "base_128")
    name = "base/pretrain-128-pod64-as-titled"
    yield row("7'", name, _BASE_1, POD64, wrong, meant=right, notes="the base configuration")
    base = pretraining("python", "base_384", 384, after=_REST)
    notes = 'the heading\'s "Phase 3" is the second of two'
    yield row("8", "base/pretrain-384-pod16", _BASE_2, POD16, base, notes=notes)


_THREE_LAYERS = "--layers-per-ipu=3 --num-layers=3 --hidden-size=768 --attention-heads=12"
_LARGE = "--layers-per-ipu=24 --num-layers=24 --hidden-size=1024 --attention-heads=16"


def _bert_inference() -> Iterator[BenchmarkRow]:
    printed_note = "the heading says BERT-large, the command 3 layers of 768"
    for name, first, sizes, low_latency, variants in (
        ("large", 9, (1, 2, 3), True, {"": printed_note, "-as-titled": "24 layers of 1024"}),
        ("3layer", 12, (1, 2, 4, 8, 16, 32, 64), False, {"": ""}),
    ):
        for end, notes in variants.items():
            for number, size in enumerate(sizes, first):
                printed = squad_inference(size, low_latency)
                assert _THREE_LAYERS in printed
                yield _row(
                    f"bert-{name}/squad-infer-128/mb{size}{end}",
                    f"004 D{number}{chr(39) if end else ''}",
                    printed,
                    printed.replace(_THREE_LAYERS, _LARGE) if end else printed,
                    quotation="Change the --micro-batch-size argument to be one of "
                    f"{_listed(sizes)}",
                    hardware="1 x IPU",
                    rule="ipu_inference",
                    notes=notes,
                )


ROWS = by_id([*_image_trainings(), *_image_inference(), *_bert_trainings(), *_bert_inference()])
