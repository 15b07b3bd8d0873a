"""Click-through prediction by any network: binary cross-entropy, ROC AUC."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import ops
from dlrm.data.clicks.batch import Batch
from dlrm.distributed import World, gather
from dlrm.distributed.placement import Shard
from dlrm.metrics.clicks import click_metrics, fraction_metrics
from dlrm.model.layers.packed import mean_of_members
from dlrm.model.tables.joint import JointEmbedding
from dlrm.train.evaluation import evaluation_mode
from dlrm.train.log import Loader
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.optim.row_optimizers import table_optimizer
from dlrm.train.progress import raise_device_errors
from dlrm.train.reports.callbacks import LabelsAndScores
from dlrm.train.task import Task


class ClickTask(Task):
    """A network to train on clicks; examples/own_model.py has one.

    Args:
        model: `model(batch)` returns the logits of the samples of a `Batch`, `[samples]`. Its
            tables, if any, are modules that `dlrm.model.tables.joint.make_tables` makes.
        world: the processes that train together.
        auc_on_cpu: collect scores in host memory instead of on the device.
        has_clicks: labels are 0 or 1; otherwise they are fractions, evaluated by log loss only.

    Attributes:
        metric: selects the best checkpoint: the AUC, or the log loss without clicks.
        own_metrics: further metrics of tests, of one process with all rows; none by default.
        unscored: the first row of the last `evaluate` whose score was NaN or infinite, and that
            score; None if all were finite. It is the same on every rank.
    """

    loss_metric = "log_loss"

    def __init__(
        self,
        model: nn.Module,
        world: World = World(),
        auc_on_cpu: bool = False,
        has_clicks: bool = True,
    ):
        self.model, self.world = model, world
        self.auc_on_cpu, self.has_clicks = auc_on_cpu, has_clicks
        self.metric = "auc" if has_clicks else self.loss_metric
        self.unscored: tuple[int, float] | None = None
        self.own_metrics = LabelsAndScores()

    def loss(self, batch: Batch) -> Tensor:
        """Returns this process's share of the mean binary cross-entropy of a batch.

        With sample weights it is the weighted mean over all processes and micro-batches together;
        a batch whose weights are all 0 has the loss 0. Logits `[samples, members]` give the mean of
        the members' losses, so that the members learn independently. Logits of two passes with
        other dropout masks, `[samples, members, 2]`, give the loss of their mean probability and,
        in the gradients alone, the cross-entropy of each pass to that mean (Li et al., 2025,
        arXiv 2505.17999).
        """
        logits = self.predict(batch)
        if batch.weights is not None and batch.total_weight is not None:
            summed = _summed_loss(logits, batch.labels, batch.weights)
            weight = batch.total_weight
            return summed / torch.where(weight > 0, weight, 1).to(summed.dtype)
        divisor = batch.global_size or self.num_samples(batch)
        if logits.ndim == 1:
            return ops.logistic_loss(logits, batch.labels, divisor)
        return _summed_loss(logits, batch.labels) / divisor

    def predict(self, batch: Batch) -> Tensor:
        """Returns the logits of this process's samples of a batch."""
        return self.model(batch)

    @torch.no_grad()
    def infer(self, batch: Batch) -> Tensor:
        """Does the same as `predict`, without gradients."""
        return self.predict(batch)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        return batch.split(parts, self.world)

    def num_samples(self, batch: Batch) -> int:
        """Returns the samples of a batch in all processes."""
        return batch.num_samples

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns AUC, log loss, normalized entropy and calibration over a data set.

        For fractional labels it returns only the log loss. All are NaN if a score is NaN or
        infinite; `unscored` then names the row. Batches with weights give weighted metrics.

        Raises:
            ValueError: all sample weights are 0.
        """
        device = "cpu" if self.auc_on_cpu else self.world.device
        logits, labels, weights, rows, done = [], [], [], [], 0
        with self._tested(loader) as batches:
            for batch in batches:
                logits.append(self.infer(batch).to(device))
                labels.append(batch.labels.to(device))
                if batch.weights is not None:
                    weights.append(batch.weights.to(device))
                count = self.num_samples(batch)
                rows.append(done + self.world.part(count).start)
                done += count
        raise_device_errors(self.world)
        self.unscored = _first_unscored(logits, rows, self.world)
        metrics = click_metrics if self.has_clicks else fraction_metrics
        weight = torch.cat(weights) if weights else None
        scored = torch.cat(logits), torch.cat(labels)
        found = metrics(*scored, self.world, weight)
        if self.own_metrics.functions and self.unscored is None:
            scores = scored[0].double().sigmoid().float()
            found |= self.own_metrics(scored[1].cpu().numpy(), scores.cpu().numpy())
        return found

    @contextmanager
    def _tested(self, loader: Loader) -> Iterator[Generator[Batch, None, None]]:
        """Yields the batches of a test, with the model in evaluation mode."""
        with evaluation_mode(self.model), closing(loader.batches()) as batches:
            yield batches

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Returns the parameters of the tables, with sparse gradients, and the dense ones."""
        tables = [weight for weight, _ in self.table_parameters()]
        held = {id(weight) for weight in tables}
        return {
            "tables": tables,
            "dense": [p for p in self.model.parameters() if id(p) not in held],
        }

    def table_parameters(self) -> Sequence[tuple[nn.Parameter, Mapping[int, Shard]]]:
        """Returns the parameters that hold tables, each with its shards of tables by number."""
        return [one for tables in self._tables() for one in tables.table_parameters()]

    def _tables(self) -> list[JointEmbedding]:
        return [module for module in self.model.modules() if isinstance(module, JointEmbedding)]

    def optimizers(
        self, config: OptimizerConfig, one_look_up: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Returns the optimizers of the tables and of the rest, without those of frozen parts.

        Args:
            one_look_up: every step's gradient is that of one look-up of one id per sample and
                table: samples have no bags, and batches are not split into micro-batches. A GPU
                then updates small joint tables faster.

        Raises:
            ValueError: the configuration changes rows that no batch looks up.
        """
        self._check(config)
        groups = self.parameter_groups()
        result: list[torch.optim.Optimizer] = []
        if groups["tables"] and not config.freeze_embeddings:
            low, sizes = dict[Tensor, Tensor](), dict[Tensor, list[int]]()
            for own in self._tables():
                low |= own.lower_halves()
                sizes |= own.single_hot_table_sizes() if one_look_up else {}
            kind, l2 = config.embedding_optimizer, (config.embedding_l2, config.embedding_l2_mode)
            result.append(table_optimizer(kind, groups["tables"], low, sizes, *l2))
        if groups["dense"] and not config.freeze_mlps:
            kind, decay = config.mlp_optimizer, config.weight_decay
            result.append(dense_optimizer(kind, groups["dense"], decay))
        return result

    def _check(self, config: OptimizerConfig) -> None:
        if config.embedding_l2 and config.embedding_l2_mode == "all":
            raise ValueError(
                f"embedding_l2 {config.embedding_l2} of a network of your own: expected "
                'embedding_l2_mode="looked_up"'
            )


def _summed_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the sum of the samples' binary cross-entropies, averaged over members.

    Args:
        logits: `[samples]`, or `[samples, members]` for a packed ensemble in training, or
            `[samples, members, 2]` for two passes.
        labels: `[samples]`, or `[samples, members]`.
        weights: `[samples]`; None is 1 for each.
    """
    if logits.ndim == 1:
        return F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    if logits.ndim == 3:
        mean = mean_of_members(logits.flatten(0, 1)).view(logits.shape[:2])
        target = mean.detach().sigmoid()
        one, other = (_summed_loss(of, target, weights) for of in logits.unbind(2))
        apart = one + other
        return _summed_loss(mean, labels, weights) + (apart - apart.detach())
    labels = (labels.unsqueeze(1) if labels.ndim == 1 else labels).expand_as(logits)
    weights = None if weights is None else weights.unsqueeze(1)
    total = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    return total / logits.shape[1]


def _first_unscored(
    logits: Sequence[Tensor], rows: Sequence[int], world: World
) -> tuple[int, float] | None:
    """Returns the first row of all ranks whose score is NaN or infinite, and the score.

    `rows` are the first rows, among all, of the parts of batches whose `logits` this rank has.
    """
    own = None
    if not torch.cat(list(logits)).isfinite().all():
        own = next(
            (first + int(wrong[0]), float(part[wrong[0]]))
            for first, part in zip(rows, logits, strict=True)
            if len(wrong := part.isfinite().logical_not().nonzero())
        )
    found = [theirs for theirs in gather(own, world) if theirs is not None]
    return min(found, key=lambda one: one[0], default=None)
