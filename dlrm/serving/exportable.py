"""The network as it is exported: plain operators over tables of 32, 16 or 8 bits.

TorchScript, ONNX and AOTInductor all take this module, so that they agree with one another. An id
outside its table counts as unknown, which is id 0.
"""

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from dlrm.model.dlrm import DLRM
from dlrm.serving.quantize import QuantizedTables
from dlrm.serving.recalibration import Recalibration


class ExportableDLRM(nn.Module):
    """A trained DLRM in plain operators, for samples of one id a table.

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
        tables: QuantizedTables,
        probability: bool = False,
        recalibration: Recalibration | None = None,
    ) -> None:
        super().__init__()
        self.recalibrate = nn.Identity() if recalibration is None else recalibration
        config = model.config
        sizes = torch.tensor(config.embedding_rows)
        self.hashed, self.probability = config.hash_indices, probability
        self.has_wide = config.wide
        self.sizes: Tensor
        self.first_rows: Tensor
        self.register_buffer("sizes", sizes)
        self.register_buffer("first_rows", sizes.cumsum(0) - sizes)
        self.tables = _Lookup(tables)
        self.wide: Tensor
        self.register_buffer("wide", _wide_weights(model, tables))
        self.bottom_mlp = model.bottom_mlp.exportable()
        embedding = model.numerical_embedding
        self.numerical_embedding = embedding.exportable() if embedding is not None else None
        self.interact, columns = model.interact.exportable()
        self.cross = model.cross
        self.top_mlp, self.output = nn.Sequential(*_without_norms(model.top_mlp)), model.output
        if columns is not None and len(self.top_mlp):
            self.top_mlp[0] = _with_columns(self.top_mlp[0], columns)
        elif columns is not None:
            crossed = range(model.interact.width, model.output.in_features)
            self.output = _with_columns(model.output, [*columns, *crossed])

    def forward(self, numerical: Tensor, ids: Tensor) -> Tensor:
        """Returns logits (or probabilities), float32 `[batch, 1]`.

        Args:
            numerical: `[batch, num_numerical_features]`, float32 or float16.
            ids: `[batch, tables]`, int64 or int32.
        """
        ids = ids.long()
        if self.hashed:
            ids = ids.remainder(self.sizes)
        else:
            ids = ids * ((ids >= 0) & (ids < self.sizes))  # another is id 0
        rows = ids + self.first_rows
        embeddings = self.tables(rows)
        dense = self.bottom_mlp(numerical)
        if self.numerical_embedding is not None:
            embeddings = torch.cat([self.numerical_embedding(numerical), embeddings], 1)
        hidden = self.top_mlp(self.interact(dense, embeddings))
        if self.cross is not None:
            hidden = torch.cat([hidden, self.cross(dense, embeddings)], 1)
        logits = self.output(hidden)
        if self.has_wide:
            logits = logits + F.embedding(rows, self.wide).float().sum(1)
        logits = self.recalibrate(logits)
        return logits.sigmoid() if self.probability else logits


class _Lookup(nn.Module):
    """Rows of all tables, as float32."""

    def __init__(self, tables: QuantizedTables) -> None:
        super().__init__()
        self.quantized = tables.scale is not None
        self.values: Tensor
        self.register_buffer("values", tables.values)
        scale = torch.empty(0) if tables.scale is None else tables.scale
        offset = torch.empty(0) if tables.offset is None else tables.offset
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)

    def forward(self, rows: Tensor) -> Tensor:
        vectors = F.embedding(rows, self.values).float()
        if self.quantized:
            scale = F.embedding(rows, self.scale).float()
            vectors = vectors * scale + F.embedding(rows, self.offset).float()
        return vectors


def _without_norms(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the layers of an MLP, each batch norm folded into the linear layer before it."""
    result: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.BatchNorm1d):
            linear, norm = copy.copy(result[-1]).eval(), copy.copy(layer).eval()
            assert isinstance(linear, nn.Linear)
            result[-1] = fuse_linear_bn_eval(linear, norm)
        else:
            result.append(layer)
    return result


def _wide_weights(model: DLRM, tables: QuantizedTables) -> Tensor:
    """The weight of each id, `[rows, 1]`: float32 beside float32 tables, else float16."""
    if model.wide is None:
        return torch.zeros(0, 1)
    weights = model.wide.weight.detach()
    return weights if tables.values.dtype == torch.float32 else weights.half()


def _with_columns(layer: nn.Module, columns: list[int]) -> nn.Linear:
    """Returns a linear layer whose input has `columns` of the given one's, -1 being a new one."""
    assert isinstance(layer, nn.Linear)
    with_zeros = F.pad(layer.weight.detach(), (0, 1))
    chosen = copy.copy(layer)
    chosen._parameters = dict(layer._parameters)
    chosen.weight = nn.Parameter(with_zeros[:, columns], requires_grad=False)
    chosen.in_features = len(columns)
    return chosen
