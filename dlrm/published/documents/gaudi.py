"""The rows of source 000: Habana's models for Gaudi.

The document describes configurations in prose; commands and omitted settings are those of the
programs that it describes.
"""

from dataclasses import replace
from typing import Any

from dlrm.published.documents.benchmark_row import BenchmarkRow, Figure, by_id

_GAUDI = "one Gaudi"
_HLS = "8 Gaudis (one HLS)"
_GRAPH = "graph mode: the document's is TorchScript, ours torch.compile (--graph_backend trace)"
_BF16 = "bf16: torch keeps softmax and norms in float32, Habana's list of operators does not"
# Habana's medium configuration: 10,000 batches of fresh random samples, and Meta's initial weights.
_MEDIUM = (
    *("--dataset_type=synthetic_random", "--num_numerical_features=1024"),
    *("--synthetic_dataset_table_sizes=3000000", "--synthetic_dataset_hotness=38"),
    *("--synthetic_dataset_num_entries=5120000", "--batch_size=512", "--test_batch_size=512"),
    *("--embedding_dim=64", "--pooling=sum", "--bottom_mlp_sizes=1024,1024,64"),
    *("--interaction_op=cat", "--top_mlp_sizes=4096,4096,4096,4096,4096,4096,4096,1"),
    *("--output_init=normal", "--embedding_optimizer=adagrad", "--mlp_optimizer=adagrad"),
    *("--lr=1e-5", "--warmup_steps=0", "--decay_steps=0", "--max_steps=10000", "--print_freq=50"),
)


def _images(value: float) -> tuple[Figure, ...]:
    return (Figure(value, "images/sec"),)


def _sequences(value: float, accuracy: float | None = None) -> tuple[Figure, ...]:
    more = (Figure(accuracy, "%", "accuracy"),) if accuracy else ()
    return (Figure(value, "sent/sec"), *more)


def _differences(flags: tuple[str, ...]) -> tuple[str, ...]:
    graph, bf16 = "--execution=graph" in flags, "--precision=bf16" in flags
    return (*((_GRAPH,) if graph else ()), *((_BF16,) if bf16 else ()))


def _row(name: str, number: int, command: str, flags: tuple[str, ...], **more: Any) -> BenchmarkRow:
    return BenchmarkRow(
        **{"hardware": _GAUDI, "rule": "gaudi", "approximated": _differences(flags)}
        | more
        | {"id": f"gaudi/{name}", "source": f"000 A{number}", "command": command, "flags": flags}
    )


def _resnet() -> list[BenchmarkRow]:
    base = ("--mode=train", "--model=resnet50", "--recipe=gaudi")
    bf16 = (*base, "--precision=bf16", "--batch_size=256")
    graph = (*base, "--precision=bf16", "--execution=graph", "--batch_size=256")
    modes = "Graph mode is supported in FP32 and BF16."
    eager = (
        "Eager mode is supported for BS 256 with BF16 mixed precision and BS128 with FP32 data type"
    )
    speed = "Single node performance for BS 256, BF16 mixed precision is 679 images/sec."
    top1 = (
        "Top1 accuracy is measured as 75.85% (starting from 80th epoch, Train BS 256 & Test BS 32, "
        "BF16 Mixed precision)"
    )
    fp32 = (*base, "--precision=fp32", "--execution=graph", "--batch_size=128")
    return [
        _row("rn50/graph-bf16-b256", 1, "cnn", graph, quotation=speed, published=_images(679)),
        _row(
            "rn50/graph-fp32",
            2,
            "cnn",
            fp32,
            quotation=modes,
            notes="the batch is not stated; 128 is the default of Habana's program",
        ),
        _row("rn50/eager-bf16-b256", 3, "cnn", bf16, quotation=eager),
        _row(
            "rn50/eager-fp32-b128",
            4,
            "cnn",
            (*base, "--precision=fp32", "--batch_size=128"),
            quotation=eager,
        ),
        _row(
            "rn50/top1-from-epoch80",
            5,
            "cnn",
            (*graph, "--start_epoch=80", "--epochs=90", "--test_batch_size=32"),
            quotation=top1,
            published=(Figure(75.85, "%", "accuracy"),),
            rule="result",
            notes="--load_checkpoint_path names the checkpoint of epoch 80",
        ),
        _row(
            "rn50/scale8",
            6,
            "cnn",
            (*graph, "--lr=0.8", "--lr_warmup=4", "--lr_drops=30,60,80"),
            quotation="Scaling with ResNet50 scale-out training is measured as 88.5% on 8 Gaudis",
            hardware=_HLS,
            processes=8,
            notes="Habana's rates rise by epoch, 0.275 to 0.8 in four, here by step; "
            "gaudi/scale8/rn50-graph-bf16-b256 measures the efficiency",
        ),
    ]


def _dlrm() -> list[BenchmarkRow]:
    lazy = (
        "Lazy mode: Supports Medium configuration with Adagrad optimizer for FP32 and BF16 mixed "
        "precision."
    )
    speed = (
        "Performance for medium configuration, measured as 36957 queries/sec, with random data, "
        "BS 512 and BF16 mixed precision configuration."
    )
    eager = "Eager mode: Medium configuration for FP32 and BF16 is supported."

    def row(number: int, name: str, quotation: str, **more: Any) -> BenchmarkRow:
        mode, precision = name.split("-")[:2]
        flags = (*("--mode=train", *_MEDIUM, f"--precision={precision}", f"--execution={mode}"),)
        lazy_here = (
            "lazy mode: the document's backend is Gaudi's; here --execution lazy runs as graph"
        )
        return _row(
            f"dlrm-medium/{name}",
            number,
            "main",
            flags,
            quotation=quotation,
            data=None,
            approximated=(*((lazy_here,) if mode == "lazy" else ()), *_differences(flags)),
            **more,
        )

    rows = [
        row(7, "lazy-fp32", lazy),
        row(8, "lazy-bf16-b512", speed, published=(Figure(36957, "queries/sec"),)),
        row(9, "eager-fp32", eager),
        row(10, "eager-bf16", eager),
    ]
    lazy_bf16 = by_id(rows)["gaudi/dlrm-medium/lazy-bf16-b512"]
    compared = replace(
        lazy_bf16,
        id="gaudi/dlrm-medium/trend",
        source="000 A11",
        quotation="DLRM Medium configuration accuracy and loss trend matches GPU.",
        published=(),
        measure="trend",
        of=lazy_bf16.id,
        against="gaudi/dlrm-medium/eager-fp32",
        notes="targets are random numbers, so only the loss can be compared",
    )
    return [*rows, compared]


def _fine_tuning() -> list[BenchmarkRow]:
    squad = ("--task=squad", "--max_seq_length=384", "--doc_stride=128", "--epochs=2", "--lr=3e-5")
    mrpc = ("--task=mrpc", "--max_seq_length=128", "--epochs=3")
    upstream = "the batch is not stated; it is that of Habana's program"
    exact = "the accuracy is not named; its size is that of exact match"
    base = "BERT base is supported on both MRPC and SQuAD dataset using FP32 data type."
    large = "BERT Large is supported on both MRPC and SQuAD dataset using FP32 data type."
    fp32 = "BERT Large supports SQuAD dataset with FP32 configurations for BS10, BS12 and SL 384."
    bf16 = "For BF16 mixed precision, supported configurations are BS16, BS24 and SL 384."
    fp32_speed = "The performance for FP32, BS10, SL384 is 11.8 sent/sec"
    bf16_speed = "The performance for BF16 mixed precision, BS24, SL384 is 30.2 sent/sec"
    mrpc_graph = "MRPC dataset is supported for FP32, BS32 and SL 128."
    mrpc_base, mrpc_large = (*mrpc, "--lr=2e-5"), (*mrpc, "--lr=3e-5")
    rows: list[tuple[int, str, tuple[str, ...], int, str, tuple[Figure, ...], str]] = [
        (12, "base/mrpc-eager-fp32", mrpc_base, 64, base, (), upstream),
        (13, "base/squad-eager-fp32", squad, 12, base, (), upstream),
        (14, "large/squad-graph-fp32-b10", squad, 10, fp32_speed, _sequences(11.8, 86.6), exact),
        (15, "large/squad-graph-fp32-b12", squad, 12, fp32, (), ""),
        (16, "large/squad-graph-bf16-b16", squad, 16, bf16, (), ""),
        (17, "large/squad-graph-bf16-b24", squad, 24, bf16_speed, _sequences(30.2, 87.5), exact),
        (18, "large/mrpc-graph-fp32-b32", mrpc_large, 32, mrpc_graph, (), ""),
        (19, "large/mrpc-eager-fp32", mrpc_large, 32, large, (), upstream),
        (20, "large/squad-eager-fp32", squad, 10, large, (), upstream),
    ]
    whole_word = "--init_checkpoint names the weights trained with whole-word masking"
    return [
        _row(
            f"bert-{name}",
            number,
            "bert",
            (
                *("--mode=finetune", "--recipe=gaudi", f"--size={name.partition('/')[0]}"),
                *(*flags, f"--batch_size={batch}"),
                f"--precision={'bf16' if 'bf16' in name else 'fp32'}",
                f"--execution={'graph' if 'graph' in name else 'eager'}",
            ),
            quotation=quotation,
            published=published,
            data="squad" if "squad" in name else "mrpc",
            notes="; ".join(n for n in (notes, whole_word if "large" in name else "") if n),
        )
        for number, name, flags, batch, quotation, published, notes in rows
    ]


def _pretraining() -> list[BenchmarkRow]:
    lengths = {
        1: ("--max_seq_length=128", "--max_predictions_per_seq=20"),
        2: ("--max_seq_length=512", "--max_predictions_per_seq=80"),
    }
    curves = {
        1: ("--lr=6e-3", "--lr_warmup=0.2843", "--total_steps=7038"),
        2: ("--lr=4e-3", "--lr_warmup=0.128", "--total_steps=1563"),
    }
    fp32 = "For FP32, per chip BS32 and SL128 for phase 1 and BS4, SL512 for phase 2 are supported."
    fp32 += " The performance is 43 sps for phase 1 and 8.5 sps for phase 2."
    bf16 = "For BF16 mixed precision, per chip BS64 and SL128 for phase 1 and BS8, SL512 for phase"
    bf16 += " 2 are supported. The performance is 109.4 sent/sec for phase 1 and 20 sent/sec for"
    bf16 += " phase 2."
    variants = (  # phase, precision, micro-batch, its number in a step, figure
        (1, "fp32", 32, 256, Figure(43, "sps")),
        (2, "fp32", 4, 1024, Figure(8.5, "sps")),
        (1, "bf16", 64, 128, Figure(109.4, "sent/sec")),
        (2, "bf16", 8, 512, Figure(20, "sent/sec")),
    )
    rows: list[BenchmarkRow] = []
    for phase, precision, batch, accumulation, published in variants:
        for corpus in ("wiki", "bookwiki"):
            flags = (
                *("--mode=pretrain", "--recipe=gaudi", "--size=large", f"--phase={phase}"),
                *(f"--precision={precision}", "--execution=graph", f"--batch_size={batch}"),
                *(f"--gradient_accumulation_steps={accumulation}", *lengths[phase]),
                *("--optimizer=lamb", *curves[phase]),
            )
            start = "--load_checkpoint_path names phase 1's last checkpoint" if phase == 2 else ""
            rows.append(
                _row(
                    f"bert-large/pretrain-p{phase}-{precision}-{corpus}",
                    21 + len(rows),
                    "bert",
                    flags,
                    quotation=fp32 if precision == "fp32" else bf16,
                    published=(published,),
                    rule="gaudi_pretraining",
                    data=corpus,
                    notes=start,
                )
            )
    return rows


def _scale_up(singles: dict[str, BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows that compare 8 devices with one."""
    tuning = "Scaling with BERT Large fine tuning on 8 Gaudis (single HLS) is at 86.4% for Graph"
    tuning += (
        " mode with SQuAD dataset, for BF16 mixed precision. For FP32, the scaling is at 86.6%"
    )
    training = (
        "Scaling with BERT Large pre-training on 8 Gaudis (single HLS) is at 96.4% for phase1"
    )
    training += (
        " and 85.6% for phase2 [...] for BF16 mixed precision. Corresponding scaling numbers"
    )
    training += " for FP32 [...] are 94.5% for phase1 and 87% for phase2."
    resnet = "Scaling with ResNet50 scale-out training is measured as 88.5% on 8 Gaudis (single"
    resnet += " HLS) for Graph mode, BS 256 & Mixed precision."
    rows = (
        ("bert-large-squad-graph-bf16", "bert-large/squad-graph-bf16-b24", 86.4, tuning),
        ("bert-large-squad-graph-fp32", "bert-large/squad-graph-fp32-b10", 86.6, tuning),
        ("bert-large-pretrain-p1-bf16", "bert-large/pretrain-p1-bf16-bookwiki", 96.4, training),
        ("bert-large-pretrain-p2-bf16", "bert-large/pretrain-p2-bf16-bookwiki", 85.6, training),
        ("bert-large-pretrain-p1-fp32", "bert-large/pretrain-p1-fp32-bookwiki", 94.5, training),
        ("bert-large-pretrain-p2-fp32", "bert-large/pretrain-p2-fp32-bookwiki", 87.0, training),
        ("rn50-graph-bf16-b256", "rn50/graph-bf16-b256", 88.5, resnet),
    )
    return [
        replace(
            singles[f"gaudi/{of}"],
            id=f"gaudi/scale8/{name}",
            source=f"000 A{29 + i}",
            quotation=quotation,
            published=(Figure(percent, "%", "scaling"),),
            hardware=_HLS,
            processes=8,
            measure="scaling",
            of=f"gaudi/{of}",
        )
        for i, (name, of, percent, quotation) in enumerate(rows)
    ]


_SINGLES = by_id([*_resnet(), *_dlrm(), *_fine_tuning(), *_pretraining()])
ROWS = _SINGLES | by_id(_scale_up(_SINGLES))
