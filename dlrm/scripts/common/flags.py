"""The command line of `dlrm.scripts.main`: absl flags, and the configurations they become.

Names, defaults and meanings are those of NVIDIA's PyTorch DLRM of June 2020, with its later flags
and ours beside them. Configurations own the checks; nothing below `dlrm.scripts` reads a flag.
"""

import sys
from dataclasses import fields
from typing import Any, TypeVar

from absl import app, flags

from dlrm.data.clicks.datasets import DATASET_TYPES
from dlrm.data.clicks.synthetic import IDS
from dlrm.data.verification import VERIFY_DATA
from dlrm.model.dlrm import EMBEDDING_DTYPES, EMBEDDING_TYPES
from dlrm.model.interaction import INTERACTIONS
from dlrm.model.placement import PLACEMENTS
from dlrm.ops import POOLINGS
from dlrm.scripts.common.config_flags import VERIFY_DATA_HELP, show
from dlrm.serving.runtimes import RUNTIMES
from dlrm.train.execution import EXECUTIONS
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import DENSE_OPTIMIZERS
from dlrm.train.optim.rows import TABLE_OPTIMIZERS
from dlrm.train.precision import PRECISIONS

FLAGS = flags.FLAGS
Config = TypeVar("Config")

# Flags that a resumed run may change: how long it is, where things lie, what it reports and when.
RESUME_MAY_CHANGE = frozenset(
    [
        *("mode", "epochs", "max_steps", "resume", "auc_threshold", "auc_device", "backend"),
        *("dataset", "verify_data", "synthetic_dataset_dir", "log_path", "output_dir"),
        *("load_checkpoint_path", "save_checkpoint_path", "checkpoint_freq", "keep_checkpoints"),
        "allow_other_transform",
        *("print_freq", "test_freq", "test_after", "test_batch_size"),
        *("benchmark_warmup_steps", "inference_benchmark_steps"),
        *("inference_benchmark_batch_sizes", "inference_benchmark_runtimes"),
        *("optimized_mlp", "cuda_graphs", "deterministic"),
        *("bottom_features_ordered", "placement", "rank_timeout", "async_checkpoint"),
    ]
)

# Flags in which the ranks of a run may differ: where each finds the same data.
RANKS_MAY_DIFFER = frozenset(["dataset", "synthetic_dataset_dir", "log_path", "output_dir"])

# NVIDIA's switches for Adam, and the flag that each stands for.
ADAM_SWITCHES = {
    "Adam_embedding_optimizer": "embedding_optimizer",
    "Adam_MLP_optimizer": "mlp_optimizer",
}

_ALL_TABLES_100K = ["100000"] * 26


def define_flags() -> None:
    """Defines every flag of `dlrm.scripts.main`, and a --help that shows topic after topic."""
    topics = {
        "Run": _define_run,
        "Precision": _define_precision,
        "Data": _define_data,
        "Synthetic data": _define_synthetic_data,
        "Model": _define_model,
        "Training": _define_training,
        "Learning rate": _define_schedule,
        "Optimizers": _define_optimizers,
        "Checkpoints and files": _define_files,
        "Inference benchmark": _define_inference_benchmark,
    }
    for topic, define in topics.items():
        earlier = set(FLAGS)
        define()
        for name in set(FLAGS) - earlier:
            FLAGS.register_key_flag_for_module(topic, FLAGS[name])
    app.define_help_flags()
    flags.DEFINE_flag(_Help(list(topics)), module_name=app.__name__)


class _Help(app.HelpFlag):
    """Instead of absl's, which is one long list."""

    def __init__(self, topics: list[str]):
        super().__init__()
        self.allow_override, self._topics = True, topics

    def parse(self, arg: Any) -> None:
        if self._parse(arg):
            shown = [sys.modules["__main__"].__doc__ or "", *map(FLAGS.module_help, self._topics)]
            show("\n".join([*shown, "\nTry --helpfull to get a list of all flags."]))
            sys.exit(0)


def _define_run() -> None:
    flags.DEFINE_enum(
        "mode", "train", ["train", "test", "inference_benchmark"], "Select task to be performed"
    )
    flags.DEFINE_integer("seed", 12345, "Random seed", lower_bound=0, upper_bound=2**63 - 1)
    flags.DEFINE_string(
        "base_device",
        None,
        'Device to run the model on, "cuda" or "cpu"; by default cuda where there is one',
    )
    flags.DEFINE_enum(
        "execution",
        "eager",
        list(EXECUTIONS),
        "A DLRM takes eager only: its parts are native operators, and torch.compile of the same "
        "layers is slower",
    )
    flags.DEFINE_boolean(
        "cuda_graphs",
        False,
        "Replay a step, and a prediction, as one CUDA graph: one process on one GPU, with the same "
        "results",
    )
    flags.DEFINE_boolean(
        "deterministic",
        False,
        "The same bits from run to run on cuda, too; on the CPU runs have them anyway",
    )
    flags.DEFINE_string(
        "backend", "nccl", "How processes exchange tensors on cuda; those on the CPU use gloo"
    )
    flags.DEFINE_float(
        "rank_timeout",
        1800.0,
        "Seconds without a step after which a rank that hangs is named and the run ends",
        lower_bound=1,
    )
    flags.DEFINE_boolean(
        "bottom_features_ordered", False, "Accepted; features always keep the dataset's order"
    )


def _define_precision() -> None:
    flags.DEFINE_boolean("amp", False, "Compute in half precision (Automatic Mixed Precision)")
    flags.DEFINE_enum(
        "amp_dtype",
        None,
        ["fp16", "bf16"],
        "Half precision of --amp; default: fp16 on cuda, else bf16",
    )
    flags.DEFINE_enum(
        "precision",
        None,
        list(PRECISIONS),
        "Instead of --amp: fp32, bf16, fp16, or bits of products and of weights",
    )
    flags.DEFINE_enum(
        "half_dtype", None, ["fp16", "bf16"], "The 16 bits of --precision 16.32; default: as --amp"
    )
    flags.DEFINE_float("loss_scale", 1024.0, "Static loss scale of --amp in fp16", lower_bound=0)
    flags.DEFINE_boolean("tf32", True, "Allow TensorFloat-32 in float32 matrix products on cuda")


def _define_data() -> None:
    flags.DEFINE_string("dataset", None, "Directory of the dataset")
    flags.DEFINE_enum(
        "dataset_type",
        "split",
        list(DATASET_TYPES),
        "Type of the dataset; memmap and parametric are other names of split",
    )
    flags.DEFINE_string(
        "feature_spec", "feature_spec.yaml", "File in the dataset that describes its features"
    )
    flags.DEFINE_enum("verify_data", "first", list(VERIFY_DATA), VERIFY_DATA_HELP)
    flags.DEFINE_integer("batch_size", 32768, "Batch size used for training", lower_bound=1)
    flags.DEFINE_integer(
        "test_batch_size", 32768, "Batch size used for testing/validation", lower_bound=1
    )
    flags.DEFINE_boolean(
        "shuffle_batch_order",
        False,
        "Read the training batches in random order",
        short_name="shuffle",
    )
    flags.DEFINE_float(
        "dataset_subset", None, "Fraction of the training batches to use, in (0,1]; default: all"
    )
    flags.DEFINE_integer(
        "num_numerical_features",
        13,
        "Numerical features of a binary or synthetic dataset; others know theirs",
        lower_bound=0,
    )


def _define_synthetic_data() -> None:
    flags.DEFINE_string(
        "synthetic_dataset_dir",
        "/tmp/dlrm_sythetic_dataset",
        "Where --dataset_type synthetic_disk writes",
    )
    flags.DEFINE_list(
        "synthetic_dataset_table_sizes",
        _ALL_TABLES_100K,
        "Embedding table sizes to use with the synthetic dataset",
    )
    flags.DEFINE_integer(
        "synthetic_dataset_num_entries",
        2**15 * 1024,
        "Number of samples per epoch for the synthetic dataset",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "synthetic_dataset_numerical_features",
        None,
        "Numerical features of the synthetic dataset; default: --num_numerical_features",
        lower_bound=0,
    )
    flags.DEFINE_boolean(
        "synthetic_dataset_use_feature_spec",
        False,
        "Take the shapes of the synthetic dataset from --dataset and --feature_spec",
    )
    flags.DEFINE_list(
        "synthetic_dataset_hotness",
        None,
        "Most ids of a sample for each synthetic_gpu table, one number for all or one a table, "
        "with 1 to as many drawn; default: always one id",
    )
    flags.DEFINE_enum(
        "synthetic_ids", "uniform", list(IDS), "Distribution of the ids of the synthetic dataset"
    )


def _define_model() -> None:
    flags.DEFINE_enum(
        "embedding_type",
        "joint_fused",
        list(EMBEDDING_TYPES),
        "joint_fused: native lookup and update; joint_sparse: native lookup, torch.optim; "
        "joint: one nn.Embedding; multi_table: one a table; custom_cuda: the same as joint_fused",
    )
    flags.DEFINE_integer(
        "embedding_dim", 128, "Dimensionality of embedding space for categorical features"
    )
    flags.DEFINE_enum(
        "embedding_dtype",
        "fp32",
        list(EMBEDDING_DTYPES),
        "bf16: look tables up in half the traffic; the rest of their float32 values lies beside "
        "them, and updates are as exact; needs --embedding_type joint_fused",
    )
    flags.DEFINE_float(
        "embedding_init_scale", 1.0, "Tables start as U(-s, s) with s = this / sqrt(table size)"
    )
    flags.DEFINE_list(
        "top_mlp_sizes", ["1024", "1024", "512", "256", "1"], "Linear layer sizes for the top MLP"
    )
    flags.DEFINE_list(
        "bottom_mlp_sizes", ["512", "256", "128"], "Linear layer sizes for the bottom MLP"
    )
    flags.DEFINE_enum(
        "interaction_op",
        "cuda_dot",
        list(INTERACTIONS),
        "cuda_dot: the native operator, on whatever device; dot: plain torch; cat: no products",
    )
    flags.DEFINE_enum(
        "pooling", "sum", list(POOLINGS), "How the rows of a multi-hot feature become one vector"
    )
    flags.DEFINE_enum(
        "placement",
        "balanced",
        list(PLACEMENTS),
        "Which process holds which tables: balanced by lookups and rows, or as NVIDIA's; the "
        "results are the same",
    )
    flags.DEFINE_integer(
        "max_table_size", None, "Maximum number of rows per embedding table; needs --hash_indices"
    )
    flags.DEFINE_boolean(
        "hash_indices", False, "Take ids modulo the size of their table, so that they always fit"
    )
    flags.DEFINE_boolean(
        "optimized_mlp",
        True,
        "MLPs in one autograd node over fused linear layers; else torch's modules one by one",
    )


def _define_training() -> None:
    flags.DEFINE_integer("epochs", 1, "Number of epochs to train for")
    flags.DEFINE_integer("max_steps", None, "Stop after exactly this many optimization steps")
    flags.DEFINE_integer(
        "test_freq", None, "Optimization steps between tests; default: test after each epoch"
    )
    flags.DEFINE_float(
        "test_after", 0.0, "Don't test the model unless this many epochs has been completed"
    )
    flags.DEFINE_integer("print_freq", 200, "Optimization steps between printed lines")
    flags.DEFINE_integer(
        "benchmark_warmup_steps", 0, "Number of initial steps to exclude from the throughput"
    )
    flags.DEFINE_integer(
        "gradient_accumulation_steps",
        1,
        "Compute each batch in so many micro-batches, one after the other: less memory",
    )
    flags.DEFINE_float(
        "max_grad_norm", None, "Scale all gradients down to this 2-norm, where theirs is greater"
    )
    flags.DEFINE_float("auc_threshold", None, "Stop the training after achieving this AUC")
    flags.DEFINE_enum(
        "auc_device",
        "GPU",
        ["GPU", "CPU"],
        "Where test scores are collected: GPU is the device of the model, whichever it is",
    )


def _define_schedule() -> None:
    flags.DEFINE_float("lr", 28.0, "Base learning rate")
    flags.DEFINE_integer(
        "warmup_factor", 0, "Learning rate warmup factor. Must be a non-negative integer"
    )
    flags.DEFINE_integer("warmup_steps", 6400, "Number of warmup optimization steps")
    flags.DEFINE_integer(
        "decay_steps", 80000, "Polynomial learning rate decay steps. If 0 will not do any decaying"
    )
    flags.DEFINE(
        _IntegerOrNone(),
        "decay_start_step",
        64000,
        "Optimization step after which the learning rate decays; None: right after the warmup",
        serializer=flags.ArgumentSerializer(),
    )
    flags.DEFINE_integer("decay_power", 2, "Polynomial learning rate decay power")
    flags.DEFINE_float("decay_end_lr", 0.0, "LR after the decay ends")


def _define_optimizers() -> None:
    flags.DEFINE_enum(
        "embedding_optimizer", "sgd", list(TABLE_OPTIMIZERS), "Optimizer of the embedding tables"
    )
    flags.DEFINE_enum("mlp_optimizer", "sgd", list(DENSE_OPTIMIZERS), "Optimizer of the MLPs")
    flags.DEFINE_boolean(
        "Adam_embedding_optimizer", False, "The same as --embedding_optimizer adam"
    )
    flags.DEFINE_boolean("Adam_MLP_optimizer", False, "The same as --mlp_optimizer adam")
    flags.DEFINE_boolean("freeze_mlps", False, "Do not update the MLPs (for benchmarks)")
    flags.DEFINE_boolean("freeze_embeddings", False, "Do not update the tables (for benchmarks)")


def _define_files() -> None:
    flags.DEFINE_string(
        "load_checkpoint_path", None, "Checkpoint, or directory of checkpoints, to load"
    )
    flags.DEFINE_boolean(
        "allow_other_transform",
        False,
        "Go on where the dataset's fitted transform is not the checkpoint's, so that the same ids "
        "mean other values",
    )
    flags.DEFINE_string(
        "save_checkpoint_path", None, "Directory in which to save the best and the last checkpoint"
    )
    flags.DEFINE_integer(
        "checkpoint_freq",
        None,
        "Optimization steps between checkpoints; default: best and last only",
    )
    flags.DEFINE_integer(
        "keep_checkpoints",
        1,
        "How many of the last checkpoints to keep besides the best",
        lower_bound=1,
    )
    flags.DEFINE_boolean(
        "async_checkpoint",
        False,
        "Write checkpoints while the training goes on; takes memory for a copy of what is saved",
    )
    flags.DEFINE_boolean(
        "resume", False, "Go on from the last checkpoint in --save_checkpoint_path, if there is one"
    )
    flags.DEFINE_string(
        "log_path", "./log.json", "Destination for the log file with results and statistics"
    )
    flags.DEFINE_string("output_dir", "/tmp", "Accepted, and unused; see --save_checkpoint_path")


def _define_inference_benchmark() -> None:
    flags.DEFINE_list(
        "inference_benchmark_batch_sizes",
        ["1", "64", "4096"],
        "Batch sizes for inference throughput and latency measurements",
    )
    flags.DEFINE_integer(
        "inference_benchmark_steps",
        200,
        "Number of steps for measuring inference latency and throughput",
        lower_bound=1,
    )
    flags.DEFINE_list(
        "inference_benchmark_runtimes",
        ["native", *RUNTIMES],
        "What is measured: native (the model as trained), eager (plain torch), torchscript, onnx "
        "(ONNX Runtime), aot (AOTInductor)",
    )


class _IntegerOrNone(flags.IntegerParser):
    def parse(self, argument: Any) -> Any:
        return None if argument in (None, "None", "none") else super().parse(argument)


def values() -> dict[str, Any]:
    """Returns every flag of the command line with its value; lists of sizes are lists of integers.

    Raises:
        ValueError: a size is not an integer; flag and value are named.
    """
    return {name: _value(name) for name in sorted(_own_flags())}


def given(name: str) -> bool:
    """Whether the user gave the flag, be it with its default value."""
    return bool(FLAGS[name].present)


def config(cls: type[Config], **others: Any) -> Config:
    """Makes a configuration from the flags that have its fields' names, and `others`.

    Raises:
        ValueError: what the configuration refuses.
    """
    own = _own_flags()
    taken = {f.name: _value(f.name) for f in fields(cls) if f.name in own}  # type: ignore[arg-type]
    return cls(**{**taken, **others})


def optimizer_config() -> OptimizerConfig:
    """Returns the optimizers; NVIDIA's two switches for Adam are other names of ours.

    Raises:
        ValueError: a switch and the flag it stands for contradict each other.
    """
    chosen = {}
    for switch, flag in ADAM_SWITCHES.items():
        if _value(switch):
            if given(flag) and _value(flag) != "adam":
                raise ValueError(f"--{switch} contradicts --{flag} {_value(flag)}")
            chosen[flag] = "adam"
    return config(OptimizerConfig, **chosen)


def _own_flags() -> set[str]:
    """The names that `define_flags` defined: absl has flags of its own."""
    return {flag.name for flag in FLAGS.flags_by_module_dict()[__name__]}


_SIZES = (
    "top_mlp_sizes",
    "bottom_mlp_sizes",
    "synthetic_dataset_table_sizes",
    "synthetic_dataset_hotness",
    "inference_benchmark_batch_sizes",
)


def _value(name: str) -> Any:
    value: Any = FLAGS[name].value
    if name not in _SIZES or value is None:
        return value
    try:
        return tuple(int(size) for size in value)
    except ValueError:
        raise ValueError(f"--{name} {','.join(value)}: expected integers") from None
