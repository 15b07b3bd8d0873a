"""The flags of Graphcore's bert.py and their translation, as data.

The program is that of PopART in graphcore/examples, of spring 2021; defaults and named
configurations are its.
"""

from dlrm.published.documents.ipu_flags import (
    ALL_PARTS,
    MEMORY,
    SUMS,
    FlagValues,
    Option,
    ignored,
    mapped,
    switch,
)

_SIZES = {
    ("3", "768", "12"): "base_3layer",
    ("12", "768", "12"): "base",
    ("24", "1024", "16"): "large",
}


def _task(values: FlagValues) -> str:
    if values["--task"] == "PRETRAINING":
        return "--mode=pretrain --data_format=popart"
    return "--mode=inference_benchmark --task=squad"


def _size(values: FlagValues) -> str:
    names = ("--num-layers", "--hidden-size", "--attention-heads")
    asked = tuple(values[name] for name in names)
    if asked in _SIZES:
        return f"--size={_SIZES[asked]}"
    inner = 4 * int(asked[1])
    return "--num_layers={} --hidden_size={} --num_heads={} ".format(*asked) + (
        f"--intermediate_size={inner}"
    )


def _length(values: FlagValues) -> str:
    length = values["--sequence-length"]
    phase = f" --phase={1 if length == '128' else 2}" if values["--task"] == "PRETRAINING" else ""
    return f"--max_seq_length={length}{phase}"


def _layers(values: FlagValues) -> str:
    parts = values["--layers-per-ipu"].split()
    if len(parts) == 1:  # so many on each
        parts *= max(1, int(values["--num-layers"]) // int(parts[0]))
    return f"--layers_per_stage={','.join(parts)}"


def _accumulation(values: FlagValues) -> str:
    """Returns the given factor, or the one that yields the global batch."""
    if "--gradient-accumulation-factor" in values:
        return f"--gradient_accumulation_steps={values['--gradient-accumulation-factor']}"
    whole = int(values["--global-batch-size"])
    part = int(values["--micro-batch-size"]) * int(values["--replication-factor"])
    if whole % part:
        raise ValueError(
            f"--global-batch-size {whole}: expected a multiple of {part}, --micro-batch-size times "
            "--replication-factor"
        )
    return f"--gradient_accumulation_steps={whole // part}"


_ONE_BY_ONE = "batches are read ahead and timed one by one"
_NOTHING_AHEAD = "nothing is read ahead, and reading is timed, too"

BERT = {
    "--config": mapped(why="its values follow"),
    "--task": mapped(_task, choices={"PRETRAINING": "", "SQUAD": ""}),
    "--inference": switch(why="--mode"),
    "--num-layers": mapped(_size),
    "--hidden-size": mapped(_size),
    "--attention-heads": mapped(_size),
    "--layers-per-ipu": Option("approximated", _layers, ALL_PARTS, count=None),
    "--encoder-start-ipu": Option(
        "approximated", "--encoder_start_stage={}", ALL_PARTS, choices={"0": "0", "1": "1"}
    ),
    "--sequence-length": mapped(_length),
    "--mask-tokens": mapped("--max_predictions_per_seq={}"),
    "--vocab-length": mapped("--vocab_size={}"),
    "--dtype": mapped(
        "--precision={}",
        choices={"FLOAT16": "16.16", "FLOAT": "32.32"},
        rough={"FLOAT16": "weights of norms stay float32"},
    ),
    "--no-dropout": switch("--hidden_dropout=0", "--hidden_dropout=0.1"),
    "--no-attn-dropout": switch("--attention_dropout=0", "--attention_dropout=0.1"),
    "--split-qkv": switch(why="queries, keys and values have matrices of their own"),
    "--micro-batch-size": mapped("--batch_size={}"),
    "--global-batch-size": mapped(_accumulation),
    "--gradient-accumulation-factor": mapped(_accumulation),
    "--replication-factor": mapped("--replicas={}"),
    "--gradient-reduction-type": mapped(why="the only choice here", choices={"Mean": ""}),
    "--optimizer": mapped("--optimizer=lamb --lamb_flavor=popart", choices={"LAMB_NO_BIAS": ""}),
    "--beta1": mapped(why="the only value here", choices={"0.9": ""}),
    "--beta2": mapped(why="the only value here", choices={"0.999": ""}),
    "--weight-decay": mapped("--weight_decay={}"),
    "--loss-scaling": mapped("--loss_scale={}"),
    "--learning-rate-function": mapped(
        "--lr_schedule={} --lr_end=1e-7", choices={"Linear": "linear"}
    ),
    "--learning-rate": mapped("--lr={}"),
    "--lr-warmup-steps": mapped("--lr_warmup={} --lr_warmup_unit=steps"),
    "--lr-steps-per-decay-update": Option(
        "approximated",
        "--lr_update_every={}",
        "the warm-up is updated as rarely; upstream updates it every step",
    ),
    "--training-steps": mapped("--total_steps={}"),
    "--epochs": mapped("--epochs={}"),
    "--epochs-inference": mapped("--repeat={}"),
    "--batches-per-step": Option(
        "approximated",
        lambda values: (
            f"--batches_per_step={values['--batches-per-step']}" * (values["--task"] == "SQUAD")
        ),
        "the host starts each batch; a pass of the benchmark has as many",
    ),
    "--steps-per-log": mapped("--print_freq={}"),
    "--aggregate-metrics-over-steps": mapped(why="a line is of one step", choices={"1": ""}),
    "--input-files": mapped(why="the row's dataset, unless data are generated", count=None),
    "--generated-data": switch("--data=generated"),
    "--shuffle": switch(why="training shuffles, inference does not"),
    "--duplication-factor": Option(
        "approximated", why="an epoch has all rows; upstream divides their number by it"
    ),
    "--epochs-to-cache": mapped(why="files are mapped to memory"),
    "--no-model-save": switch(why="nothing is saved without --save_checkpoint_path"),
    "--no-validation": switch("--no_validation"),
    "--host-embedding": mapped(why="the only choice here", choices={"NONE": ""}),
    "--low-latency-inference": switch("--latency=low", why=_ONE_BY_ONE, status="approximated"),
    "--minimum-latency-inference": switch(
        "--latency=minimum", why=_NOTHING_AHEAD, status="approximated"
    ),
    "--pipeline": switch(why=ALL_PARTS, status="approximated"),
    "--stochastic-rounding": ignored("torch has none", count=0),
    "--enable-half-partials": switch(why=SUMS, status="approximated"),
    "--optimizer-state-offchip": ignored("the optimizer's state is on the device", count=0),
    "--replicated-tensor-sharding": ignored("each process has the whole state", count=0),
    "--embedding-serialization-vocab-steps": ignored(MEMORY),
    "--available-memory-proportion": ignored(MEMORY, count=None),
    "--use-default-available-memory-proportion": ignored(MEMORY, count=0),
    "--max-copy-merge-size": ignored(MEMORY),
    "--no-outlining": ignored(MEMORY, count=0),
    "--group-host-syncs": ignored(MEMORY, count=0),
}


def bert_defaults(given: FlagValues) -> dict[str, str]:
    """Returns the defaults of bert.py.

    Raises:
        ValueError: neither pre-training by a configuration nor inference.
    """
    trains = given.get("--task") == "PRETRAINING" and "--optimizer" in given
    if not trains and not (given.get("--task") == "SQUAD" and given.get("--inference") == "true"):
        raise ValueError(
            f"--task {given.get('--task')}: expected PRETRAINING with a --config, or SQUAD with "
            "--inference"
        )
    return {
        "--vocab-length": "30400",
        "--sequence-length": "128",
        "--micro-batch-size": "1",
        **({"--replication-factor": "1"} if trains else {}),
    }


def _pretraining(network: str, length: str, micro_batch: int, loss_scale: int) -> str:
    """Returns a configuration, without its files and its shares of an IPU's memory."""
    return (
        f"--task PRETRAINING {network} {length} --micro-batch-size {micro_batch} "
        f"--loss-scaling {loss_scale} "
        "--vocab-length 30400 --dtype FLOAT16 --no-dropout=false --no-attn-dropout --split-qkv "
        "--replication-factor 4 --gradient-reduction-type Mean --optimizer LAMB_NO_BIAS "
        "--beta1 0.9 --beta2 0.999 --weight-decay 0.01 --learning-rate-function Linear "
        "--batches-per-step 1 --steps-per-log 100 --aggregate-metrics-over-steps 1 "
        "--stochastic-rounding --enable-half-partials --optimizer-state-offchip "
        "--replicated-tensor-sharding --shuffle --duplication-factor 6 --epochs-to-cache 1 "
        "--embedding-serialization-vocab-steps 5 --pipeline --no-validation"
    )


_LARGE = (
    "--num-layers 24 --hidden-size 1024 --attention-heads 16 --encoder-start-ipu 0 "
    "--layers-per-ipu 3 7 7 7"
)
_BASE = (
    "--num-layers 12 --hidden-size 768 --attention-heads 12 --encoder-start-ipu 1 "
    "--layers-per-ipu 4 4 4"
)
_PHASE_1 = (
    "--sequence-length 128 --mask-tokens 20 --global-batch-size 65536 --training-steps 7038 "
    "--learning-rate 0.006 --lr-warmup-steps 2000 --lr-steps-per-decay-update 32"
)
_PHASE_2 = (
    "--sequence-length 384 --mask-tokens 56 --global-batch-size 16384 --training-steps 2137 "
    "--learning-rate 0.002828427125 --lr-warmup-steps 274 --lr-steps-per-decay-update 8"
)
BERT_CONFIGS = {
    f"configs/mk2/pretrain_{name}.json": _pretraining(network, length, micro, scale)
    for name, network, length, micro, scale in (
        ("large_128", _LARGE, _PHASE_1, 8, 64),
        ("large_384", _LARGE, _PHASE_2, 2, 64),
        ("base_128", _BASE, _PHASE_1, 32, 512),
        ("base_384", _BASE, _PHASE_2, 8, 128),
    )
}
