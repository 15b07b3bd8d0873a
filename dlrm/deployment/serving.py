"""The serving of a model by Triton: its platforms, and the settings of `config.pbtxt`."""

from dataclasses import dataclass

from dlrm.serving.network.platforms import PLATFORMS, Platform


@dataclass(frozen=True)
class Serving:
    """Configures how a model is served; field names are those of the exporter's flags.

    Attributes:
        platform: a key of `PLATFORMS`.
        numerical_dtype, ids_dtype: dtypes of the inputs.
        output_kind: "logit" or "probability".
        raw: whether to accept raw rows as well.
        lists, weighted: whether rows have several ids per table, and each id a weight.
        max_batch_size: rows of a request, and of requests batched together.
        dyn_batching, dyn_batching_delay: whether waiting requests are batched, and the milliseconds
            to wait for more.
        engine_count: number of instances.
        no_cuda: serve on the CPU even if the server has GPUs.
        threads: threads of an instance of the python platform; 0 is one per core.
        keep_versions: number of newest versions to serve.
    """

    platform: str = "python"
    numerical_dtype: str = "float32"
    ids_dtype: str = "int64"
    output_kind: str = "logit"
    raw: bool = True
    lists: bool = False
    weighted: bool = False
    max_batch_size: int = 4096
    dyn_batching: bool = True
    dyn_batching_delay: float = 0.0
    engine_count: int = 1
    no_cuda: bool = False
    threads: int = 0
    keep_versions: int = 1

    @property
    def runs_on(self) -> Platform:
        """Returns the platform of that name."""
        return PLATFORMS[self.platform]
