"""The command line of `dlrm.scripts.bert`, and the effect of recipes on it."""

from dataclasses import dataclass
from itertools import product

from dlrm.flags import Values
from dlrm.language.config import BertConfig, VocabularyConfig
from dlrm.language.recipes import RECIPES, recipe
from dlrm.settings import architecture_of, setting
from dlrm.tasks.networks import flags as network_flags

MODES = ("pretrain", "finetune", "evaluate", "inference_benchmark")
TRAINING = MODES[:2]
TASKS = ("pretrain", "squad", "mrpc")
LATENCIES = ("low", "minimum")
CPU_BATCH = 8  # --batch_size max on the CPU, where the largest that fits is unknown


@dataclass(frozen=True)
class TextRunConfig:
    """A run of BERT; field names are those of the flags."""

    mode: str | None = setting(None, "Task to perform; required", choices=MODES, resumable=True)
    task: str | None = setting(
        None,
        "Task that the network is trained for; default: pretrain in --mode pretrain",
        choices=TASKS,
    )
    phase: int = setting(
        1,
        "Phase of pre-training; 2 continues from --load_checkpoint_path with longer rows",
        least=1,
        most=2,
    )
    recipe: str = setting(
        "google",
        "Defaults of the optimizer, of its learning rates and of the lengths of sequences and "
        "runs, as published",
        choices=RECIPES,
    )
    init_checkpoint: str | None = setting(
        None,
        "Initial weights of Hugging Face, Google or NVIDIA (.safetensors or a torch file), or a "
        "checkpoint of this program for another task",
        topic="Checkpoints and files",
        resumable=True,
    )


@dataclass(frozen=True)
class TextDataConfig:
    """The rows of a run; field names are those of the flags."""

    dataset: str | None = setting(
        None,
        "Pre-training: HDF5 files of dlrm prepare-text, or of NVIDIA's or Habana's programs; "
        "fine-tuning: a directory with train-v1.1.json and dev-v1.1.json (squad) or train.tsv and "
        "dev.tsv (mrpc), or one file",
        resumable=True,
    )
    test_dataset: str | None = setting(
        None,
        "Rows to test on, in the forms of --dataset; default: those in --dataset",
        resumable=True,
    )
    unknown_id: int | None = setting(
        None, "Id of the token that replaces tokens outside --vocab_size; default: they are errors"
    )
    synthetic_dataset_num_entries: int = setting(10000, "Rows per epoch of random data")
    max_seq_length: int | None = setting(
        None,
        "Tokens per row; default: in pre-training that of the files or of --recipe, otherwise 384 "
        "for squad, 128 for mrpc",
    )
    max_predictions_per_seq: int | None = setting(
        None,
        "Maximum masked tokens per pre-training row; default: that of the files or of --recipe",
    )
    doc_stride: int = setting(
        128, "Tokens between the starts of two windows of a SQuAD passage", least=1
    )
    max_query_length: int = setting(
        64, "Maximum tokens of a SQuAD question; the rest is cut off", least=1
    )
    length_window: int | None = setting(
        None,
        "Number of batches within which rows are sorted by length, for less padding; 0: no "
        "sorting; default: 50 in fine-tuning, 0 in pre-training and with --execution graph",
        least=0,
    )


@dataclass(frozen=True)
class TextTrainingConfig:
    """The steps of a run; field names are those of the flags."""

    batch_size: str = setting(
        "32", "Sequences of a micro-batch; max: the most that fit on cuda, 8 on cpu"
    )
    test_batch_size: int = setting(
        32, "Sequences per test batch, all processes together", resumable=True
    )
    total_steps: int | None = setting(
        None,
        "Steps of the learning rate's curve, and of the run unless --epochs or --max_steps ends "
        "it earlier",
        least=1,
    )
    layers_per_stage: tuple[int, ...] = setting(
        (),
        "Number of layers in each part of the pipeline, instead of --pipeline_splits",
        resumable=True,
        least=1,
    )
    encoder_start_stage: int = setting(
        0,
        "With --layers_per_stage, the part of the pipeline in which the layers begin: 0, or 1, "
        "which leaves the embeddings a part of their own",
        resumable=True,
        least=0,
        most=1,
    )


@dataclass(frozen=True)
class LatencyConfig:
    """The benchmark of inference; field names are those of the flags."""

    latency: str = setting(
        "low",
        "low: the benchmark prefetches batches and times each one; minimum: it prefetches "
        "nothing, and the times include reading",
        choices=LATENCIES,
        resumable=True,
    )
    batches_per_step: int | None = setting(
        None, "Batches per pass of the benchmark over random data", least=1, resumable=True
    )


FLAGS = network_flags.network_flags(
    ("Run", TextRunConfig),
    ("Data", TextDataConfig),
    ("Training", TextTrainingConfig),
    ("Inference benchmark", LatencyConfig),
    ("Network", BertConfig),
    ("Text", VocabularyConfig),
)
RESUME_MAY_CHANGE = FLAGS.resumable
FLAGS.tell_defaults(
    dict.fromkeys(
        (n for all in product(RECIPES, TASKS, ("base",), (1, 2)) for n in recipe(*all)),
        "that of --recipe",
    )
    | {"vocab_size": "that of --recipe graphcore, else of the data, else 30522"}
)
help_text = FLAGS.help
ARCHITECTURE = architecture_of(BertConfig)

# Flags of the network's input, which an evaluation takes from the checkpoint.
INPUT = (
    *("task", "vocab_file", "lower_case", "max_seq_length", "max_predictions_per_seq"),
    *("doc_stride", "max_query_length", "unknown_id", "amp", "amp_dtype"),
)


def parse(arguments: list[str]) -> Values:
    """Returns the flags of a command line; `resolved` adds those of a recipe."""
    values = FLAGS.parse(arguments)
    if values["mode"] is None:
        raise ValueError(f"--mode: expected one of {', '.join(MODES)}")
    if values["mode"] == "pretrain":
        if values["task"] not in (None, "pretrain"):
            raise ValueError(f"--task {values['task']} contradicts --mode pretrain")
        values = Values({**values, "task": "pretrain"}, values.given)
    if values["batch_size"] == "max":
        from dlrm.distributed import choose_device  # torch takes seconds to import

        if choose_device(values["base_device"]) == "cpu":
            values = Values({**values, "batch_size": str(CPU_BATCH)}, values.given)
    made_up = "generated" if values["mode"] == "inference_benchmark" else None
    is_named = values["dataset"] or values["test_dataset"]
    return values.filled({"data": "dataset" if is_named else made_up})


def resolved(values: Values) -> tuple[Values, frozenset[str]]:
    """Returns the values with the recipe's, and the names of these.

    The values include those that follow from the task and other flags.
    """
    task, phase = values["task"], values["phase"]
    if task is None:
        expected = TASKS[1:] if values["mode"] == "finetune" else TASKS
        raise ValueError(f"--mode {values['mode']} needs --task, one of {', '.join(expected)}")
    if values["mode"] == "finetune" and task == "pretrain":
        raise ValueError("--task pretrain is of --mode pretrain, and not of --mode finetune")
    if phase == 2 and task != "pretrain":
        raise ValueError(f"--phase 2 is of --mode pretrain, and not of --task {task}")
    taken = recipe(values["recipe"], task, values["size"], phase)
    sizes = {"max_seq_length": 384 if task == "squad" else 128, "max_predictions_per_seq": 20}
    values = values.filled(sizes | taken)
    sorts = values["mode"] == "finetune" and values["execution"] != "graph"
    values = values.filled({"length_window": 50 if sorts else 0})
    if values["layers_per_stage"]:
        values = values.filled({"pipeline_splits": _splits(values)})
    return values, frozenset(taken)


def _splits(values: Values) -> tuple[str, ...]:
    """Returns the stages that begin a part, given the layers of each part."""
    layers, start = values["layers_per_stage"], values["encoder_start_stage"]
    total = values.config(BertConfig).shape.num_layers
    if "pipeline_splits" in values.given:
        raise ValueError(f"--layers_per_stage {layers} contradicts --pipeline_splits")
    if sum(layers) != total:
        given = ",".join(map(str, layers))
        raise ValueError(f"--layers_per_stage {given}: expected to add up to the {total} layers")
    begins = [sum(layers[:part]) for part in range(len(layers))]
    return tuple(f"layer{begin}" for begin in begins if begin or start)


def check(values: Values) -> None:
    """Raises ValueError for flags that contradict each other."""
    network_flags.check(values, TRAINING)
    mode = values["mode"]
    if mode == "evaluate" and not (values["load_checkpoint_path"] or values["init_checkpoint"]):
        raise ValueError("--mode evaluate needs --load_checkpoint_path or --init_checkpoint")
    if values["load_checkpoint_path"] and values["init_checkpoint"]:
        raise ValueError("--init_checkpoint contradicts --load_checkpoint_path: give one of them")
    if values["data"] is None:
        raise ValueError("--dataset: expected a path, or --data generated or synthetic")
    if mode == "evaluate" and values["data"] == "synthetic":
        raise ValueError("--data synthetic is one batch, which --mode evaluate cannot test on")
    size = values["batch_size"]
    if size != "max" and not (size.isascii() and size.isdigit()):
        raise ValueError(f"--batch_size {size}: expected a number from 1 on, or max")
