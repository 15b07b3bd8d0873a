"""The flags of Graphcore's CNN programs and of poprun, and their translation, as data.

The programs are train.py and validation.py of the TensorFlow CNNs in graphcore/examples, of spring
2021; defaults and named configurations are theirs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FlagValues = Mapping[str, str]  # of all flags of a command, by full name


@dataclass(frozen=True)
class Option:
    """Translation of a flag.

    Attributes:
        status: "mapped", "approximated" or "ignored".
        ours: our flags, separated by spaces, with {} for the value; or a function from all values
            to them.
        why: the difference or, without a flag of ours, the reason.
        count: values of the flag: 0 for a switch, None for any number from 1 on.
        choices: replacement of each value that the flag may have; None keeps any value.
        rough: values that are approximated although others are mapped, with the difference.
    """

    status: str
    ours: str | Callable[[FlagValues], str] = ""
    why: str = ""
    count: int | None = 1
    choices: Mapping[str, str] | None = None
    rough: Mapping[str, str] = field(default_factory=dict)


def mapped(ours: str | Callable[[FlagValues], str] = "", why: str = "", **more: Any) -> Option:
    """Returns the translation of a flag with the same meaning here."""
    return Option("mapped", ours, why, **more)


def switch(
    on: str = "", off: str = "", why: str = "", status: str = "mapped", **more: Any
) -> Option:
    """Returns the translation of a flag without a value, given or not."""
    choices = {"true": on, "false": off}
    return Option(status, "{}", why, count=0, choices=choices, **more)


def ignored(why: str, count: int | None = 1) -> Option:
    """Returns the translation of a flag without a counterpart."""
    return Option("ignored", why=why, count=count)


MEMORY = "memory, exchange and compilation of an IPU"
_PARTITION = "partitions of IPUs; torchrun starts the processes"
ALL_PARTS = "a process runs all parts, one after the other, unless `run` is given --pipeline"
SUMS = "products are summed in float32"
_SAVED = "--save_checkpoint_path=checkpoints"

POPRUN = {
    "--num-replicas": mapped(why="one process per replica"),
    "--num-instances": mapped(why="one process per replica"),
    "--ipus-per-replica": Option("approximated", why=ALL_PARTS),
    "--numa-aware": Option("approximated", why="processes are bound to no cores"),
    "--host": mapped(why="one node per host"),
    "--only-output-from-instance": mapped(why="only rank 0 prints", choices={"0": ""}),
    "-vv": Option("approximated", why="torchrun has its own log levels", count=0),
    "--vipu-server-host": ignored(_PARTITION),
    "--vipu-partition": ignored(_PARTITION),
    "--reset-partition": ignored(_PARTITION),
    "--update-partition": ignored(_PARTITION),
    "--mpi-global-args": ignored("torchrun starts the processes, and not MPI"),
    "--mpi-local-args": ignored("torchrun starts the processes, and not MPI"),
}

_MODELS = {
    ("resnet", "50"): "resnet50",
    ("resnext", "101"): "resnext101_32x4d",
    ("efficientnet", "0"): "efficientnet_b0",
    ("efficientnet", "4"): "efficientnet_b4",
}


def _model(values: FlagValues) -> str:
    asked = values["--model"], values.get("--model-size", "")
    if asked not in _MODELS:
        known = ", ".join(" ".join(pair) for pair in _MODELS)
        raise ValueError(f"--model and --model-size {' '.join(asked)}: expected one of {known}")
    return f"--model={_MODELS[asked]}"


def _checkpoints(values: FlagValues) -> str:
    count = values["--ckpts-per-epoch"]
    return f"--ckpts_per_epoch={count}" + (f" {_SAVED}" if float(count) else "")


_BOTH_CNN = {
    "--model": mapped(_model),
    "--model-size": mapped(why="--model says both"),
    "--dataset": mapped(why="the row's dataset", choices={"imagenet": ""}),
    "--data-dir": mapped(why="our --dataset is the path"),
    "--batch-size": mapped("--batch_size={}"),
    "--precision": mapped(
        "--precision={}",
        choices={precision: precision for precision in ("16.16", "16.32", "32.32")},
        rough={"16.16": "weights of norms stay float32"},
    ),
    "--image-size": mapped("--image_size={}"),
    "--group-dim": mapped("--group_dim={}"),
    "--expand-ratio": mapped("--expand_ratio={}"),
    "--batch-norm": switch("--norm=batch", "--norm=group"),
    "--groups": mapped("--groups={}"),
    "--BN-decay": mapped("--norm_momentum={}", choices={"0.97": "0.03"}),
    "--normalise-input": switch("--normalize_input", "--nonormalize_input"),
    "--eight-bit-io": switch(
        "--io=uint8",
        "--io=float32",
        rough={"false": "images travel as float32, upstream in 16 bits"},
    ),
    "--synthetic-data": switch("--data=synthetic"),
    "--generated-data": switch("--data=generated"),
    "--enable-half-partials": switch(why=SUMS, status="approximated"),
}
VALIDATION = _BOTH_CNN | {"--repeat": mapped("--repeat={}")}
TRAIN = _BOTH_CNN | {
    "--config": mapped(why="its values follow"),
    "--replicas": mapped("--replicas={}"),
    "--gradient-accumulation-count": mapped("--gradient_accumulation_steps={}"),
    "--epochs": mapped("--epochs={}"),
    "--ckpts-per-epoch": mapped(_checkpoints),
    "--no-validation": switch("--no_validation"),
    "--enable-recomputation": switch("--recompute"),
    "--optimiser": mapped(
        "--optimizer={}", choices={"SGD": "sgd", "momentum": "momentum", "RMSprop": "rmsprop_tf"}
    ),
    "--momentum": mapped("--momentum={}"),
    "--rmsprop-epsilon": mapped("--optimizer_eps={}"),
    "--weight-decay": mapped("--weight_decay={}"),
    "--loss-scaling": mapped("--loss_scale={}"),
    "--base-learning-rate": mapped("--base_lr_exp={}"),
    "--lr-schedule": mapped(
        "--lr_schedule={}", choices={name: name for name in ("stepped", "cosine", "exponential")}
    ),
    "--warmup-epochs": mapped("--lr_warmup={} --lr_warmup_unit=epochs"),
    "--label-smoothing": mapped("--label_smoothing={}"),
    "--cutmix-lambda": mapped("--cutmix_lambda={}"),
    "--cutmix-version": mapped(why="the only version here", choices={"1": ""}),
    "--mixup-alpha": mapped("--mixup_alpha={}"),
    "--weight-avg-exp": mapped(f"--weight_avg_exp={{}} {_SAVED}"),
    "--shards": Option("approximated", why=ALL_PARTS),
    "--pipeline": switch(why=ALL_PARTS, status="approximated"),
    "--pipeline-splits": mapped("--pipeline_splits={}", count=None),
    "--pipeline-schedule": Option(
        "approximated",
        "--pipeline_schedule={}",
        ALL_PARTS,
        choices={"Grouped": "gpipe", "Interleaved": "1f1b", "Sequential": "sequential"},
    ),
    "--stable-norm": switch(why="statistics of norms are always float32 here"),
    "--standard-imagenet": switch(why="the only preprocessing here"),
    "--no-dataset-cache": switch(why="files are mapped to memory"),
    "--pipeline-num-parallel": Option("approximated", why="the loader chooses its threads"),
    "--logs-per-epoch": Option("approximated", why="--print_freq counts steps"),
    "--disable-variable-offloading": switch(why="the optimizer's state stays on the device"),
    "--available-memory-proportion": ignored(MEMORY, count=None),
    "--internal-exchange-optimisation-target": ignored(MEMORY),
    "--enable-conv-dithering": ignored(MEMORY, count=0),
}

_RESNET_RATES = {"SGD": "-8", "momentum": "-11"}  # exponents of the rate of a sample
_EFFICIENTNET_RATES = {"SGD": "-7", "momentum": "-10", "RMSprop": "-14"}


def validation_defaults(given: FlagValues) -> dict[str, str]:
    """Returns the defaults of both CNN programs."""
    efficientnet = given.get("--model") == "efficientnet"
    pixels = {"4": "380"}.get(given.get("--model-size", ""), "224") if efficientnet else "224"
    found = {"--precision": "16.16", "--image-size": pixels, "--normalise-input": "false"}
    if given.get("--synthetic-data") != "true":  # whose images are not copied
        found["--eight-bit-io"] = "false"
    if given.get("--batch-norm") == "true":
        return found | {"--BN-decay": "0.97"}
    return found | {"--batch-norm": "false", "--groups": "4" if efficientnet else "32"}


def train_defaults(given: FlagValues) -> dict[str, str]:
    """Returns the defaults of train.py.

    Raises:
        ValueError: it has no rate for the optimizer.
    """
    efficientnet = given.get("--model") == "efficientnet"
    optimizer = given.get("--optimiser", "SGD")
    rates = _EFFICIENTNET_RATES if efficientnet else _RESNET_RATES
    if optimizer not in rates and "--base-learning-rate" not in given:
        raise ValueError(
            f"--optimiser {optimizer}: expected --base-learning-rate; train.py has one of its own "
            f"for {', '.join(rates)}"
        )
    found = validation_defaults(given) | {
        "--model": "resnet",
        "--replicas": "1",
        "--gradient-accumulation-count": "1",
        "--optimiser": "SGD",
        "--base-learning-rate": rates.get(optimizer, ""),
        "--lr-schedule": "stepped",
        "--warmup-epochs": "5",
        "--loss-scaling": "128",
        "--weight-decay": "1e-5" if efficientnet else "1e-4",
        "--label-smoothing": "0.1" if efficientnet else "0",
        "--cutmix-lambda": "1",
        "--mixup-alpha": "0",
        "--epochs": "350" if efficientnet else "100",
        "--ckpts-per-epoch": "1",
    }
    if optimizer != "SGD":
        found["--momentum"] = "0.9"
    if optimizer == "RMSprop":
        found["--rmsprop-epsilon"] = "0.001"
    if given.get("--pipeline") == "true":
        found["--pipeline-schedule"] = "Interleaved"
    return found


_RESNET_50 = (
    "--model resnet --model-size 50 --dataset imagenet --precision 16.32 --batch-norm "
    "--normalise-input --eight-bit-io --batch-size 16 --shards 4 --pipeline "
    "--pipeline-splits b1/2/relu b2/3/relu b3/3/relu --pipeline-schedule Grouped "
    "--pipeline-num-parallel 32 --enable-recomputation --optimiser momentum --momentum 0.9 "
    "--weight-decay 0.0001 --loss-scaling 128 --label-smoothing 0.1 --lr-schedule cosine "
    "--base-learning-rate -13 --epochs 100 --ckpts-per-epoch 1 --logs-per-epoch 1 --stable-norm "
    "--enable-half-partials --disable-variable-offloading --available-memory-proportion 0.15 "
    "--internal-exchange-optimisation-target balanced"
)
_EFFICIENTNET_B4 = (
    "--model efficientnet --model-size 4 --dataset imagenet --precision 16.32 --groups 4 "
    "--optimiser RMSprop --lr-schedule exponential --enable-recomputation --enable-conv-dithering "
    "--available-memory-proportion 0.15 --internal-exchange-optimisation-target balanced "
    "--pipeline-schedule Grouped --weight-avg-exp 0.97 --enable-half-partials --cutmix-lambda 0.85 "
    "--cutmix-version 1 --mixup-alpha 0.2 --disable-variable-offloading --shards 4 --pipeline"
)
TRAIN_CONFIGS = {
    "mk2_resnet50_bn_64ipus": f"{_RESNET_50} --replicas 16 --gradient-accumulation-count 64",
    "mk2_efficientnet_b4_g1_64ipus": f"{_EFFICIENTNET_B4} --group-dim 1 --expand-ratio 6 "
    "--batch-size 3 --pipeline-splits block2b block4b block6c --replicas 16 "
    "--gradient-accumulation-count 16",
    "mk2_efficientnet_b4_g16_64ipus": f"{_EFFICIENTNET_B4} --group-dim 16 --expand-ratio 4 "
    "--batch-size 5 --pipeline-splits block2c block4c block6a --replicas 16 "
    "--gradient-accumulation-count 8",
}
