"""The rows of source 002: DLPerf's ResNet-50 and BERT-base, on 1 to 32 GPUs.

XLA is `--execution graph` here and AMP `--precision fp16`, which is bf16 on a CPU. The document's
columns of PyTorch and MXNet hold placeholders, so a row compares with the other frameworks.
"""

from dlrm.published.documents.benchmark_row import BenchmarkRow, Figure, by_id

GRID = {"1n1d": (1, 1), "1n8d": (1, 8), "2n16d": (2, 16), "4n32d": (4, 32)}
_HARDWARE = {
    1: "one V100-SXM2-16GB",
    8: "8 V100-SXM2-16GB",
    16: "2 nodes of 8 V100-SXM2-16GB",
    32: "4 nodes of 8 V100-SXM2-16GB",
}
_LINKED = "the figures are of the reports that the document links; it prints 4n32d only"
_XLA = "XLA: torch.compile takes its place"

# Throughput at each place of the grid. The document prints the last, 4n32d, and leaves what is None
# to the reports that it links, of the same frameworks and batches (DLPerf, commit 13a14f8).
_RESNET50: dict[str, tuple[float | None, ...]] = {
    "OneFlow": (384.9, 2969.5, 5906.6, 11711.2),
    "TensorFlow 1.x": (362.44, 2721.98, 5099.42, 9496.91),
    "PaddlePaddle": (352.72, 2625.38, 4895.27, 9330.94),
    "TensorFlow 2.x": (None, None, None, 9418.44),
}
_BERT_MAX: dict[str, tuple[float | None, ...]] = {
    "OneFlow (bsz=96)": (149.8, 1158.5, 2257.7, 4456.0),
    "TensorFlow 1.x (bsz=48)": (112.56, 867.72, 1376.44, 2478.59),
    "PaddlePaddle (bsz=96)": (136.97, 868.6, 1631.36, 3167.68),
}
_BERT_32: dict[str, tuple[float | None, ...]] = {
    "OneFlow": (145.2, 1043.0, 1890.3, 3715.1),
    "TensorFlow 1.x": (106.8, 806.56, 1090.2, 1923.68),
    "PaddlePaddle": (132.64, 615.12, 1116.02, 2073.6),
}
_PUBLISHED: dict[str, dict[str, tuple[float | None, ...]]] = {
    "rn50/fp32-b128": _RESNET50,
    "bert-base/fp32-bmax": _BERT_MAX,
    "bert-base/fp32-b32": _BERT_32,
}
_RESNET50_VARIANTS = {
    "fp32-b128": ("--precision=fp32", "--batch_size=128"),
    "fp32-xla-b128": ("--precision=fp32", "--batch_size=128", "--execution=graph"),
    "amp-b256": ("--precision=fp16", "--batch_size=256"),
    "amp-xla-b256": ("--precision=fp16", "--batch_size=256", "--execution=graph"),
}
_BERT_VARIANTS = {
    "fp32-bmax": ("--precision=fp32", "--batch_size=max"),
    "fp32-b32": ("--precision=fp32", "--batch_size=32"),
    "fp32-xla": ("--precision=fp32", "--batch_size=32", "--execution=graph"),
    "amp": ("--precision=fp16", "--batch_size=64"),
    "amp-xla": ("--precision=fp16", "--batch_size=64", "--execution=graph"),
}
_RESNET50_FLAGS = ("--mode=benchmark_training", "--model=resnet50", "--recipe=dlperf")
_BERT_FLAGS = (
    *("--mode=pretrain", "--recipe=dlperf", "--size=base", "--phase=1", "--optimizer=adamw"),
    *("--max_seq_length=128", "--max_predictions_per_seq=20"),
)


def _rows(system: str, command: str, variant: str, flags: tuple[str, ...]) -> list[BenchmarkRow]:
    name, images = f"{system}/{variant}", command == "cnn"
    unit = "images/sec" if images else "sequence/sec"
    title = "ResNet50-V1.5 Training Performance" if images else "BERT base Pretraining Performance"
    batch = next(f for f in flags if f.startswith("--batch_size=")).partition("=")[2]
    column = f"{'AMP' if 'amp' in variant else 'FP32'}{' XLA' if 'xla' in variant else ''}"
    differences = (_XLA,) if "xla" in variant else ()
    notes = []
    if name not in _PUBLISHED:
        notes.append("the document's cells for it say TODO")
        if "amp" in variant or not images:
            notes.append("the batch is not stated; it is that of DLPerf's later reports")
    elif batch == "max":
        notes.append("the most that fit in 16 GB were 96 sequences, and 48 for TensorFlow")
    rows = []
    for place, (label, (nodes, devices)) in enumerate(GRID.items()):
        figures = tuple(
            Figure(value, unit, system=framework)
            for framework, values in _PUBLISHED.get(name, {}).items()
            if (value := values[place]) is not None
        )
        rows.append(
            BenchmarkRow(
                id=f"dlperf/{name}/{label}",
                source=f"002 B {column}",
                command=command,
                flags=flags,
                quotation=f"{title} {unit}, {column}, bsz={batch}",
                rule="dlperf",
                published=figures,
                hardware=_HARDWARE[devices],
                processes=devices,
                nodes=nodes,
                data="imagenet" if images else "wikipedia",
                notes="; ".join([*notes, *((_LINKED,) if figures and label != "4n32d" else ())]),
                approximated=differences,
            )
        )
    return rows


ROWS = by_id(
    [
        *(
            row
            for variant, flags in _RESNET50_VARIANTS.items()
            for row in _rows("rn50", "cnn", variant, (*_RESNET50_FLAGS, *flags))
        ),
        *(
            row
            for variant, flags in _BERT_VARIANTS.items()
            for row in _rows("bert-base", "bert", variant, (*_BERT_FLAGS, *flags))
        ),
    ]
)
