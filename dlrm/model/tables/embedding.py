"""Embedding tables of the categorical features: one row, or several pooled, for every sample.

There are two layouts here. `JointEmbedding` keeps all tables in one weight; `MultiTableEmbedding`
has one `nn.Embedding` per feature. Both give the same vectors for the same seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed.placement import Piece
from dlrm.model.layers.hooks import has_hooks, is_hooked
from dlrm.model.layers.initialize import generator

_VALUES_AT_ONCE = 1 << 20  # drawn on the host, 4 MB at a time for tables of any size
_ROWS_OF_A_STREAM = 1 << 20  # larger tables have several generators, which run in parallel


class _Tables(nn.Module):
    """Base of all layouts: sizes and offsets of the tables of this process."""

    def __init__(self, tables: Mapping[int, int], dim: int, device: torch.device | str) -> None:
        super().__init__()
        self.dim, self.table_sizes = dim, list(tables.values())
        self._numbered = dict(tables)
        self.table_offsets: Tensor
        offsets = torch.tensor([0, *accumulate(self.table_sizes)], device=device)
        self.register_buffer("table_offsets", offsets, persistent=False)


class JointEmbedding(_Tables):
    """All tables in one weight `[sum of table_sizes, dim]`, one after the other.

    Args:
        tables: rows of each table, by table number; initial values depend on the number.
        dim: columns of every table.
        seed: seed of the initial values, U(-s, s) with s = init_scale / sqrt(rows of the table).
        init_scale: see `seed`.
        init_std: if given, the initial values are N(0, init_std) instead.
        native: look up with `ops.joint_embedding`, which checks ids and casts the output, instead
            of `nn.Embedding`'s kernel.
        dtype: dtype of the weight, float32 or bfloat16. With a bfloat16 weight the buffer
            `weight_low` has the lower halves of float32 values (`ops.split_float32`), which the row
            optimizers update and look-ups never read.
        device: device on which the tables are made, without a full copy elsewhere.
        pieces: by table number, the piece of a table that this rank holds, if it does not hold all
            of it. `tables` are then the rows of the pieces and `dim` their columns; the values are
            those of the table.
    """

    def __init__(
        self,
        tables: Mapping[int, int],
        dim: int,
        seed: int = 0,
        init_scale: float = 1.0,
        native: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        init_std: float | None = None,
        pieces: Mapping[int, Piece] | None = None,
    ):
        super().__init__(tables, dim, device)
        self.native = native
        offsets = [0, *accumulate(self.table_sizes)]
        weight = torch.empty(offsets[-1], dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight_low: Tensor | None
        low = torch.empty_like(weight, dtype=torch.int16) if dtype == torch.bfloat16 else None
        self.register_buffer("weight_low", low)
        own = [slice(begin, end) for begin, end in pairwise(offsets)]
        lows = [None if low is None else low[part] for part in own]
        self._pieces = pieces
        whole = [None if pieces is None else pieces[number] for number in tables]
        parts = [weight[part] for part in own]
        _initialize(parts, lows, list(tables), seed, init_scale, init_std, whole)

    def tables(self) -> list[Tensor]:
        """Returns the tables, `[rows, dim]` float32: views of the weight, or its joined halves."""
        tables = self.weight.detach().split(self.table_sizes)
        if self.weight_low is None:
            return list(tables)
        return list(map(ops.join_float32, tables, self.weight_low.split(self.table_sizes)))

    def lower_halves(self) -> dict[Tensor, Tensor]:
        """Returns the lower halves of the weight's values, by weight, if it is bfloat16."""
        return {} if self.weight_low is None else {self.weight: self.weight_low}

    def table_parameters(self) -> list[tuple[nn.Parameter, Mapping[int, int | Piece]]]:
        """Returns the parameters that hold tables, each with its tables by number, in order.

        A whole table is given by its number of rows, others by the piece.
        """
        return [(self.weight, self._pieces or self._numbered)]

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up ids `[batch, tables]`; returns `[batch, tables, dim]` of `dtype`."""
        if self.native:
            return ops.joint_embedding(self.weight, ids, self.table_offsets, dtype=dtype)
        check_ids(ids, self.table_sizes)
        rows = ids + self.table_offsets[:-1]
        return nn.functional.embedding(rows, self.weight, sparse=True).to(dtype)

    def is_operator(self) -> bool:
        """Returns whether a call is `ops.joint_embedding` and nothing else."""
        replaced = getattr(self.forward, "__func__", None) is not _FORWARD
        return self.native and not replaced and not has_hooks(self)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> "LookUp | None":
        """Does the same as a call, but for the graph; None if autograd or a hook is needed."""
        weight = self.weight
        if not self.is_operator() or is_hooked(weight):
            return None
        if weight.requires_grad and weight.grad_dtype not in (None, dtype):
            return None
        offsets = self.table_offsets
        vectors = ops.joint_embedding(weight.detach(), ids, offsets, dtype=dtype)
        return LookUp(self, ids, vectors)

    def pool(
        self,
        ids: Tensor,
        lengths: Tensor,
        pooling: str,
        dtype: torch.dtype,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Does the same as `forward` for bags of ids; see `ops.joint_embedding_bag`."""
        look_up = ops.joint_embedding_bag if self.native else ops.joint_embedding_bag_reference
        if not self.native:
            ops.check_bags("embedding", ids, lengths, self.table_offsets)
        return look_up(
            self.weight,
            ids,
            lengths,
            self.table_offsets,
            sample_weights=weights,
            pooling=pooling,
            dtype=dtype,
        )


_FORWARD = JointEmbedding.forward  # neither overridden nor replaced


@dataclass
class LookUp:
    """Vectors without a graph; a call returns them.

    Attributes:
        tables: where they are from.
        ids: `[batch, tables]`.
        vectors: `[batch, tables, dim]`.
    """

    tables: JointEmbedding
    ids: Tensor
    vectors: Tensor

    def __call__(self) -> Tensor:
        return self.vectors

    def add_gradient(self, grad: Tensor) -> None:
        """Adds a gradient of the vectors to that of the weight, as autograd would."""
        weight = self.tables.weight
        if not weight.requires_grad:
            return
        offsets = self.tables.table_offsets
        sparse = ops.joint_embedding_gradient(weight.shape, self.ids, offsets, grad)
        if weight.grad is None:
            weight.grad = sparse
        else:
            weight.grad += sparse


class MultiTableEmbedding(_Tables):
    """One `nn.Embedding` per feature, in float32; for the arguments see `JointEmbedding`."""

    def __init__(
        self,
        tables: Mapping[int, int],
        dim: int,
        seed: int = 0,
        init_scale: float = 1.0,
        device: torch.device | str = "cpu",
        init_std: float | None = None,
    ):
        super().__init__(tables, dim, device)
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, dim, sparse=True, _weight=torch.empty(size, dim, device=device))
            for size in self.table_sizes
        )
        nothing = [None] * len(tables)
        _initialize(self.tables(), nothing, list(tables), seed, init_scale, init_std, nothing)

    def tables(self) -> list[Tensor]:
        """Returns the weights, one per table, `[rows, dim]`."""
        return [weight.detach() for weight, _ in self.table_parameters()]

    def table_parameters(self) -> list[tuple[nn.Parameter, Mapping[int, int | Piece]]]:
        """Returns the parameters that hold tables, each with its table: number -> rows."""
        held = zip(self.embeddings.parameters(), self._numbered.items(), strict=True)
        return [(weight, {number: size}) for weight, (number, size) in held]

    def lower_halves(self) -> dict[Tensor, Tensor]:
        """Returns an empty dict: these tables are float32."""
        return {}

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up ids `[batch, tables]`; returns `[batch, tables, dim]` of `dtype`."""
        check_ids(ids, self.table_sizes)
        wide = ids.long()
        vectors = [embedding(wide[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self._stack(vectors, len(ids), dtype)

    def pool(
        self,
        ids: Tensor,
        lengths: Tensor,
        pooling: str,
        dtype: torch.dtype,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Does the same as `forward` for bags of ids; see `ops.joint_embedding_bag`."""
        ops.check_bags("embedding", ids, lengths, self.table_offsets)
        bags = ops.bags_of_ids(ids, lengths)
        tables, wide, vectors = bags % max(lengths.shape[1], 1), ids.long(), []
        mode = pooling
        if weights is not None and pooling == "mean":  # torch supports weights for sums only
            mode, weights = "sum", weights / lengths.flatten()[bags]
        for i, weight in enumerate(self.embeddings.parameters()):
            own, chosen = lengths[:, i].long(), tables == i
            begins = own.cumsum(0) - own
            factors = None if weights is None else weights[chosen]
            vectors.append(
                nn.functional.embedding_bag(
                    wide[chosen],
                    weight,
                    begins,
                    mode=mode,
                    sparse=True,
                    per_sample_weights=factors,
                )
            )
        return self._stack(vectors, len(lengths), dtype)

    def _stack(self, vectors: list[Tensor], batch: int, dtype: torch.dtype) -> Tensor:
        if vectors:
            return torch.stack(vectors, dim=1).to(dtype)
        device = self.table_offsets.device
        return torch.zeros(batch, 0, self.dim, dtype=dtype, device=device, requires_grad=True)


def check_ids(ids: Tensor, table_sizes: Sequence[int]) -> None:
    """Raises RuntimeError for the first id outside its table, naming table, row and value.

    On CUDA it checks nothing, since every step would then wait for the device.
    """
    if ids.shape[1] != len(table_sizes):
        raise ValueError(f"embedding: expected ids of {len(table_sizes)} tables, got {ids.shape}")
    if ids.is_cuda or not ids.numel():
        return
    sizes = torch.tensor(table_sizes)
    wrong = (ids < 0) | (ids >= sizes)
    if wrong.any():
        row, table = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"embedding: id {ids[row, table].item()} of table {table} in batch row {row}: "
            f"expected 0 <= id < {table_sizes[table]}"
        )


def _initialize(
    tables: Sequence[Tensor],
    lows: Sequence[Tensor | None],
    numbers: Sequence[int],
    seed: int,
    scale: float,
    std: float | None,
    pieces: Sequence[Piece | None],
) -> None:
    """Fills tables on any device from generators on the host, in several threads.

    A piece takes its values from the generators of the whole table. On the device "meta" nothing is
    drawn.
    """
    if any(table.is_meta for table in tables):
        return
    parts = []
    for table, low, number, piece in zip(tables, lows, numbers, pieces, strict=True):
        first, last = piece.rows if piece else (0, len(table))
        rows, dim = piece.shape if piece else table.shape
        columns = slice(*piece.columns) if piece else slice(0, dim)
        draw = _drawing(rows, scale, std)
        for begin in range(0, rows, _ROWS_OF_A_STREAM):
            end = min(begin + _ROWS_OF_A_STREAM, rows)
            own = slice(max(begin, first) - first, min(end, last) - first)
            if own.start >= own.stop:
                continue
            random = _random(seed, number, begin)
            stream = _Stream(random, draw, end - begin, dim, own.start + first - begin, columns)
            parts.append((table[own], None if low is None else low[own], stream))
    # Several threads already split the halves.
    threads = torch.get_num_threads() if not any(low is not None for low in lows) else 1
    if threads == 1:
        for arguments in parts:
            _fill(*arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda arguments: _fill(*arguments), parts))


def initial_rows(
    number: int,
    shape: tuple[int, int],
    seed: int = 0,
    scale: float = 1.0,
    std: float | None = None,
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yields the initial values of a table, some rows at a time.

    Args:
        number: number of the table.
        shape: rows and columns of the table.
        seed, scale, std: see `JointEmbedding`.
        first: first row that is needed; earlier rows may come as well.

    Yields:
        The number of the first row, and rows, `[some, columns]` float32.
    """
    rows, dim = shape
    draw, at_once = _drawing(rows, scale, std), max(1, _VALUES_AT_ONCE // dim)
    for begin in range(first // _ROWS_OF_A_STREAM * _ROWS_OF_A_STREAM, rows, _ROWS_OF_A_STREAM):
        random, end = _random(seed, number, begin), min(begin + _ROWS_OF_A_STREAM, rows)
        for row in range(begin, end, at_once):
            values = torch.empty(min(at_once, end - row), dim, device="cpu")
            draw(values, random)
            yield row, values


def _random(seed: int, number: int, begin: int) -> torch.Generator:
    """Returns the generator of a table's rows from `begin` on, the first row of a stream."""
    return generator(seed, f"table.{number}.{begin}" if begin else f"table.{number}")


_Draw = Callable[[Tensor, torch.Generator], object]


def _drawing(rows: int, scale: float, std: float | None) -> _Draw:
    return _uniform(scale / max(rows, 1) ** 0.5) if std is None else _normal(std)


def _uniform(bound: float) -> _Draw:
    return lambda values, random: values.uniform_(-bound, bound, generator=random)


def _normal(std: float) -> _Draw:
    return lambda values, random: values.normal_(0, std, generator=random)


class _Stream(NamedTuple):
    """A stream of random rows, and the part of it that a table takes.

    Attributes:
        random, draw: generator and function that draw the values.
        rows, dim: shape of everything that is drawn.
        first: the first row taken.
        columns: the columns taken.
    """

    random: torch.Generator
    draw: _Draw
    rows: int
    dim: int
    first: int
    columns: slice


def _fill(rows: Tensor, low: Tensor | None, stream: _Stream) -> None:
    """Draws rows from a generator, some at a time."""
    with torch.inference_mode(rows.is_inference()):  # each thread has a mode of its own
        _draw_rows(rows, low, stream)


def _draw_rows(rows: Tensor, low: Tensor | None, stream: _Stream) -> None:
    at_once = max(1, _VALUES_AT_ONCE // stream.dim)
    is_whole = rows.shape == (stream.rows, stream.dim)
    for begin in range(0, stream.first + len(rows), at_once):
        drawn = (min(at_once, stream.rows - begin), stream.dim)
        target = slice(max(begin - stream.first, 0), max(begin + drawn[0] - stream.first, 0))
        part = rows[target]
        in_place = is_whole and part.device.type == "cpu" and low is None
        values = part if in_place else torch.empty(drawn, device="cpu")
        stream.draw(values, stream.random)
        if in_place or not len(part):
            continue
        taken = max(stream.first - begin, 0)
        values = values[taken : taken + len(part), stream.columns].contiguous()
        if low is not None:
            values, rest = ops.split_float32(values)
            low[target].copy_(rest)
        part.copy_(values)
