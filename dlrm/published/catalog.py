"""The catalog: every row of the five source documents, by its id."""

from collections.abc import Mapping

from dlrm.published.documents import dlperf, gaudi, ipu, nvidia
from dlrm.published.documents.benchmark_row import BenchmarkRow

CATALOG: Mapping[str, BenchmarkRow] = gaudi.ROWS | nvidia.ROWS | dlperf.ROWS | ipu.ROWS
DOCUMENTS = {
    "000": "Habana, PyTorch models for Gaudi",
    "001": "NVIDIA, DLRM for PyTorch",
    "002": "OneFlow, DLPerf",
    "003": "Graphcore, CNNs on IPUs",
    "004": "Graphcore, BERT on IPUs (PopART)",
}


def select(source: str | None = None, model: str | None = None) -> list[BenchmarkRow]:
    """Returns the rows of a document and a model; None selects all.

    Raises:
        ValueError: an unknown document, or a model that no row has.
    """
    if source is not None and source not in DOCUMENTS:
        raise ValueError(f"--source {source}: expected one of {', '.join(DOCUMENTS)}")
    models = sorted({row.model for row in CATALOG.values()})
    if model is not None and model not in models:
        raise ValueError(f"--model {model}: expected one of {', '.join(models)}")
    return [
        row
        for row in CATALOG.values()
        if (source is None or row.source.startswith(source)) and model in (None, row.model)
    ]
