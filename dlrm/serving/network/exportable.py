"""The exported form of the network: its modules, and look-ups in plain operators.

TorchScript and ONNX export this module, so their results agree. A trained network refuses an id
outside its table; a served one, which has no such operators, treats it as id 0, unknown.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.model.dlrm import DLRM
from dlrm.model.layers.packed import mean_of_members
from dlrm.model.score import Score
from dlrm.serving.network.recalibration import Recalibration
from dlrm.serving.rows.inputs import Inputs


class Exportable(nn.Module):
    """A trained DLRM in plain operators, except for the lookup.

    Args:
        model: the trained network; its weights are shared, not copied, but for the first of the
            top MLP.
        tables: its tables, in the precision in which they are served.
        probability: return probabilities, not logits.
        recalibration: of the logits; None leaves them as they are.
    """

    def __init__(
        self,
        model: DLRM,
        tables: Tensor,
        probability: bool = False,
        recalibration: Recalibration | None = None,
    ) -> None:
        super().__init__()
        self.recalibrate = nn.Identity() if recalibration is None else recalibration
        config = model.config
        rows, of_fields = torch.tensor(config.embedding_rows), torch.tensor(config.tables)
        sizes = rows[of_fields]
        self.hashed, self.probability = config.hash_indices, probability
        self.has_wide = config.wide
        self.sizes: Tensor
        self.first_rows: Tensor
        self.register_buffer("sizes", sizes)
        self.register_buffer("first_rows", (rows.cumsum(0) - rows)[of_fields])
        self.tables = _Lookup(tables)
        self.wide = _Lookup(_wide_weights(model, tables))
        self.bottom_mlp = model.bottom_mlp.exportable()
        embedding = model.numerical_embedding
        self.numerical_embedding = embedding.exportable() if embedding is not None else None
        self.scored = nn.ModuleList(_exportable(score) for score in model.scores)
        self.num_members = len(config.kinds) or config.packed
        means = [pooling == "mean" for pooling in config.poolings]
        self.any_mean = any(means)
        self.means: Tensor
        self.register_buffer("means", torch.tensor(means, dtype=torch.long))
        units = (
            _Attention(field, target, model.attention.operands([field]))
            for field, target in config.attended.items()
        )
        self.attention = nn.ModuleList(units)
        self.attends = len(self.attention) > 0
        self.eval()

    def forward(
        self,
        numerical: Tensor,
        ids: Tensor,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Returns logits (or probabilities), float32 `[batch, 1]`.

        The vectors of lists are added up by their bags with `index_add`, ScatterND in ONNX, which
        ONNX Runtime computes in a fifth of the time of a float64 CumSum and in a twentieth of that
        of ScatterElements (41,564 ids in 4,096 bags, dimension 64, one thread of a Granite Rapids).

        Args:
            numerical: `[batch, num_numerical_features]`, float32 or float16.
            ids: `[batch, tables]`, int64 or int32; with lengths, `[total]`, row after row and table
                by table.
            lengths: ids of each row and table, `[batch, tables]`, int64 or int32; no length is
                negative, and they add up to `total`. None is one id each.
            weights: a factor for the vector of each id, `[total]` float32; None is 1 for each.
        """
        if lengths is None:
            rows = self._known(ids.long(), self.sizes) + self.first_rows
            logits = self._logits(numerical, self.tables(rows))
            if self.has_wide:
                logits = logits + self.wide(rows).sum(1)
            return self._scores(logits)
        lengths = lengths.long()
        ends = lengths.flatten().cumsum(0)
        # The number of bags that end before an id is the index of its bag.
        ended = torch.zeros(ids.shape[0] + 1, dtype=torch.long, device=ids.device)
        bags = ended.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
        tables = bags.remainder(lengths.shape[1])
        rows = self._known(ids.long(), self.sizes[tables]) + self.first_rows[tables]
        vectors, factors = self.tables(rows), weights
        if self.attends:
            factors = self._attended(vectors, bags, lengths, weights)
        pooled = self._pooled(vectors, bags, lengths, factors)
        logits = self._logits(numerical, pooled)
        if self.has_wide:
            logits = logits + self._pooled(self.wide(rows), bags, lengths, weights).sum(1)
        return self._scores(logits)

    def _known(self, ids: Tensor, sizes: Tensor) -> Tensor:
        if self.hashed:
            return ids.remainder(sizes)
        return ids * ((ids >= 0) & (ids < sizes))  # others become id 0

    def _logits(self, numerical: Tensor, embeddings: Tensor) -> Tensor:
        dense = self.bottom_mlp(numerical.float())
        if self.numerical_embedding is not None:
            fields = self.numerical_embedding(numerical.float())
            embeddings = torch.cat([fields, embeddings], 1)
        logits = []
        for score in self.scored:
            logits.append(score(dense, embeddings))
        return torch.cat(logits, 1)

    def _scores(self, logits: Tensor) -> Tensor:
        if self.num_members > 1:
            logits = mean_of_members(logits)
        logits = self.recalibrate(logits)
        return logits.sigmoid() if self.probability else logits

    def _attended(
        self, vectors: Tensor, bags: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Returns the weights of all ids, with those that their candidates give to items."""
        sums = torch.zeros(lengths.numel(), vectors.shape[1], device=vectors.device)
        sums = sums.index_add(0, bags, vectors)
        sums = sums.view(lengths.shape[0], lengths.shape[1], vectors.shape[1])
        fields = bags.remainder(lengths.shape[1])
        samples = torch.div(bags - fields, lengths.shape[1], rounding_mode="floor")
        factors = torch.ones(bags.shape[0], device=vectors.device)
        for unit in self.attention:
            factors = unit(vectors, sums, samples, fields, factors)
        return factors if weights is None else factors * weights

    def _pooled(
        self, vectors: Tensor, bags: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Returns the sum or mean of the vectors of each bag, `[batch, tables, dim]`."""
        if weights is not None:
            vectors = vectors * weights.unsqueeze(1)
        pooled = torch.zeros(lengths.numel(), vectors.shape[1], device=vectors.device)
        pooled = pooled.index_add(0, bags, vectors)
        pooled = pooled.view(lengths.shape[0], lengths.shape[1], vectors.shape[1])
        if self.any_mean:
            counts = (lengths * self.means).clamp(min=1)  # 1 for tables that are summed
            pooled = pooled / counts.unsqueeze(2)
        return pooled


def example_like(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns two rows with the arrays and types of `inputs`, with id 0 of each table.

    With fewer rows or ids, an exporter would treat their number as a constant.
    """
    ids = np.zeros((2, inputs.num_tables), inputs.ids.dtype)
    example = Inputs(np.zeros((2, inputs.numerical.shape[1]), inputs.numerical.dtype), ids)
    if inputs.lengths is not None:
        lengths = np.ones(ids.shape, inputs.lengths.dtype)
        weights = None if inputs.weights is None else np.ones(ids.size, inputs.weights.dtype)
        example = Inputs(example.numerical, ids.ravel(), lengths, weights)
    return tuple(map(torch.from_numpy, example.arrays))


class _Attention(nn.Module):
    """The activation unit of an attended list; see `ops.item_weights`."""

    def __init__(self, field: int, target: int, units: ops.ActivationUnits) -> None:
        super().__init__()
        self.field, self.target = field, target
        self.items: Tensor
        self.products: Tensor
        self.candidates: Tensor
        self.bias: Tensor
        self.output: Tensor
        self.output_bias: Tensor
        for name, value in units._asdict().items():
            self.register_buffer(name, value[0].detach())

    def forward(
        self, vectors: Tensor, sums: Tensor, samples: Tensor, fields: Tensor, factors: Tensor
    ) -> Tensor:
        found = ops.item_weights(
            vectors,
            sums[:, self.target],
            samples,
            self.items,
            self.products,
            self.candidates,
            self.bias,
            self.output,
            self.output_bias,
        )
        return torch.where(fields == self.field, found, factors)


class _Lookup(nn.Module):
    """Rows of all tables, as float32."""

    def __init__(self, tables: Tensor) -> None:
        super().__init__()
        self.values: Tensor
        self.register_buffer("values", tables)

    def forward(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.values).float()


def _wide_weights(model: DLRM, tables: Tensor) -> Tensor:
    """Returns the weight of each id, `[rows, 1]`: float32 for float32 tables, otherwise float16."""
    if model.wide is None:
        return torch.zeros(0, 1)
    weights = model.wide.weight.detach()
    return weights if tables.dtype == torch.float32 else weights.half()


def _exportable(score: Score) -> Score:
    """Returns the same layers in plain operators, which share all weights but the first layer's."""
    interact, columns = score.interact.exportable()
    top_mlp, output = score.top_mlp.exportable(), score.output
    if columns is not None and len(top_mlp):
        top_mlp[0] = _with_columns(top_mlp[0], columns)
    elif columns is not None:
        crossed = range(score.interact.width, output.in_features)
        output = _with_columns(output, [*columns, *crossed])
    exported = copy.copy(score)
    replaced = {"interact": interact, "top_mlp": top_mlp, "output": output}
    exported._modules = {**score._modules, **replaced}
    return exported


def _with_columns(layer: nn.Module, columns: list[int]) -> nn.Linear:
    """Returns a linear layer whose input has the given layer's `columns`; -1 is a new column."""
    assert isinstance(layer, nn.Linear)
    with_zeros = F.pad(layer.weight.detach(), (0, 1))
    chosen = copy.copy(layer)
    chosen._parameters = dict(layer._parameters)
    chosen.weight = nn.Parameter(with_zeros[:, columns], requires_grad=False)
    chosen.in_features = len(columns)
    return chosen
