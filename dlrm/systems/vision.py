"""The rows of image networks: Gaudi (source 000), DLPerf (002) and Graphcore IPUs (003).

Pipelines of IPUs are parts of one process here, so a row has a process for each replica. Where the
commands of a source and their headings differ, "as printed" is the command, and a row that ends in
"as-titled" the heading.
"""

from dataclasses import replace

from dlrm.systems.rows import System, by_id

_IPU_IGNORED = (
    "--available-memory-proportion, --internal-exchange-optimisation-target, --max-copy-merge-size,"
    " --enable-conv-dithering, --no-outlining: memory and exchange of an IPU",
    "--vipu-*, --mpi-*: partitions of IPUs; torchrun starts the processes",
    "--enable-half-partials: no such accumulators for convolutions in torch",
    "--stable-norm: statistics of norms are always float32 here",
)
_TRAIN = ("--mode=train",)
_BENCHMARK = ("--no_validation", "--ckpts_per_epoch=0")


def _gaudi() -> list[System]:
    base = (*_TRAIN, "--model=resnet50", "--recipe=gaudi")
    bf16_graph = (*base, "--precision=bf16", "--execution=graph", "--batch_size=256")

    def row(number: int, name: str, flags: tuple[str, ...], published: str, **more) -> System:
        return System(f"gaudi/rn50/{name}", f"000 A{number}", "cnn", flags, published, **more)

    return [
        row(1, "graph-bf16-b256", bf16_graph, "679 images/s"),
        row(
            2,
            "graph-fp32",
            (*base, "--precision=fp32", "--execution=graph", "--batch_size=128"),
            "supported",
            notes="batch not stated; 128 is upstream's default",
        ),
        row(3, "eager-bf16-b256", (*base, "--precision=bf16", "--batch_size=256"), "supported"),
        row(4, "eager-fp32-b128", (*base, "--precision=fp32", "--batch_size=128"), "supported"),
        row(
            5,
            "top1-from-epoch80",
            (*bf16_graph, "--start_epoch=80", "--epochs=90", "--test_batch_size=32"),
            "top-1 75.85 %",
            notes="--load_checkpoint_path names the checkpoint of epoch 80",
        ),
        row(
            6,
            "scale8",
            (*bf16_graph, "--lr=0.8", "--lr_warmup=4", "--lr_drops=30,60,80"),
            "88.5 % of 8 times one device",
            processes=8,
            notes="upstream's rates rise by epoch, 0.275 to 0.8 in four, here by step",
        ),
    ]


def _dlperf() -> list[System]:
    published = {
        ("fp32-b128", "4n32d"): "OneFlow 11711.2, TF1 9496.91, Paddle 9330.94, TF2 9418.44 images/s"
    }
    variants = {
        "fp32-b128": ("--precision=fp32", "--batch_size=128"),
        "fp32-xla-b128": ("--precision=fp32", "--batch_size=128", "--execution=graph"),
        "amp-b256": ("--precision=fp16", "--batch_size=256"),
        "amp-xla-b256": ("--precision=fp16", "--batch_size=256", "--execution=graph"),
    }
    grid = {"1n1d": (1, 1), "1n8d": (1, 8), "2n16d": (2, 16), "4n32d": (4, 32)}
    return [
        System(
            f"dlperf/rn50/{variant}/{label}",
            "002 B",
            "cnn",
            ("--mode=benchmark_training", "--model=resnet50", "--recipe=dlperf", *flags),
            published.get((variant, label)),
            processes=processes,
            nodes=nodes,
        )
        for variant, flags in variants.items()
        for label, (nodes, processes) in grid.items()
    ]


def _ipu_training() -> list[System]:
    rows: list[System] = []

    def row(number: str, name: str, flags: tuple[str, ...], replicas: int, notes: str = "") -> None:
        flags = (*_TRAIN, *flags, f"--replicas={replicas}", "--recipe=graphcore", "--recompute")
        printed = System(
            f"ipu/{name}",
            f"003 C{number}",
            "cnn",
            flags,
            processes=replicas,
            notes=notes,
            ignored=_IPU_IGNORED,
        )
        rows.extend((printed, _to_the_end(printed)))

    io = ("--normalise_input", "--io=uint8")
    rn50 = (
        *("--model=resnet50", "--norm=batch", "--batch_size=16", "--precision=16.32", *io),
        *("--pipeline_splits=b1/2/relu,b2/3/relu,b3/3/relu", *_BENCHMARK),
    )
    stepped = ("--lr_schedule=stepped", "--base_lr_exp=-11", "--lr_warmup=0", "--label_smoothing=0")
    defaults = "no schedule is printed: the defaults, 8.0 in steps, are for throughput only"
    for number, name, accumulation, replicas in (("1", "m2000", 1024, 1), ("2", "pod16", 256, 4)):
        length = (f"--gradient_accumulation_steps={accumulation}", "--epochs=1")
        row(number, f"rn50/train-{name}", (*rn50, *stepped, *length), replicas, defaults)
    cosine = ("--base_lr_exp=-13", "--gradient_accumulation_steps=64", "--epochs=10")
    row("3", "rn50/train-pod64", (*rn50, *cosine), 16)

    rnx101 = (
        *("--model=resnext101_32x4d", "--norm=group", "--groups=32", "--batch_size=6"),
        *("--precision=16.16", *io, "--pipeline_splits=b3/3/relu", "--epochs=2", *_BENCHMARK),
    )
    for number, name, accumulation, replicas in (("4", "m2000", 64, 2), ("5", "pod16", 16, 8)):
        row(
            number,
            f"rnx101/train-{name}",
            (*rnx101, f"--gradient_accumulation_steps={accumulation}"),
            replicas,
        )

    effb4 = (
        *("--model=efficientnet_b4", "--norm=group", "--groups=4", "--image_size=380"),
        *("--precision=16.32", *io, "--weight_avg_exp=0.97", *_BENCHMARK),
        *("--cutmix_lambda=0.85", "--mixup_alpha=0.2", "--save_checkpoint_path=checkpoints"),
    )
    g16 = (
        *(*effb4, "--group_dim=16", "--expand_ratio=4", "--batch_size=5"),
        "--pipeline_splits=block2c,block4c,block6a",
    )
    g1 = (
        *(*effb4, "--group_dim=1", "--expand_ratio=6", "--batch_size=3"),
        "--pipeline_splits=block2b,block4b,block6c",
    )
    printed = "the heading says group dim 1, the command 16 and expand ratio 4"
    for number, name, network, accumulation, replicas, epochs, notes in (
        ("6", "effb4-g1/train-m2000", g16, 40, 1, 2, printed),
        ("6'", "effb4-g1/train-m2000-as-titled", g1, 64, 1, 2, ""),
        ("7", "effb4-g1/train-pod16", g16, 40, 4, 1, printed),
        ("7'", "effb4-g1/train-pod16-as-titled", g1, 64, 4, 1, ""),
        ("8", "effb4-g1/train-pod64", g1, 16, 16, 10, ""),
        ("9", "effb4-g16/train-m2000", g16, 160, 1, 2, ""),
        ("10", "effb4-g16/train-pod16", g16, 40, 4, 1, ""),
        ("11", "effb4-g16/train-pod64", g16, 8, 16, 10, ""),
    ):
        length = (f"--gradient_accumulation_steps={accumulation}", f"--epochs={epochs}")
        row(number, name, (*network, *length), replicas, notes)
    return rows


def _to_the_end(row: System) -> System:
    """A training as the source has it for results: all epochs, and a checkpoint after each."""
    left = [f for f in row.flags if not f.startswith("--epochs=") and f not in _BENCHMARK]
    flags = (*left, "--ckpts_per_epoch=1", "--save_checkpoint_path=checkpoints")
    return replace(row, id=f"{row.id}/full", source=f"{row.source} and C12", flags=flags)


def _ipu_inference() -> list[System]:
    rows = [
        System(
            "ipu/cnn/validate-checkpoints",
            "003 C13",
            "cnn",
            ("--mode=validate", "--recipe=graphcore", "--restore_path=checkpoints"),
            ignored=_IPU_IGNORED,
            notes="of any model; the checkpoints know theirs",
        )
    ]
    networks = {
        "rn50": ("resnet50", (1, 4, 16, 32, 64, 90), (1, 4, 16, 32, 64, 80)),
        "rnx101": ("resnext101_32x4d", (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        "effb0": ("efficientnet_b0", (1, 8, 16, 32), (1, 8, 16, 32)),
    }
    number = 14
    for data, end, processes in (("synthetic", "synthetic", 1), ("generated", "generated-x4", 4)):
        for name, (model, synthetic, generated) in networks.items():
            for size in synthetic if data == "synthetic" else generated:
                flags = (
                    *("--mode=benchmark_inference", f"--model={model}", "--recipe=graphcore"),
                    *("--norm=batch", f"--batch_size={size}", "--precision=16.16"),
                    *("--repeat=10", f"--data={data}", "--io=uint8"),
                )
                rows.append(
                    System(
                        f"ipu/{name}/infer-{end}/b{size}",
                        f"003 C{number}",
                        "cnn",
                        flags,
                        processes=processes,
                        data=None,
                        ignored=_IPU_IGNORED,
                        notes="the sum over the processes" if processes > 1 else "",
                    )
                )
                number += 1
    assert number == 44
    return rows


VISION = by_id([*_gaudi(), *_dlperf(), *_ipu_training(), *_ipu_inference()])
