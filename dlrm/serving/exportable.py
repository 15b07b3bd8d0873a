"""The network as it is exported: plain operators over tables of 32, 16 or 8 bits.

TorchScript, ONNX and AOTInductor all take this module, so that they agree with one another. An id
outside its table counts as unknown, which is id 0.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        self.sizes: Tensor
        self.first_rows: Tensor
        self.register_buffer("sizes", sizes)
        self.register_buffer("first_rows", sizes.cumsum(0) - sizes)
        self.tables = _Lookup(tables)
        self.bottom_mlp = model.bottom_mlp.exportable()
        self.interact, columns = model.interact.exportable()
        self.top_mlp = nn.Sequential(*model.top_mlp, model.output)
        if columns is not None:
            self.top_mlp[0] = _with_columns(self.top_mlp[0], columns)

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
        embeddings = self.tables(ids + self.first_rows)
        dense = self.bottom_mlp(numerical)
        logits = self.recalibrate(self.top_mlp(self.interact(dense, embeddings)))
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


def _with_columns(layer: nn.Module, columns: list[int]) -> nn.Linear:
    """Returns a linear layer whose input has `columns` of the given one's, -1 being a new one."""
    assert isinstance(layer, nn.Linear)
    with_zeros = F.pad(layer.weight.detach(), (0, 1))
    chosen = copy.copy(layer)
    chosen._parameters = dict(layer._parameters)
    chosen.weight = nn.Parameter(with_zeros[:, columns], requires_grad=False)
    chosen.in_features = len(columns)
    return chosen
