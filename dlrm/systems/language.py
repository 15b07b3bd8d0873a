"""The rows of BERT: Gaudi (source 000), DLPerf (002) and Graphcore IPUs (004).

Pipelines of IPUs are parts of one process here, so a row has a process for each replica. Where the
commands of a source and their headings differ, "as printed" is the command, and a row that ends in
"as-titled" the heading.
"""

from dlrm.systems.rows import System, by_id

_IPU_IGNORED = (
    "--available-memory-proportion, --use-default-available-memory-proportion, --no-outlining, "
    "--max-copy-merge-size, --group-host-sync: memory and exchange of an IPU",
    "--enable-half-partials, stochastic rounding: no such sums in torch; weights of norms and "
    "moments are float32",
    "optimizer state divided over replicas, or off the device: each process has all of it",
    "--no-model-save: nothing is saved without --save_checkpoint_path",
)
_POPART = (
    *("--mode=pretrain", "--recipe=graphcore", "--data_format=popart"),
    *("--no_validation", "--print_freq=1"),
)


def _gaudi_fine_tuning() -> list[System]:
    squad = ("--task=squad", "--max_seq_length=384", "--doc_stride=128", "--epochs=2", "--lr=3e-5")
    mrpc = ("--task=mrpc", "--max_seq_length=128", "--epochs=3")
    upstream = "batch not stated; upstream's"
    exact = "the accuracy is not named; its size is that of exact match"
    whole_word = "--init_checkpoint: the weights trained with whole-word masking"

    rows = [
        (12, "base/mrpc-eager-fp32", (*mrpc, "--lr=2e-5"), 64, "supported", upstream),
        (13, "base/squad-eager-fp32", squad, 12, "supported", upstream),
        (14, "large/squad-graph-fp32-b10", squad, 10, "11.8 sequences/s, accuracy 86.6 %", exact),
        (15, "large/squad-graph-fp32-b12", squad, 12, "supported", ""),
        (16, "large/squad-graph-bf16-b16", squad, 16, "supported", ""),
        (17, "large/squad-graph-bf16-b24", squad, 24, "30.2 sequences/s, accuracy 87.5 %", exact),
        (18, "large/mrpc-graph-fp32-b32", (*mrpc, "--lr=3e-5"), 32, "supported", ""),
        (19, "large/mrpc-eager-fp32", (*mrpc, "--lr=3e-5"), 32, "supported", upstream),
        (20, "large/squad-eager-fp32", squad, 10, "supported", upstream),
    ]
    return [
        System(
            f"gaudi/bert-{name}",
            f"000 A{number}",
            "bert",
            (
                *("--mode=finetune", "--recipe=gaudi", f"--size={name.partition('/')[0]}"),
                *(*flags, f"--batch_size={batch}"),
                f"--precision={'bf16' if 'bf16' in name else 'fp32'}",
                f"--execution={'graph' if 'graph' in name else 'eager'}",
            ),
            published,
            data="squad" if "squad" in name else "mrpc",
            notes="; ".join(
                note for note in (notes, whole_word if "large" in name else "") if note
            ),
        )
        for number, name, flags, batch, published, notes in rows
    ]


def _gaudi_pretraining() -> list[System]:
    lengths = {
        1: ("--max_seq_length=128", "--max_predictions_per_seq=20"),
        2: ("--max_seq_length=512", "--max_predictions_per_seq=80"),
    }
    curves = {
        1: ("--lr=6e-3", "--lr_warmup=0.2843", "--total_steps=7038"),
        2: ("--lr=4e-3", "--lr_warmup=0.128", "--total_steps=1563"),
    }
    variants = (  # phase, precision, micro-batch, its number in a step, figure
        (1, "fp32", 32, 256, "43 sequences/s"),
        (2, "fp32", 4, 1024, "8.5 sequences/s"),
        (1, "bf16", 64, 128, "109.4 sequences/s"),
        (2, "bf16", 8, 512, "20 sequences/s"),
    )
    rows: list[System] = []
    for phase, precision, batch, accumulation, published in variants:
        for corpus in ("wiki", "bookwiki"):
            flags = (
                *("--mode=pretrain", "--recipe=gaudi", "--size=large", f"--phase={phase}"),
                *(f"--precision={precision}", "--execution=graph", f"--batch_size={batch}"),
                *(f"--gradient_accumulation_steps={accumulation}", *lengths[phase]),
                *("--optimizer=lamb", *curves[phase]),
            )
            rows.append(
                System(
                    f"gaudi/bert-large/pretrain-p{phase}-{precision}-{corpus}",
                    f"000 A{21 + len(rows)}",
                    "bert",
                    flags,
                    published,
                    data=corpus,
                    notes="--load_checkpoint_path names phase 1's last checkpoint"
                    if phase == 2
                    else "",
                )
            )
    return rows


def _dlperf() -> list[System]:
    published = {
        ("fp32-bmax", "1n1d"): "OneFlow 149.8, TF1 112.56, Paddle 136.97 sequences/s",
        ("fp32-bmax", "1n8d"): "OneFlow 1158.5, TF1 867.72, Paddle 868.6 sequences/s",
        ("fp32-bmax", "2n16d"): "OneFlow 2257.7, TF1 1376.44, Paddle 1631.36 sequences/s",
        ("fp32-bmax", "4n32d"): "OneFlow 4456.0, TF1 2478.59, Paddle 3167.68 sequences/s",
        ("fp32-b32", "1n1d"): "OneFlow 145.2, TF1 106.8, Paddle 132.64 sequences/s",
        ("fp32-b32", "1n8d"): "OneFlow 1043.0, TF1 806.56, Paddle 615.12 sequences/s",
        ("fp32-b32", "2n16d"): "OneFlow 1890.3, TF1 1090.2, Paddle 1116.02 sequences/s",
        ("fp32-b32", "4n32d"): "OneFlow 3715.1, TF1 1923.68, Paddle 2073.6 sequences/s",
    }
    variants = {
        "fp32-bmax": ("--precision=fp32", "--batch_size=max"),
        "fp32-b32": ("--precision=fp32", "--batch_size=32"),
        "fp32-xla": ("--precision=fp32", "--batch_size=32", "--execution=graph"),
        "amp": ("--precision=fp16", "--batch_size=64"),
        "amp-xla": ("--precision=fp16", "--batch_size=64", "--execution=graph"),
    }
    grid = {"1n1d": (1, 1), "1n8d": (1, 8), "2n16d": (2, 16), "4n32d": (4, 32)}
    base = (
        *("--mode=pretrain", "--recipe=dlperf", "--size=base", "--phase=1", "--optimizer=adamw"),
        *("--max_seq_length=128", "--max_predictions_per_seq=20"),
    )
    return [
        System(
            f"dlperf/bert-base/{variant}/{label}",
            "002 B",
            "bert",
            (*base, *flags),
            published.get((variant, label)),
            processes=processes,
            nodes=nodes,
            data="wikipedia",
            notes="the most that fit were 96 for OneFlow and Paddle and 48 for TF1"
            if variant == "fp32-bmax"
            else "",
        )
        for variant, flags in variants.items()
        for label, (nodes, processes) in grid.items()
    ]


def _ipu_training() -> list[System]:
    large_128, large_384 = ("large", 128, 8), ("large", 384, 2)
    base_128, base_384 = ("base", 128, 32), ("base", 384, 8)
    scale = ("--epochs=1", "--loss_scale=128")
    return [
        _ipu_row("1", "large/pretrain-128-pod16", large_128, 4),
        _ipu_row("2", "large/pretrain-128-pod64", large_128, 16),
        _ipu_row("3", "large/pretrain-384-pod16", large_384, 4),
        _ipu_row(
            "4",
            "large/pretrain-384-pod64-a",
            large_384,
            16,
            "--epochs=10",
            notes="--epochs is printed twice, 1 and 10; the last is taken",
        ),
        _ipu_row(
            "5",
            "large/pretrain-384-pod64-b",
            large_384,
            16,
            data=128,
            notes="reads rows of 128 tokens with the configuration of 384: that is an error",
        ),
        _ipu_row("5'", "large/pretrain-384-pod64-b-as-titled", large_384, 16),
        _ipu_row("6", "base/pretrain-128-pod16", base_128, 4),
        _ipu_row(
            "7",
            "base/pretrain-128-pod64",
            large_128,
            16,
            *scale,
            notes="the heading says base, the command names the large configuration",
        ),
        _ipu_row("7'", "base/pretrain-128-pod64-as-titled", base_128, 16, *scale),
        _ipu_row(
            "8",
            "base/pretrain-384-pod16",
            base_384,
            4,
            notes='the heading\'s "Phase 3" is the second of two',
        ),
    ]


def _ipu_row(
    number: str,
    name: str,
    config: tuple[str, int, int],  # size, length, micro-batch
    replicas: int,
    *flags: str,
    data: int | None = None,
    notes: str = "",
) -> System:
    size, length, micro = config
    accumulation = (65536 if length == 128 else 16384) // (micro * replicas)
    is_large = size == "large"
    return System(
        f"ipu/bert-{name}",
        f"004 D{number}",
        "bert",
        (
            *(*_POPART, f"--size={size}", f"--phase={1 if length == 128 else 2}"),
            f"--max_seq_length={length}",
            f"--max_predictions_per_seq={20 if length == 128 else 56}",
            f"--batch_size={micro}",
            f"--gradient_accumulation_steps={accumulation}",
            f"--replicas={replicas}",
            f"--layers_per_stage={'3,7,7,7' if is_large else '4,4,4'}",
            f"--encoder_start_stage={0 if is_large else 1}",
            *(flags or ("--epochs=1",)),
        ),
        processes=replicas,
        data=f"wikipedia/AA/sequence_{data or length}/wiki_00_tokenised",
        notes=notes,
        ignored=_IPU_IGNORED,
    )


def _ipu_inference() -> list[System]:
    base = (
        *("--mode=inference_benchmark", "--task=squad", "--recipe=graphcore", "--data=generated"),
        *("--max_seq_length=128", "--precision=16.16", "--batches_per_step=2048", "--repeat=10"),
    )
    printed = (
        *("--num_layers=3", "--hidden_size=768", "--num_heads=12", "--layers_per_stage=3"),
        "--latency=low",
    )
    titled = ("--size=large", "--latency=low")
    small = ("--size=base_3layer", "--layers_per_stage=3", "--latency=minimum")
    rows: list[tuple[str, int, int, tuple[str, ...], str]] = [
        *(("bert-large", n, 9 + i, printed, "") for i, n in enumerate((1, 2, 3))),
        *(("bert-large", n, 9 + i, titled, "-as-titled") for i, n in enumerate((1, 2, 3))),
        *(("bert-3layer", n, 12 + i, small, "") for i, n in enumerate((1, 2, 4, 8, 16, 32, 64))),
    ]
    return [
        System(
            f"ipu/{name}/squad-infer-128/mb{size}{end}",
            f"004 D{number}{chr(39) if end else ''}",
            "bert",
            (*base, *flags, f"--batch_size={size}"),
            data=None,
            notes="the heading says BERT-large, the command 3 layers of 768"
            if flags == printed
            else "",
            ignored=(
                *_IPU_IGNORED,
                "--host-embedding NONE, --shuffle false, --encoder-start-ipu 0: the only way here",
            ),
        )
        for name, size, number, flags, end in rows
    ]


LANGUAGE = by_id(
    [
        *_gaudi_fine_tuning(),
        *_gaudi_pretraining(),
        *_dlperf(),
        *_ipu_training(),
        *_ipu_inference(),
    ]
)
