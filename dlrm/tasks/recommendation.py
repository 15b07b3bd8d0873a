"""Click-through prediction: a DLRM, binary cross-entropy, ROC AUC."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from dlrm import ops
from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.data.prefetch import Readable, batch_order, prefetch
from dlrm.distributed import World
from dlrm.distributed.placement import Placement
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.model.tables.files import mapped_zeros
from dlrm.ops.library import cuda_kernels_available
from dlrm.ops.row_update import ORDERED_COLUMNS
from dlrm.tasks.click_task import ClickTask
from dlrm.train.cuda_graph import CudaRecorder, GraphedCallable
from dlrm.train.log import Loader
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.row_optimizers import RowOptimizer
from dlrm.train.precision import LossScaler

_SAMPLES_OF_A_READ, _BATCHES_OF_A_READ = 8192, 16  # at most, but always one batch


class ClickLoader:
    """The batches of a data set on a device, in order or shuffled anew every epoch.

    Args:
        device: destination of the batches.
        shuffle: take whole batches in random order.
        source: reads the batches in place of `dataset`, with other labels.
    """

    def __init__(
        self,
        dataset: ClickDataset,
        device: str = "cpu",
        shuffle: bool = False,
        seed: int = 0,
        source: Readable[Batch] | None = None,
    ):
        self.source = source or dataset
        self.dataset, self.device, self.shuffle, self.seed = dataset, device, shuffle, seed
        self.num_samples = dataset.num_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[Batch, None, None]:
        """Yields the batches of an epoch from the `start`-th on."""
        order = batch_order(len(self), epoch, self.seed, self.shuffle)
        at_once = min(max(_SAMPLES_OF_A_READ // self.dataset.batch_size, 1), _BATCHES_OF_A_READ)
        return prefetch(self.source, order[start:].tolist(), self.device, at_once=at_once)

    def repeated(self, count: int) -> Generator[Batch, None, None]:
        """Yields `count` batches of full size, repeating them if there are fewer."""
        full = self.num_samples // self.dataset.batch_size
        return prefetch(self.source, (i % full for i in range(count)), self.device)


class Recommendation(ClickTask):
    """A DLRM to train on clicks.

    Args:
        recorder: records `infer` and replays it from then on; None does not.
        dtype, optimized_mlp, files: see `DLRM`.
        auc_on_cpu, has_clicks: see `ClickTask`.
    """

    model: DLRM

    def __init__(
        self,
        config: DLRMConfig,
        world: World = World(),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        auc_on_cpu: bool = False,
        optimized_mlp: bool = True,
        recorder: CudaRecorder | None = None,
        has_clicks: bool = True,
        files: str | None = None,
    ):
        model = DLRM(config, world, dtype, seed, optimized_mlp, files)
        super().__init__(model, world, auc_on_cpu, has_clicks)
        self.recorder, self._files = recorder, files
        self._deferring: RowOptimizer | None = None
        self._infer = self.predict
        if recorder:
            self._infer = GraphedCallable(self.predict, recorder)

    def loss(self, batch: Batch) -> Tensor:
        self._before_look_up(batch)
        return super().loss(batch)

    def gradients_of(self, first: Batch, scaler: LossScaler) -> Callable[[Batch], Tensor]:
        """Does the same as `Task.gradients_of`, without a backward pass where none is needed.

        Sample weights, a loss scale, frozen MLPs and gradients of inputs need one.
        """
        methods = tuple(getattr(one, "__func__", None) for one in (self.loss, self.predict))
        needed = methods != _AS_HERE or scaler.scale is not None or first.weights is not None
        if needed or torch.is_anomaly_enabled() or first.numerical.requires_grad:
            return super().gradients_of(first, scaler)
        parameters = self.model.native_parameters(first.numerical)
        if not torch.is_grad_enabled() or parameters is None:
            return super().gradients_of(first, scaler)
        if not any(tensor.requires_grad for tensor in parameters.tensors()):
            return super().gradients_of(first, scaler)
        return partial(self._gradients, parameters)

    def _gradients(self, parameters: ops.NetworkParameters, batch: Batch) -> Tensor:
        """Adds the gradients of `loss`, which it returns without a graph."""
        self._before_look_up(batch)
        divisor = batch.global_size or self.num_samples(batch)
        received = self.model.look_up(*_looked_up(batch), graph=False)
        given = batch.numerical, received, batch.labels, divisor
        return self.model.add_gradients(parameters, *given)

    def _before_look_up(self, batch: Batch) -> None:
        if self._deferring:
            rows = self.model.rows(batch.categorical, batch.lengths)  # of the wide term, too
            self._deferring.catch_up(rows)

    def predict(self, batch: Batch) -> Tensor:
        """Returns the logits of this process's samples of a batch; see `DLRM.forward`."""
        return self.model(batch.numerical, *_looked_up(batch))

    @torch.no_grad()
    def infer(self, batch: Batch) -> Tensor:
        """Does the same as `predict`, without gradients."""
        return self._infer(batch)

    def weights_unchanged(self) -> AbstractContextManager:
        """Returns a context in which work that depends only on weights is done once; see `DLRM`."""
        # A recording would read the results of an earlier block.
        return nullcontext() if self.recorder else self.model.weights_unchanged()

    @contextmanager
    def _tested(self, loader: Loader) -> Iterator[Generator[Batch, None, None]]:
        with super()._tested(loader) as batches, self.weights_unchanged():
            yield batches

    def updates_vary(self, config: OptimizerConfig) -> bool:
        """Returns whether rows' gradients are added in varying order, so that runs differ slightly.

        It depends on the GPU's kernels, the optimizer and the tables; see `dlrm.ops.row_update`.
        `torch.use_deterministic_algorithms` is not considered.
        """
        if config.freeze_embeddings or not self.world.device.startswith("cuda"):
            return False
        model = self.model.config
        summed = config.embedding_optimizer != "sgd" or model.embedding_dtype != "fp32"
        ordered = summed or model.embedding_dim >= ORDERED_COLUMNS
        return not (cuda_kernels_available() and ordered)

    def optimizers(
        self, config: OptimizerConfig, one_look_up: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Does the same as `ClickTask.optimizers`.

        If rows must be up to date before they are looked up, `loss` ensures it from now on.
        """
        result = super().optimizers(config, one_look_up)
        for tables in result:
            if isinstance(tables, RowOptimizer):
                self._deferring = tables if tables.defers else None
                if self._files is not None:
                    tables.move_state(partial(mapped_zeros, self._files))
        return result

    def _check(self, config: OptimizerConfig) -> None:
        if not config.freeze_embeddings:
            check_optimizer(self.model.placement, config)


_AS_HERE = Recommendation.loss, Recommendation.predict  # neither overridden nor replaced


def _looked_up(
    batch: Batch,
) -> tuple[Tensor, Tensor | None, Sequence[int] | None, Tensor | None]:
    """Returns the arguments of `DLRM.look_up` from a batch."""
    return batch.categorical, batch.lengths, batch.samples_by_rank, batch.id_weights


def check_optimizer(placement: Placement, config: OptimizerConfig) -> None:
    """Raises ValueError for an L2 term of all rows if tables are sharded."""
    if config.embedding_l2 and config.embedding_l2_mode == "all" and not placement.is_whole:
        raise ValueError(
            f"--embedding_l2 {config.embedding_l2:g}: expected whole tables for rows that no batch "
            "looks up, but --placement divides tables; use --placement balanced, or "
            "--embedding_l2_mode looked_up"
        )
