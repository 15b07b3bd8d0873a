"""The architecture of a DLRM: its fields, defaults and checks."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from dlrm import ops
from dlrm.distributed.placement import Placement, read_placement
from dlrm.model.layers.composition import CROSS_STRUCTURES, DCN, interaction_names
from dlrm.model.layers.mlp import OUTPUT_INITS
from dlrm.model.layers.numerical_embedding import MAX_BINS, NUMERICAL_EMBEDDINGS
from dlrm.model.tables.placement import AUTO, PLACEMENTS, place_tables

EMBEDDING_TYPES = ("joint", "joint_fused", "joint_sparse", "multi_table", "custom_cuda")
FUSED_TYPES = ("joint_fused", "custom_cuda")  # updated by the row optimizers
EMBEDDING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EMBEDDING_INITS = ("uniform", "normal")
NO_EMBEDDING = "none"  # numerical fields enter through the bottom MLP only
NUMERICAL_KINDS = (NO_EMBEDDING, *NUMERICAL_EMBEDDINGS)
_CHOICES = {
    "numerical_embedding": NUMERICAL_KINDS,
    "cross_structure": CROSS_STRUCTURES,
    "embedding_init": EMBEDDING_INITS,
    "embedding_type": EMBEDDING_TYPES,
    "pooling": ops.POOLINGS,
    "embedding_dtype": list(EMBEDDING_DTYPES),
    "output_init": OUTPUT_INITS,
}


@dataclass(frozen=True)
class DLRMConfig:
    """The architecture; field names are those of the command line's flags.

    Attributes:
        table_sizes: rows of each embedding table, as in the data set.
        num_numerical_features: number of numerical features of a sample.
        embedding_dim: columns of every table.
        bottom_mlp_sizes: layers over the numerical features; the last size is `embedding_dim`.
        top_mlp_sizes: layers over the interaction; the last size is 1, the logit.
        interaction_op: "cuda_dot" (native), "dot" (plain torch), "cat" (no products), "dcn" (cross
            layers, see `Cross`), or several separated by commas, whose outputs are concatenated
            before the top MLP.
        cross_layers: number of layers of "dcn".
        cross_rank: rank of their weights; None is full rank.
        cross_structure: "stacked" feeds the output of "dcn" to the top MLP. "parallel" feeds it to
            the last layer, next to the output of the top MLP, which then takes the other
            interactions, or "cat" if there is none.
        numerical_embedding: "none", or a kind of `NUMERICAL_EMBEDDINGS` that makes each numerical
            field a vector of the interaction, in addition to the output of the bottom MLP.
        numerical_bins: maximum number of bins of a field, for the kinds "piecewise" and "bins".
        numerical_frequencies: number of frequencies of a field, for the kind "periodic".
        numerical_sigma: standard deviation of the initial frequencies.
        wide: add one weight of each id to the logit.
        dropout: share of each hidden layer's outputs in the top MLP that training sets to 0.
        batch_norm: normalize each hidden layer of the top MLP before its ReLU; one process only.
        ensemble: members of a packed ensemble, see `dlrm.model.layers.packed`; 1 is a single model.
        embedding_type: "joint_fused" and "joint_sparse" use the native look-up, "joint" one
            `nn.Embedding` for all tables, "multi_table" one for each table; "custom_cuda" is
            "joint_fused".
        pooling: "sum" or "mean" of a sample's rows, for tables with several ids per sample.
        table_poolings: pooling of each table, if the data set specifies it; None, for one table or
            for all, is `pooling`.
        embedding_dtype: "fp32" or "bf16", the dtype of look-ups. With bf16 a second tensor holds
            the remaining bits of the float32 values, so updates are as exact as those of fp32
            tables; needs `embedding_type` "joint_fused".
        hash_indices: take ids modulo the rows of their table.
        max_table_size: maximum number of rows of a table; needs `hash_indices`.
        embedding_init: "uniform" initializes tables as U(-s, s), "normal" as N(0, s).
        embedding_init_scale: scale of "uniform", where s is scale / sqrt(rows).
        embedding_init_std: s of "normal".
        output_init: initialization of the last layer, "uniform" or "normal"; see `output_layer`.
        placement: assignment of tables to processes, see `place_tables`; the file of a `Placement`;
            or "auto". It changes values only by the order of summation.

    Raises:
        ValueError: values do not fit together; the message names flag and value.
    """

    table_sizes: tuple[int, ...]
    num_numerical_features: int = 13
    embedding_dim: int = 128
    bottom_mlp_sizes: tuple[int, ...] = (512, 256, 128)
    top_mlp_sizes: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    interaction_op: str = "cuda_dot"
    embedding_type: str = "joint_fused"
    pooling: str = "sum"
    table_poolings: tuple[str | None, ...] | None = None
    embedding_dtype: str = "fp32"
    hash_indices: bool = False
    max_table_size: int | None = None
    embedding_init_scale: float = 1.0
    output_init: str = "uniform"
    placement: str = "balanced"
    cross_layers: int = 3
    cross_rank: int | None = None
    cross_structure: str = "stacked"
    numerical_embedding: str = NO_EMBEDDING
    numerical_bins: int = MAX_BINS
    numerical_frequencies: int = 32
    numerical_sigma: float = 0.05
    wide: bool = False
    dropout: float = 0.0
    batch_norm: bool = False
    ensemble: int = 1
    embedding_init: str = "uniform"
    embedding_init_std: float = 1e-4

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ValueError(f"--embedding_dim {self.embedding_dim}: expected 1 or more")
        if not 0 <= self.embedding_init_scale < math.inf:
            raise ValueError(
                f"--embedding_init_scale {self.embedding_init_scale}: expected 0 or more"
            )
        self._check_parts()
        for flag, choices in _CHOICES.items():
            if getattr(self, flag) not in choices:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected one of {choices}")
        self._check_poolings()
        if self.embedding_dtype != "fp32" and self.embedding_type not in FUSED_TYPES:
            raise ValueError(
                f"--embedding_dtype {self.embedding_dtype} needs --embedding_type joint_fused, got "
                f"{self.embedding_type}: torch.optim would round every update"
            )
        if self.max_table_size is not None and not self.hash_indices:
            raise ValueError(
                f"--max_table_size {self.max_table_size} needs --hash_indices: ids above it would "
                "point outside their tables"
            )
        if self.max_table_size is not None and self.max_table_size < 1:
            raise ValueError(f"--max_table_size {self.max_table_size}: expected 1 or more")
        for flag in ("bottom_mlp_sizes", "top_mlp_sizes"):
            sizes = getattr(self, flag)
            if not sizes or min(sizes) < 1:
                raise ValueError(f"--{flag} {_listed(sizes)}: expected sizes of 1 or more")
        if self.bottom_mlp_sizes[-1] != self.embedding_dim:
            raise ValueError(
                f"--bottom_mlp_sizes {_listed(self.bottom_mlp_sizes)}: the last size must equal "
                f"--embedding_dim {self.embedding_dim}"
            )
        if self.top_mlp_sizes[-1] != 1:
            raise ValueError(
                f"--top_mlp_sizes {_listed(self.top_mlp_sizes)}: the last size must be 1, the logit"
            )

    def _check_poolings(self) -> None:
        poolings = self.table_poolings
        if poolings is not None and (
            len(poolings) != len(self.table_sizes) or not {*poolings} <= {None, *ops.POOLINGS}
        ):
            raise ValueError(
                f"table_poolings: expected one of {ops.POOLINGS}, or None, for each of "
                f"{len(self.table_sizes)} tables, got {poolings}"
            )

    @property
    def poolings(self) -> tuple[str, ...]:
        """Returns the pooling of each table, which makes one vector of several rows of a sample."""
        said = self.table_poolings or [None] * len(self.table_sizes)
        return tuple(one or self.pooling for one in said)

    def _check_parts(self) -> None:
        """Checks the interaction, the numerical fields and the top MLP."""
        names = interaction_names(self.interaction_op)
        if DCN not in names:
            for flag in ("cross_rank", "cross_layers", "cross_structure"):
                value = getattr(self, flag)
                if value != type(self).__dataclass_fields__[flag].default:
                    raise ValueError(
                        f"--{flag} {value} is for --interaction_op {DCN}, got {self.interaction_op}"
                    )
        least = {"cross_layers": 1, "cross_rank": 1, "numerical_bins": 2}
        for flag, smallest in {**least, "numerical_frequencies": 1, "ensemble": 1}.items():
            if (value := getattr(self, flag)) is not None and value < smallest:
                raise ValueError(f"--{flag} {value}: expected {smallest} or more")
        if self.numerical_bins > MAX_BINS:
            raise ValueError(f"--numerical_bins {self.numerical_bins}: expected {MAX_BINS} at most")
        for flag in ("numerical_sigma", "embedding_init_std"):
            if not 0 < getattr(self, flag) < math.inf:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected a number above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout {self.dropout}: expected 0 or more, less than 1")
        if (self.dropout or self.batch_norm) and len(self.top_mlp_sizes) == 1:
            flag = f"--dropout {self.dropout}" if self.dropout else "--batch_norm"
            raise ValueError(f"{flag} is for hidden layers, and --top_mlp_sizes 1 has none")
        if self.numerical_embedding != NO_EMBEDDING and not self.num_numerical_features:
            raise ValueError(
                f"--numerical_embedding {self.numerical_embedding}: there are no numerical features"
            )

    @property
    def embedding_rows(self) -> tuple[int, ...]:
        """Returns the rows of each table as built: `table_sizes`, at most `max_table_size`."""
        limit = self.max_table_size
        return tuple(size if limit is None else min(size, limit) for size in self.table_sizes)

    def placed(self, num_ranks: int) -> Placement:
        """Returns the placement of the tables on `num_ranks` processes.

        Raises:
            ValueError: the placement file is missing, or is for other tables or processes.
        """
        rows, dim = self.embedding_rows, self.embedding_dim
        if self.placement not in (*PLACEMENTS, AUTO):
            if not Path(self.placement).is_file():
                raise ValueError(
                    f"--placement {self.placement}: expected {AUTO}, {', '.join(PLACEMENTS)} or a "
                    "file that dlrm.scripts.plan --output wrote, and there is no such file"
                )
            return read_placement(self.placement, rows, dim, num_ranks)
        # With several processes, a planner resolves "auto" before the model is built.
        places = place_tables(rows, num_ranks, self.placement)
        return Placement.from_whole_tables(rows, dim, places)


# Fields that a checkpoint determines; all others follow the data set, or change no prediction.
ARCHITECTURE = (
    "embedding_dim",
    "embedding_dtype",
    "bottom_mlp_sizes",
    "top_mlp_sizes",
    "interaction_op",
    "cross_layers",
    "cross_rank",
    "cross_structure",
    "numerical_embedding",
    "numerical_bins",
    "numerical_frequencies",
    "wide",
    "batch_norm",
    "ensemble",
    "hash_indices",
    "max_table_size",
    "pooling",
)


def _listed(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))
