"""The architecture of a DLRM: its fields, defaults and checks."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dlrm.model.layers.choices import (
    ATTENTION,
    CROSS_STRUCTURES,
    DCN,
    MAX_BINS,
    NO_EMBEDDING,
    NUMERICAL_KINDS,
    OUTPUT_INITS,
    POOLINGS,
    QUADRATIC,
    ensemble_kinds,
    interaction_names,
)
from dlrm.model.placement import AUTO, PLACEMENTS, divide_tables
from dlrm.settings import architecture_of, check_settings, setting

if TYPE_CHECKING:
    from dlrm.distributed.placement import Placement

EMBEDDING_TYPES = ("joint", "joint_fused", "joint_sparse", "multi_table", "custom_cuda")
EMBEDDING_DTYPES = ("fp32", "bf16")
EMBEDDING_INITS = ("uniform", "normal")
_OWN_FLAGS = {  # of an interaction
    DCN: ("cross_rank", "cross_layers", "cross_structure"),
    QUADRATIC: ("quadratic_layers", "quadratic_rows"),
}
_part = partial(setting, architecture=True)
_size = partial(_part, least=1, most=2**31 - 1)  # the most that machines have, not integers


@dataclass(frozen=True)
class DLRMConfig:
    """The architecture; field names are those of the command line's flags.

    Attributes:
        table_sizes: rows of the table of each categorical field, as in the data set.
        num_numerical_features: number of numerical features of a sample.
        table_poolings: pooling of each field, if the data set specifies it; None, for one field or
            for all, is `pooling`.
        field_tables: number of each field's table, if fields share tables; numbers ascend by first
            fields, from 0. None is a table of its own for each field.
        field_targets: for each field whose pooling is attention, the field of its candidate, which
            has the same table; None for others.
    """

    table_sizes: tuple[int, ...]
    num_numerical_features: int = 13
    embedding_dim: int = _size(
        128, "Numbers per row of the embedding tables, and of the bottom MLP's output"
    )
    bottom_mlp_sizes: tuple[int, ...] = _size(
        (512, 256, 128), "Sizes of the bottom MLP's linear layers; the last is --embedding_dim"
    )
    top_mlp_sizes: tuple[int, ...] = _size(
        (1024, 1024, 512, 256, 1), "Sizes of the top MLP's linear layers; the last is 1"
    )
    interaction_op: str = _part(
        "cuda_dot",
        "cuda_dot: dot products of all pairs of vectors with the native operator, on any device; "
        "dot: the same in plain torch; cat: no products; dcn: the cross layers of DCNv2; "
        "quadratic: the layers of QNN-alpha, which alone have no hidden layers of a top MLP after "
        "them; or several separated by commas, such as dot,dcn, whose outputs enter the top MLP "
        "side by side",
    )
    embedding_type: str = setting(
        "joint_fused",
        "Layout of the tables in NVIDIA's program. All names stand for one layout: a process has "
        "its tables in one weight, with native lookup and update",
        choices=EMBEDDING_TYPES,
        resumable=True,
    )
    pooling: str = _part(
        "sum", "Pooling of the rows of a multi-hot feature into one vector", choices=POOLINGS
    )
    table_poolings: tuple[str | None, ...] | None = None
    field_tables: tuple[int, ...] | None = None
    field_targets: tuple[int | None, ...] | None = None
    attention_hidden: int = _size(
        36, "Neurons of the activation unit that weighs the items of a list with pooling: attention"
    )
    embedding_dtype: str = _part(
        "fp32",
        "bf16: look up rows with half the memory traffic; a second tensor keeps the remaining "
        "bits of the float32 values, so updates stay exact",
        choices=EMBEDDING_DTYPES,
    )
    hash_indices: bool = _part(
        False, "Take ids modulo the size of their table, so that every id is valid"
    )
    max_table_size: int | None = _size(
        None, "Maximum number of rows per embedding table; needs --hash_indices"
    )
    embedding_init_scale: float = setting(
        1.0, "Scale of --embedding_init uniform: s = this / sqrt(table size)", least=0
    )
    output_init: str = setting(
        "uniform",
        "Initialization of the last layer: uniform as in NVIDIA's DLRM, or normal as in Meta's",
        choices=OUTPUT_INITS,
    )
    placement: str = setting(
        "balanced",
        "Assignment of tables to processes: balanced, by number and rows; nvidia; or auto, which "
        "also splits the rows of tables larger than a process's share. Results differ in the order "
        "of summation only",
        choices=(*PLACEMENTS, AUTO),
        resumable=True,
    )
    cross_layers: int = _size(3, "Number of cross layers of --interaction_op dcn")
    cross_rank: int | None = _size(None, "Rank of the cross layers' weights; default: full rank")
    cross_structure: str = _part(
        "stacked",
        "Destination of the cross layers' output: stacked, the top MLP; parallel, the last layer, "
        "beside the output of the top MLP, whose input is the other interactions, or cat",
        choices=CROSS_STRUCTURES,
    )
    quadratic_layers: int = _size(2, "Number of layers of --interaction_op quadratic")
    quadratic_rows: int = _size(
        2, "Number of products that each layer of --interaction_op quadratic adds up"
    )
    numerical_embedding: str = _part(
        NO_EMBEDDING,
        "Give each numerical field a vector of its own in the interaction, besides that of the "
        "bottom MLP. piecewise: linear between the edges of bins, which are those of the dataset's "
        "transform or, if it has none, fitted to the first 131,072 training rows. none: no vectors",
        choices=NUMERICAL_KINDS,
    )
    numerical_bins: int = _part(
        MAX_BINS,
        "Maximum bins of a field with --numerical_embedding piecewise",
        least=2,
        most=MAX_BINS,
    )
    wide: bool = _part(False, "Add to the logit one weight per id (wide and deep)")
    dropout: float = setting(
        0.0,
        "Share of each hidden layer's outputs in the top MLP, and of the factors in quadratic "
        "layers, that training sets to 0",
        least=0,
        below=1,
    )
    self_ensemble: bool = setting(
        False,
        "Train on two passes over each batch with other dropout masks: the loss is that of their "
        "mean probability, plus the cross-entropy of each pass to that mean; needs --dropout",
    )
    batch_norm: bool = _part(
        False,
        "Normalize each hidden layer of the top MLP, and of quadratic layers, before its ReLU; for "
        "one process",
    )
    ensemble: int | str = _part(
        1,
        "Members of a packed ensemble. Members share all weights but a head and the factors by "
        "which they multiply a sample's vectors; each has its own loss, and the prediction is the "
        "mean of their probabilities. 1: a single model. Interactions with numbers, such as "
        "dot*3,quadratic*3: members that share the tables, the bottom MLP and numerical vectors, "
        "and have factors and all other layers of their own",
    )
    embedding_init: str = setting(
        "uniform",
        "Initialization of tables: uniform, U(-s, s), or normal, N(0, s)",
        choices=EMBEDDING_INITS,
    )
    embedding_init_std: float = setting(
        1e-4, "Standard deviation s of --embedding_init normal", above=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_parts()
        self._check_tables()
        if (limit := self.max_table_size) is not None and not self.hash_indices:
            raise ValueError(f"--max_table_size {limit} needs --hash_indices, for ids above it")
        dim = self.embedding_dim
        self._check_last("bottom_mlp_sizes", dim, f"equal --embedding_dim {dim}")
        self._check_last("top_mlp_sizes", 1, "be 1, the logit")

    def _check_last(self, flag: str, size: int, wanted: str) -> None:
        sizes = getattr(self, flag)
        if not sizes or sizes[-1] != size:
            listed = ",".join(map(str, sizes))
            raise ValueError(f"--{flag} {listed}: the last size must {wanted}")

    def _check_tables(self) -> None:
        poolings, count = self.table_poolings, len(self.table_sizes)
        known = {None, ATTENTION, *POOLINGS}
        if poolings is not None and (len(poolings) != count or not {*poolings} <= known):
            raise ValueError(
                f"table_poolings: expected one of {(*POOLINGS, ATTENTION)}, or None, for each of "
                f"{count} tables, got {poolings}"
            )
        rows: dict[int, int] = {}
        for field, (table, size) in enumerate(zip(self.tables, self.table_sizes, strict=False)):
            if not 0 <= table <= len(rows) or rows.setdefault(table, size) != size:
                sizes = ", ".join(map(str, rows.values())) or "none"
                raise ValueError(
                    f"field_tables: field {field}: expected the next number, {len(rows)}, or that "
                    f"of a table of {size} rows among those of {sizes}, got {table}"
                )
        if len(self.tables) != count:
            given = len(self.tables)
            raise ValueError(f"field_tables: expected those of {count} fields, got {given}")
        if self.attention_hidden != type(self).attention_hidden and not self.attended:
            raise ValueError(
                f"--attention_hidden {self.attention_hidden} is for lists with pooling: attention, "
                "and the dataset has none"
            )
        targets = self.field_targets or (None,) * count
        for field, (target, pooling) in enumerate(zip(targets, self.poolings, strict=True)):
            if pooling == ATTENTION and (
                target is None
                or not 0 <= target < count
                or self.tables[target] != self.tables[field]
                or self.poolings[target] == ATTENTION
            ):
                raise ValueError(
                    f"field_targets: field {field}: expected another field of table "
                    f"{self.tables[field]}, which is not attended, got {target}"
                )

    @property
    def attended(self) -> dict[int, int]:
        """Returns the fields whose pooling is attention, each with the field of its candidate."""
        targets = enumerate(self.field_targets or ())
        pairs = ((field, target) for field, target in targets if target is not None)
        return {f: target for f, target in pairs if self.poolings[f] == ATTENTION}

    @property
    def tables(self) -> tuple[int, ...]:
        """Returns the number of each field's table."""
        return self.field_tables or tuple(range(len(self.table_sizes)))

    @property
    def poolings(self) -> tuple[str, ...]:
        """Returns the pooling of each field, which makes one vector of several rows of a sample."""
        said = self.table_poolings or [None] * len(self.table_sizes)
        return tuple(one or self.pooling for one in said)

    def _check_parts(self) -> None:
        """Checks the interaction, the numerical fields and the top MLP."""
        names = interaction_names(self.interaction_op)
        if kinds := ensemble_kinds(self.ensemble):
            if self.interaction_op != type(self).interaction_op:
                raise ValueError(
                    f"--interaction_op {self.interaction_op}: expected none beside --ensemble "
                    f"{self.ensemble}, which names those of its members"
                )
            names = [*dict.fromkeys(kinds)]
        for name, own in _OWN_FLAGS.items():
            for flag in own if name not in names else ():
                value, given = getattr(self, flag), ",".join(names)
                if value != getattr(type(self), flag):
                    raise ValueError(
                        f"--{flag} {value} is for --interaction_op {name}, got {given}"
                    )
        regularized = (self.dropout or self.batch_norm) and QUADRATIC not in names
        flag = f"--dropout {self.dropout}" if self.dropout else "--batch_norm"
        if regularized and len(self.top_mlp_sizes) == 1:
            raise ValueError(f"{flag} is for hidden layers, and --top_mlp_sizes 1 has none")
        if self.self_ensemble and not self.dropout:
            raise ValueError("--self_ensemble: expected --dropout above 0, got 0: equal passes")
        if self.numerical_embedding != NO_EMBEDDING and not self.num_numerical_features:
            given = self.numerical_embedding
            raise ValueError(f"--numerical_embedding {given}: there are no numerical features")

    @property
    def packed(self) -> int:
        """Returns the number of members of a packed ensemble; 1 is no packed ensemble."""
        return self.ensemble if isinstance(self.ensemble, int) else 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the interaction of each member of a mixed ensemble; none if it is no such."""
        return ensemble_kinds(self.ensemble)

    @property
    def embedding_rows(self) -> tuple[int, ...]:
        """Returns the rows of each table as built: `table_sizes`, at most `max_table_size`."""
        limit, rows = self.max_table_size, dict(zip(self.tables, self.table_sizes, strict=True))
        return tuple(size if limit is None else min(size, limit) for size in rows.values())

    def placed(self, num_ranks: int) -> "Placement":
        """Returns the placement of the tables on `num_ranks` processes."""
        from dlrm.distributed.placement import Placement  # which has torch

        attended = {self.tables[field] for field in self.attended}
        rows = self.embedding_rows
        divided = divide_tables(rows, num_ranks, self.placement, attended)
        return Placement.of_tables(rows, self.embedding_dim, *divided)


# Fields that a checkpoint determines; all others follow the data set, or change no prediction.
ARCHITECTURE = architecture_of(DLRMConfig)
