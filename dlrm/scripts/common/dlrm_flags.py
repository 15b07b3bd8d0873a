"""The command line of `dlrm.scripts.main` and `dist_main`.

Names, defaults and meanings are those of NVIDIA's PyTorch DLRM of June 2020, with its later flags
and ours added.
"""

from collections.abc import Mapping
from typing import Any

from dlrm.api.recipe import RECIPES
from dlrm.data.clicks.datasets import DATASET_TYPES, DataConfig
from dlrm.data.clicks.synthetic import IDS, SHAPES
from dlrm.data.verification import VERIFY_DATA
from dlrm.model.config import (
    EMBEDDING_DTYPES,
    EMBEDDING_INITS,
    EMBEDDING_TYPES,
    NUMERICAL_KINDS,
    DLRMConfig,
)
from dlrm.model.layers.composition import CROSS_STRUCTURES, interaction_names
from dlrm.model.layers.mlp import OUTPUT_INITS
from dlrm.model.layers.numerical_embedding import MAX_BINS
from dlrm.ops import POOLINGS, PRODUCTS
from dlrm.ops.products import AUTO
from dlrm.scripts.common.config_flags import (
    ALLOW_LINKS_HELP,
    LOG_FLAGS,
    PROFILE_HELP,
    VERDICT_HELP,
    VERIFY_DATA_HELP,
    ConfigFlags,
    Definitions,
    Help,
    UsageError,
    Values,
)
from dlrm.serving.network.runtimes import RUNTIMES
from dlrm.store.config import TableStoreConfig
from dlrm.systems.dlrm_presets import DLRM_PRESETS
from dlrm.tasks.click_training import OVERLAPS
from dlrm.train.execution import MODULE_EXECUTIONS
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import CLICK_OPTIMIZERS
from dlrm.train.optim.rows import L2_MODES, TABLE_OPTIMIZERS
from dlrm.train.precision import PRECISIONS, PrecisionConfig
from dlrm.train.schedule import SCHEDULES, UNITS, ScheduleConfig
from dlrm.train.task import TrainConfig

# The defaults of NVIDIA's program of October 2021 and later, on one GPU and on several, if they
# differ from those of 2020, which are the defaults here and those of `dist_main`.
NVIDIA_2021: dict[str, Any] = {
    "batch_size": 65536,
    "test_batch_size": 65536,
    "lr": 24.0,
    "warmup_steps": 8000,
    "decay_steps": 24000,
    "decay_start_step": 48000,
    "embedding_type": "custom_cuda",
    "dataset_type": "parametric",
}
# Those of `dist_main`: NVIDIA's of June 2020, on several GPUs.
DIST_MAIN: dict[str, Any] = {
    "batch_size": 65536,
    "test_batch_size": 131072,
    "lr": 24.0,
    "warmup_steps": 8000,
    "decay_steps": 24000,
    "decay_start_step": 48000,
    "embedding_type": "joint_sparse",
}
_RUN: Definitions = {
    "mode": (
        str,
        "train",
        Help("Task to perform", ("train", "test", "inference_benchmark")),
    ),
    "preset": (
        str | None,
        None,
        Help(
            "Defaults of a published run instead; gaudi_medium: Habana's medium DLRM for Gaudi, "
            "on random samples; mlperf_dcnv2: DLRM-DCNv2 of MLPerf Training, with three cross "
            "layers of rank 512, on random samples of its sizes unless --dataset is given",
            DLRM_PRESETS,
        ),
    ),
    "recipe": (
        str | None,
        None,
        Help(
            "Choose the flags that are not given from the number of training rows and from their "
            "fields, and print the choices; for training on --dataset",
            RECIPES,
        ),
    ),
    "defaults": (
        str,
        "2020",
        Help(
            "Defaults of the flags: NVIDIA's of June 2020, which differ between main and "
            "dist_main, or those of October 2021 and later",
            ("2020", "2021"),
        ),
    ),
    "execution": (
        str,
        "eager",
        Help(
            "Execution of the MLPs and the interaction: eager, with native operators; graph, with "
            "torch.compile, each part as one graph; lazy, on torch's lazy device if available, "
            "otherwise as graph",
            MODULE_EXECUTIONS,
        ),
    ),
    "base_device": (
        str | None,
        None,
        'Device to run the model on, "cuda" or "cpu"; default: cuda if available',
    ),
    "cuda_graphs": (
        bool,
        False,
        "Replay each training step and each prediction as one CUDA graph per process, with the "
        "same results; needs one id per sample and table, and --backend nccl",
    ),
    "deterministic": (
        bool,
        False,
        "Make runs on cuda reproducible bit for bit; runs on the CPU always are",
    ),
    "backend": (
        str,
        "nccl",
        "torch.distributed backend of processes on cuda; processes on the CPU use gloo",
    ),
    "rank_timeout": (
        float,
        1800.0,
        Help(
            "Seconds without progress after which the run reports the rank that hangs, and ends",
            least=1,
        ),
    ),
    "profile": (int | None, None, PROFILE_HELP),
    "bottom_features_ordered": (
        bool,
        False,
        "Accepted; features always keep the dataset's order",
    ),
}
_MODEL: Definitions = {
    "optimized_mlp": (
        bool,
        True,
        "Run each MLP as one autograd node over fused linear layers, instead of torch's modules "
        "one by one",
    ),
    "mlp_products": (
        str,
        AUTO,
        Help(
            "Matrix products of the MLPs on a CPU: the native operator's or torch's; auto takes "
            "those that are faster on this processor, by a table that dlrm.scripts.doctor --tune "
            "extends; a resumed run keeps its own",
            (AUTO, *PRODUCTS),
        ),
    ),
}
_TRAINING: Definitions = {
    "seeds": (
        str | None,
        None,
        "Several seeds instead of --seed, as 1-5 or 1,2,7: train a model for each, one after "
        "another, in --save_checkpoint_path, and save the mean of their logits there as one model",
    ),
    "max_grad_norm": (
        float | None,
        None,
        "Clip gradients so that their joint 2-norm is at most this; default: no clipping",
    ),
    "ema_decay": (
        float | None,
        None,
        "Test and serve an EMA, with this decay, of all weights except the tables; default: no EMA",
    ),
    "overlap": (
        str,
        OVERLAPS[0],
        Help(
            "stale: look up rows and exchange their vectors while the previous step computes; "
            "these rows lack that step's update, so results differ",
            OVERLAPS,
        ),
    ),
    "auc_device": (
        str,
        "GPU",
        Help(
            "Device that collects test scores; GPU: the model's device, whichever it is",
            ("GPU", "CPU"),
        ),
    ),
}
_OPTIMIZERS: Definitions = {
    "Adam_embedding_optimizer": (bool, False, "The same as --embedding_optimizer adam"),
    "Adam_MLP_optimizer": (bool, False, "The same as --mlp_optimizer adam"),
}
_FILES: Definitions = {
    "load_checkpoint_path": (
        str | None,
        None,
        "Checkpoint, or directory of checkpoints, to load",
    ),
    "load_optimizer_state": (
        bool,
        False,
        "Load the optimizers' state of --load_checkpoint_path as well: training on further rows "
        "continues where that run ended, and counts its steps from 0",
    ),
    "allow_other_transform": (
        bool,
        False,
        "Accept a dataset whose fitted transform is not the checkpoint's, so that the same ids "
        "stand for other values",
    ),
    "save_checkpoint_path": (
        str | None,
        None,
        "Directory in which to save the best and the last checkpoint",
    ),
    "keep_checkpoints": (
        int,
        1,
        Help("Number of latest checkpoints to keep besides the best", least=1),
    ),
    "async_checkpoint": (
        bool,
        False,
        "Write checkpoints while training continues; needs memory for a copy of the state",
    ),
    "resume": (
        bool,
        False,
        "Resume from the last checkpoint in --save_checkpoint_path, if there is one",
    ),
    **LOG_FLAGS,
    "output_dir": (str, "/tmp", "Accepted, and unused; see --save_checkpoint_path"),
}
_BENCHMARK: Definitions = {
    "inference_benchmark_batch_sizes": (
        tuple[int, ...],
        (1, 64, 4096),
        "Batch sizes for inference throughput and latency measurements",
    ),
    "inference_benchmark_steps": (
        int,
        200,
        Help("Number of batches that are timed for each batch size and runtime", least=1),
    ),
    "inference_benchmark_runtimes": (
        tuple[str, ...],
        ("native",),
        f"Runtimes to measure, of {', '.join(('native', *RUNTIMES))}: the model as trained, "
        + ", ".join(RUNTIMES.values()),
    ),
}
_OWN: dict[str, Definitions] = {
    "Run": _RUN,
    "Precision": {},
    "Data": {},
    "Synthetic data": {},
    "Model": _MODEL,
    "Training": _TRAINING,
    "Learning rate": {},
    "Optimizers": _OPTIMIZERS,
    "Checkpoints and files": _FILES,
    "Inference benchmark": _BENCHMARK,
}
_CONFIGS: dict[tuple[str, type], dict[str, str | Help]] = {
    ("Run", DataConfig): {"seed": Help("Random seed", least=0, most=2**63 - 1)},
    ("Precision", PrecisionConfig): {
        "amp": "Compute in half precision (automatic mixed precision)",
        "amp_dtype": Help("Type of --amp; default: fp16 on cuda, otherwise bf16", ("fp16", "bf16")),
        "precision": Help(
            "Type of the model, instead of --amp: fp32, bf16 or fp16, or the bits of matrix "
            "products and of weights, such as 16.32",
            PRECISIONS,
        ),
        "half_dtype": Help(
            "16-bit type of --precision 16.32; default: as for --amp", ("fp16", "bf16")
        ),
        "loss_scale": Help("Static loss scale of --amp in fp16", least=0),
        "tf32": "Allow TensorFloat-32 in float32 matrix products on cuda",
    },
    ("Data", DataConfig): {
        "dataset": "Directory of the dataset",
        "dataset_type": Help(
            "Type of the dataset; memmap and parametric are other names of split. "
            "synthetic_random has fractions instead of clicks as targets",
            DATASET_TYPES,
        ),
        "feature_spec": "Name of the file in --dataset that describes its features",
        "verify_data": Help(VERIFY_DATA_HELP, VERIFY_DATA),
        "allow_links": ALLOW_LINKS_HELP,
        "batch_size": Help("Samples of a training batch, all processes together", least=1),
        "test_batch_size": Help(
            "Samples of a test or validation batch, all processes together", least=1
        ),
        "shuffle_batch_order": Help(
            "Read the training batches in random order", short_name="shuffle"
        ),
        "sample_weights": "Weight samples in the loss and in test metrics, if the dataset has "
        "weights",
        "dataset_subset": "Fraction of the training batches to use, in (0,1]; default: all",
        "set_aside": "Share of the training rows, the last ones, that choose the best weights "
        "instead of training, for a dataset without validation rows, whose test rows then report; "
        "default: 0, or 0.1 with --recipe auto",
        "num_numerical_features": Help(
            "Number of numerical features of a binary or synthetic dataset; ignored for others, "
            "which state theirs",
            least=0,
        ),
    },
    ("Synthetic data", DataConfig): {
        "synthetic_dataset_dir": "Directory that --dataset_type synthetic_disk writes to",
        "synthetic_dataset_table_sizes": "Rows of each embedding table of the synthetic dataset",
        "synthetic_dataset_num_entries": Help(
            "Samples per epoch of the synthetic dataset", least=1
        ),
        "synthetic_dataset_numerical_features": Help(
            "Number of numerical features of the synthetic dataset; default: "
            "--num_numerical_features",
            least=0,
        ),
        "synthetic_dataset_use_feature_spec": "Take the shapes of the synthetic dataset from "
        "--dataset and --feature_spec",
        "synthetic_dataset": Help(
            "Use the table sizes and the ids per sample of a published dataset, for synthetic_gpu "
            "and synthetic_disk; mlperf: MLPerf's DLRM-DCNv2",
            SHAPES,
        ),
        "synthetic_dataset_max_table_size": Help(
            "Maximum rows of a synthetic table; default: no limit", least=1
        ),
        "synthetic_dataset_hotness": "Maximum ids per sample and synthetic table, one number for "
        "all tables or one per table; each sample draws 1 to this many; default: always one id",
        "synthetic_ids": Help("Distribution of the ids of the synthetic dataset", IDS),
    },
    ("Model", DLRMConfig): {
        "embedding_type": Help(
            "joint_fused: native lookup and update; joint_sparse: native lookup, optimizer of "
            "torch.optim; joint: one nn.Embedding for all tables; multi_table: one nn.Embedding "
            "per table; custom_cuda: the same as joint_fused",
            EMBEDDING_TYPES,
        ),
        "embedding_dim": "Numbers per row of the embedding tables, and of the bottom MLP's output",
        "embedding_dtype": Help(
            "bf16: look up rows with half the memory traffic; a second tensor keeps the remaining "
            "bits of the float32 values, so updates stay exact; needs --embedding_type "
            "joint_fused",
            EMBEDDING_DTYPES,
        ),
        "output_init": Help(
            "Initialization of the last layer: uniform as in NVIDIA's DLRM, or normal as in Meta's",
            OUTPUT_INITS,
        ),
        "embedding_init": Help(
            "Initialization of tables: uniform, U(-s, s), or normal, N(0, s)", EMBEDDING_INITS
        ),
        "embedding_init_scale": "Scale of --embedding_init uniform: s = this / sqrt(table size)",
        "embedding_init_std": "Standard deviation s of --embedding_init normal",
        "top_mlp_sizes": "Sizes of the top MLP's linear layers; the last is 1",
        "bottom_mlp_sizes": "Sizes of the bottom MLP's linear layers; the last is --embedding_dim",
        "interaction_op": "cuda_dot: dot products of all pairs of vectors with the native "
        "operator, on any device; dot: the same in plain torch; cat: no products; dcn: the cross "
        "layers of DCNv2; or several separated by commas, such as dot,dcn, whose outputs enter "
        "the top MLP side by side",
        "cross_layers": Help("Number of cross layers of --interaction_op dcn", least=1),
        "cross_rank": Help("Rank of the cross layers' weights; default: full rank", least=1),
        "cross_structure": Help(
            "Destination of the cross layers' output: stacked, the top MLP; parallel, the last "
            "layer, beside the output of the top MLP, whose input is the other interactions, or "
            "cat",
            CROSS_STRUCTURES,
        ),
        "numerical_embedding": Help(
            "Give each numerical field a vector of its own in the interaction, besides that of "
            "the bottom MLP. piecewise: linear between the edges of bins; bins: a vector for each "
            "bin; periodic: a layer with ReLU over sines and cosines. The edges are those of the "
            "dataset's transform or, if it has none, fitted to the first 131,072 training rows",
            NUMERICAL_KINDS,
        ),
        "numerical_bins": Help(
            "Maximum bins of a field with --numerical_embedding piecewise or bins",
            least=2,
            most=MAX_BINS,
        ),
        "numerical_frequencies": Help(
            "Number of frequencies of a field with --numerical_embedding periodic", least=1
        ),
        "numerical_sigma": "Standard deviation of the initial frequencies of "
        "--numerical_embedding periodic",
        "wide": "Add to the logit one weight per id (wide and deep)",
        "dropout": "Share of each hidden layer's outputs in the top MLP that training sets to 0",
        "batch_norm": "Normalize each hidden layer of the top MLP before its ReLU; for one process",
        "ensemble": Help(
            "Members of a packed ensemble. Members share all weights but a head and the factors "
            "by which they multiply a sample's vectors; each has its own loss, and the prediction "
            "is the mean of their probabilities. 1: a single model",
            least=1,
        ),
        "pooling": Help("Pooling of the rows of a multi-hot feature into one vector", POOLINGS),
        "placement": "Assignment of tables to processes: balanced, by lookups and rows; nvidia; "
        "auto, which splits and replicates tables as dlrm.scripts.plan does; or a file that "
        "dlrm.scripts.plan --output wrote. Results differ in the order of summation only",
        "max_table_size": "Maximum number of rows per embedding table; needs --hash_indices",
        "hash_indices": "Take ids modulo the size of their table, so that every id is valid",
    },
    ("Training", TrainConfig): {
        "epochs": "Number of passes over the training set",
        "max_steps": "Stop after exactly this many optimization steps; default: no limit",
        "test_freq": "Optimization steps between tests; default: test after each epoch",
        "test_after": "Run no test before this many epochs; may be a fraction",
        "print_freq": "Optimization steps between printed lines",
        "verdict": VERDICT_HELP,
        "benchmark_warmup_steps": "Initial steps that the throughput leaves out",
        "gradient_accumulation_steps": "Split each batch into this many micro-batches, computed "
        "one after another, which takes less memory",
        "auc_threshold": "Stop when a test reaches this AUC; default: never",
        "early_stop": Help(
            "Stop after this many tests in a row without a new best AUC, and keep the best "
            "weights; default: never",
            least=1,
        ),
    },
    ("Learning rate", TrainConfig): {
        "plateau_patience": Help(
            "Multiply the learning rate by --plateau_factor after this many tests in a row "
            "without a new best AUC; default: never",
            least=1,
        ),
        "plateau_factor": "Factor of --plateau_patience, between 0 and 1",
    },
    ("Learning rate", ScheduleConfig): {
        "schedule": Help(
            "nvidia: warm-up, plateau and polynomial decay at given steps; constant: --lr after "
            "the warm-up; linear, cosine: falls to --decay_end_lr by the end of the run",
            SCHEDULES,
        ),
        "warmup": "Length of the warm-up of --schedule constant, linear and cosine, in "
        "--warmup_unit",
        "warmup_unit": Help("Unit of --warmup; run: a share of the run, such as 0.05", UNITS),
        "lr": "Learning rate after the warm-up, and before any decay",
        "warmup_factor": "The warm-up starts at --lr * (1 - 2**-this); an integer, 0 or more",
        "warmup_steps": "Optimization steps of the warm-up; 0: no warm-up",
        "decay_steps": "Optimization steps of the decay; 0: no decay",
        "decay_start_step": "Optimization step after which the learning rate decays; None: right "
        "after the warm-up",
        "decay_power": "Exponent of the polynomial decay",
        "decay_end_lr": "Learning rate at the end of the decay",
    },
    ("Tables larger than memory", TableStoreConfig): {
        "table_memory": "Memory of each process for its tables and their optimizer's state, such "
        "as 8GB; the remaining rows are in --table_store. The results are the same, bit for bit",
        "table_store": "Directory, on a fast local disk, for the file with all rows; CPU only. "
        "Checkpoints refer to it",
    },
    ("Optimizers", OptimizerConfig): {
        "embedding_optimizer": Help("Optimizer of the embedding tables", TABLE_OPTIMIZERS),
        "embedding_l2": Help(
            "L2 regularization of the embedding tables: the optimizer adds this / 2 * (sum of "
            "their squares) to the mean loss of every step; needs --embedding_type joint_fused",
            least=0,
        ),
        "embedding_l2_mode": Help(
            "Rows that --embedding_l2 regularizes in a step: all, as a dense optimizer does, or "
            "looked_up, those of the batch",
            L2_MODES,
        ),
        "mlp_optimizer": Help("Optimizer of the MLPs", CLICK_OPTIMIZERS),
        "weight_decay": Help(
            "Weight decay of the MLPs' matrices, added to their gradients", least=0
        ),
        "freeze_mlps": "Do not update the MLPs (for benchmarks)",
        "freeze_embeddings": "Do not update the tables (for benchmarks)",
    },
    ("Checkpoints and files", TrainConfig): {
        "checkpoint_freq": "Optimization steps between checkpoints; default: best and last only",
    },
}


def fields_of(config: type, *names: str) -> dict[str, str | Help]:
    """Returns the help of some flags that are fields of a configuration."""
    found = {
        name: text
        for (_, owner), helps in _CONFIGS.items()
        if owner is config
        for name, text in helps.items()
    }
    return {name: found[name] for name in names}


# Flags that a resumed run may change: its length, locations, and its reports.
RESUME_MAY_CHANGE = frozenset(
    [
        *("mode", "epochs", "max_steps", "resume", "auc_device", "backend", "seeds"),
        *("auc_threshold", "early_stop"),
        *(
            "dataset",
            "verify_data",
            "allow_links",
            "synthetic_dataset_dir",
            "log_path",
            "output_dir",
        ),
        *(
            "load_checkpoint_path",
            "load_optimizer_state",
            "save_checkpoint_path",
            "checkpoint_freq",
            "keep_checkpoints",
        ),
        "allow_other_transform",
        *("print_freq", "verdict", "test_freq", "test_after", "test_batch_size"),
        *("benchmark_warmup_steps", "inference_benchmark_steps"),
        *("inference_benchmark_batch_sizes", "inference_benchmark_runtimes"),
        *("optimized_mlp", "cuda_graphs", "deterministic", "execution"),
        *("preset", "defaults", "recipe"),  # the flags that they set are compared themselves
        *("bottom_features_ordered", "placement", "rank_timeout", "async_checkpoint", "profile"),
        *("tensorboard", "mlflow", "table_memory", "table_store"),
    ]
)

# Flags in which the ranks of a run may differ: locations of the same data.
RANKS_MAY_DIFFER = frozenset(["dataset", "synthetic_dataset_dir", "log_path", "output_dir"])

# NVIDIA's switches for Adam, and the flag that each stands for.
ADAM_SWITCHES = {
    "Adam_embedding_optimizer": "embedding_optimizer",
    "Adam_MLP_optimizer": "mlp_optimizer",
}


# Parts of errors about NVIDIA's earlier flags, and their replacements here.
_GONE = {
    "--mode=prof-train": "--mode train --profile 10 records steps",
    "'fp16'": "--amp computes in half precision",
    "'nofp16'": "float32 is the default",
    "'self_interaction'": "NVIDIA's later versions have none, either",
    # Formerly a switch, now followed by a name.
    **dict.fromkeys(
        ("flag --synthetic_dataset ", "flag --synthetic_dataset="),
        "--dataset_type synthetic_gpu makes random rows",
    ),
}


def make_flags(defaults: Mapping[str, Any] | None = None) -> ConfigFlags:
    """Returns the command line, with other defaults for some flags."""
    return ConfigFlags(_OWN, _CONFIGS, defaults)


def parse(arguments: list[str], flags: ConfigFlags | None = None) -> Values:
    """Returns the flags of a command line, by name; a preset overrides other defaults.

    Args:
        arguments: what follows the command's name.
        flags: flags of the command; by default those of `dlrm.scripts.main`.

    Raises:
        ValueError: a flag is unknown, or cannot have the value; the message names both.
    """
    try:
        values = (flags or make_flags()).parse(arguments)
    except UsageError as error:
        for text, instead in _GONE.items():
            if text in f"{error} ":
                raise UsageError(f"{error}; {instead}") from None
        raise
    interaction_names(values["interaction_op"])
    values = Values(dict(sorted(values.items())), values.given)
    return _with_preset(values.filled(NVIDIA_2021 if values["defaults"] == "2021" else {}))


def _with_preset(values: Values) -> Values:
    """Fills in the preset's values, including those of its data unless other data are given."""
    preset = DLRM_PRESETS.get(values["preset"], {})
    named, shape = values["dataset"], values["synthetic_dataset_use_feature_spec"]
    kind = values["dataset_type"] if "dataset_type" in values.given else None
    if not kind.startswith("synthetic") if kind else named and not shape:
        preset = {name: value for name, value in preset.items() if not _is_of_data(name)}
    return values.filled(preset)


def _is_of_data(name: str) -> bool:
    return name.startswith("synthetic_") or name in ("dataset_type", "num_numerical_features")


def optimizer_config(values: Values) -> OptimizerConfig:
    """Returns the optimizers, with NVIDIA's two switches for Adam translated to our flags.

    Raises:
        ValueError: a switch and the flag it stands for contradict each other.
    """
    chosen = {}
    for switch, flag in ADAM_SWITCHES.items():
        if values[switch]:
            if flag in values.given and values[flag] != "adam":
                raise ValueError(f"--{switch} contradicts --{flag} {values[flag]}")
            chosen[flag] = "adam"
    return values.config(OptimizerConfig, **chosen)
