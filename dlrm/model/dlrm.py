"""Deep Learning Recommendation Model (Naumov et al., 2019, arXiv 1906.00091)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlrm import ops
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.layers.attention import TargetAttention
from dlrm.model.layers.choices import ATTENTION, NO_EMBEDDING
from dlrm.model.layers.interaction import NativeDot
from dlrm.model.layers.mlp import MLP, LinearReLU
from dlrm.model.layers.numerical_embedding import PiecewiseLinear
from dlrm.model.layers.packed import mean_of_members
from dlrm.model.score import make_scores
from dlrm.model.tables.initial import Initial
from dlrm.model.tables.joint import JointEmbedding, LookUp, TableParameters, make_tables
from dlrm.model.tables.layout import Attended, Bags
from dlrm.ops.library import is_native_on_cpu
from dlrm.step_clock import LOOKUP, part


class DLRM(nn.Module):
    """Bottom MLP and embeddings, their interaction, top MLP, and the options of `DLRMConfig`.

    With several processes each holds whole tables, or shards of tables, and looks them up for the
    global batch; the processes exchange the vectors while the bottom MLP runs on their own samples.

    Args:
        world: the processes that train together. On the device "meta", which is also used where it
            is torch's default device, nothing has values and no file is made, but everything has
            its shape.
        dtype: dtype in which the MLPs and the interaction compute. Their parameters are float32;
            the last layer and the logits are always float32.
        seed: seed of the initial values, which depend only on it and on the parameter's name.
        optimized_mlp: run the native operator in place of the modules where it can be, see
            `native_parameters`.
        files: directory for the tables' files, see `mapped_zeros`; None keeps them in memory.

    Attributes:
        fields_by_rank: the categorical fields whose ids each process takes.
        products: "native" or "torch", see `ops.choose_products`: whose matrix products a CPU uses.
        attention: the activation unit of each attended list, by number of its field.
        numerical_embedding: embedding of the numerical fields, or None.
        wide: the weights of ids that are added to the logit, or None.
        scores: the layers after the exchange, of the model, which also has them as attributes of
            its own (`interact`, `top_mlp`, `output`, `cross`, `adapters`), or of each of the
            `members` of a mixed ensemble.

    Raises:
        ValueError: `batch_norm` with several processes.
    """

    def __init__(
        self,
        config: DLRMConfig,
        world: World = World(),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        optimized_mlp: bool = True,
        files: str | None = None,
    ):
        super().__init__()
        if config.batch_norm and world.size > 1:
            raise ValueError(
                f"--batch_norm: expected one process, got {world.size}: each would normalize by "
                "the statistics of its own samples"
            )
        if torch.get_default_device().type == "meta":  # as torch's own modules
            world = replace(world, device="meta")
        self.config, self.dtype = config, dtype
        self.world, self.placement = world, config.placed(world.size)
        self.fields_by_rank = self.placement.fields_by_rank(config.tables)
        self.embeddings = make_tables(config, self.placement, world, seed, files)
        self.wide = self.embeddings.wide_twin() if config.wide else None
        with torch.device("meta" if world.device == "meta" else "cpu"):  # not the caller's
            self._make_buffers()
            self._make_network(seed)
        self.products = ops.choose_products(dtype) if optimized_mlp else "torch"
        self._unchanged: _Unchanged | None = None  # in a block of `weights_unchanged`
        self.to(world.device)

    def _make_buffers(self) -> None:
        """Makes what depends on the fields of this process: their tables' rows, and poolings."""
        own, rows = self.fields_by_rank[self.world.rank], self.config.embedding_rows
        of_fields = self.config.tables
        self.table_rows: torch.Tensor
        own_rows = torch.tensor([rows[of_fields[field]] for field in own], dtype=torch.int64)
        self.register_buffer("table_rows", own_rows, persistent=False)
        own_poolings = (self.config.poolings[field] for field in own)
        poolings = ["sum" if pooling == ATTENTION else pooling for pooling in own_poolings]
        attended = self.config.attended.items()
        self._attended = [(own.index(f), own.index(target)) for f, target in attended if f in own]
        kinds = sorted({*poolings}) or ["sum"]
        self._pooling = kinds[0] if len(kinds) == 1 else None  # by weights of ids
        self.mean_tables: torch.Tensor
        means = torch.tensor([pooling == "mean" for pooling in poolings], dtype=torch.bool)
        self.register_buffer("mean_tables", means, persistent=False)

    def _make_network(self, seed: int) -> None:
        """Makes everything but the tables, on torch's default device."""
        config, dim = self.config, self.config.embedding_dim
        num_fields = config.num_numerical_features
        self.bottom_mlp = MLP(num_fields, config.bottom_mlp_sizes, seed, "bottom_mlp", self.dtype)
        self.attention = TargetAttention(config.attended, dim, config.attention_hidden, seed)
        self.numerical_embedding: PiecewiseLinear | None = None
        if config.numerical_embedding != NO_EMBEDDING:
            sizes = num_fields, dim, config.numerical_bins
            self.numerical_embedding = PiecewiseLinear(*sizes, seed)
        self.scores = make_scores(config, seed, self.dtype)
        if config.kinds:
            self.members = nn.ModuleList(self.scores)
            return
        (only,) = self.scores
        self.interact, self.top_mlp, self.output = only.interact, only.top_mlp, only.output
        self.cross, self.adapters = only.cross, only.adapters

    @property
    def products(self) -> str:
        """The matrix products that a CPU uses; see the class."""
        return self._products

    @products.setter
    def products(self, products: str) -> None:
        self._products = products
        for module in self.modules():
            if isinstance(module, LinearReLU):
                module.products = products

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what a block of `weights_unchanged` keeps: a copy outlives the block."""
        return {**self.__dict__, "_unchanged": None}

    def forward(
        self,
        numerical: Tensor,
        categorical: Tensor,
        lengths: Tensor | None = None,
        samples_by_rank: Sequence[int] | None = None,
        id_weights: Tensor | None = None,
        received: Sequence[Callable[[], Tensor]] | None = None,
    ) -> Tensor:
        """Returns logits, float32 `[samples]`.

        For an ensemble, the logits are those of the mean of the members' probabilities; in training
        mode they are the members' own, `[samples, members]`, and with `self_ensemble` those of two
        passes with other dropout masks, `[samples, members, 2]`.

        Args:
            numerical: `[samples, num_numerical_features]`, any floating dtype. Samples are those of
                this process, `World.part(batch)`.
            categorical: ids `[batch, own fields]`, any integer dtype; with `lengths`, `[total]`,
                bag after bag as `ops.joint_embedding` takes them.
            lengths: number of ids of each sample and field, `[batch, own fields]`; None is one id
                each.
            samples_by_rank: number of samples of each process in the batch; None is `World.part`.
            id_weights: with `lengths`, a factor for the row of each id, `[total]` float32; None is
                1 for each. A mean divides by the number of ids, not by the sum of weights.
            received: the result of `look_up` for this batch; None looks up now.

        Raises:
            RuntimeError: an id is outside its table, or lengths do not fit the ids; on the CPU the
                message names table, row and value.
        """
        native, tables = None, None
        if not torch.is_grad_enabled() and is_native_on_cpu(numerical, categorical):
            kept = None if self.training else self._unchanged
            native, tables = kept or (self.native_parameters(numerical), None)
        if native and tables and lengths is None and received is None:
            weight, offsets = tables
            rows = ops.Rows(weight, self._hashed(categorical, None), offsets, self.dtype)
            return ops.network(numerical.to(self.dtype), rows, native)
        if received is None:
            received = self.look_up(
                categorical, lengths, samples_by_rank, id_weights, graph=native is None
            )
        if native:
            embeddings, added = self._received(numerical, received)
            logits = ops.network(numerical.to(self.dtype), embeddings, native)
            return logits if added is None else logits + added
        with _own_dtype(numerical):
            return self._logits(numerical, received)

    def _logits(self, numerical: Tensor, received: Sequence[Callable[[], Tensor]]) -> Tensor:
        """Runs the modules; see `forward`."""
        dense = self.bottom_mlp(numerical.float())
        embeddings, added = self._received(numerical, received)
        logits = self._of_vectors(dense, embeddings)
        if self.training and self.config.self_ensemble:
            logits = torch.stack([logits, self._of_vectors(dense, embeddings)], -1)
        elif self.config.packed == 1 and not self.config.kinds:
            logits = logits.squeeze(1)
        if added is not None:
            logits = logits + added.view(-1, *[1] * (logits.ndim - 1))
        if logits.ndim == 1 or self.training:
            return logits
        return mean_of_members(logits).squeeze(1)

    def _of_vectors(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return torch.cat([score(dense, embeddings) for score in self.scores], 1)

    def native_parameters(self, inputs: Tensor) -> ops.NetworkParameters | None:
        """Returns the weights for `ops.network`, which then runs in place of the modules.

        It is None, and the modules run, on a GPU and in one of several processes, with
        `products` "torch", for other layers than MLPs, dots and a logit, with dropout, for other
        dtypes, in compiled and traced models, and wherever a module or a parameter has hooks, or a
        module a `forward` of its own.

        Args:
            inputs: a tensor on the device of the inputs.
        """
        bottom, score, *others = self.bottom_mlp, *self.scores
        if self.products != "native" or self.world.size > 1 or not is_native_on_cpu(inputs):
            return None
        if others or score.top_mlp.drops():
            return None
        if score.cross is not None or score.adapters is not None:
            return None
        if type(self).forward is not DLRM.forward or any(map(_is_changed, self.modules())):
            return None
        kinds = [type(one) for one in (bottom, score.top_mlp, score.interact, score.output)]
        if kinds != [MLP, MLP, NativeDot, nn.Linear]:
            return None
        layers = bottom.fused_layers(), score.top_mlp.fused_layers()
        weights = [[layer.weight for layer in own] for own in layers]
        biases = [[layer.bias for layer in own] for own in layers]
        logit = score.output.weight, score.output.bias
        parameters = ops.NetworkParameters(weights[0], biases[0], weights[1], biases[1], *logit)
        narrow = any(one.dtype != torch.float32 for one in parameters.tensors())
        return None if narrow or not parameters.are_native(self.dtype) else parameters

    def add_gradients(
        self,
        parameters: ops.NetworkParameters,
        numerical: Tensor,
        received: Sequence[Callable[[], Tensor]],
        labels: Tensor,
        divisor: float,
    ) -> Tensor:
        """Adds the gradients of `ops.logistic_loss` of the logits to those of all parameters.

        The gradients of the MLPs and the vectors come from `ops.network_gradients`. Vectors of a
        `LookUp` give theirs to their tables; autograd does the rest.

        Args:
            parameters: result of `native_parameters`.
            numerical, received: see `forward`.
            labels, divisor: see `ops.logistic_loss`.

        Returns:
            The loss, a scalar without a graph.
        """
        embeddings, added = self._received(numerical, received)
        found = ops.network_gradients(
            numerical.to(self.dtype), embeddings, parameters, labels, divisor, added
        )
        for parameter, grad in zip(parameters.tensors(), found.parameters, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
        fields = embeddings.shape[1] - len(self.config.table_sizes)
        grads = found.embeddings[:, fields:], found.added_logits[:, None, None]
        for look_up, grad in zip(received, grads, strict=False):
            if isinstance(look_up, LookUp):
                look_up.add_gradient(grad.expand_as(look_up.vectors))
        ends = {embeddings: found.embeddings}
        if added is not None:
            ends[added] = found.added_logits
        ends = {end: grad for end, grad in ends.items() if end.requires_grad}
        if ends:
            torch.autograd.backward([*ends], [*ends.values()])
        return found.loss

    def _received(
        self, numerical: Tensor, received: Sequence[Callable[[], Tensor]]
    ) -> tuple[Tensor, Tensor | None]:
        """Waits for vectors; returns those of all fields, and the wide term's logits, if any."""
        numbers = self.numerical_embedding
        vectors = None if numbers is None else numbers(numerical).to(self.dtype)
        embeddings, *weights = (wait() for wait in received)
        if vectors is not None:
            embeddings = torch.cat([vectors, embeddings], 1)
        return embeddings, weights[0].sum((1, 2)) if weights else None

    def look_up(
        self,
        categorical: Tensor,
        lengths: Tensor | None = None,
        samples_by_rank: Sequence[int] | None = None,
        id_weights: Tensor | None = None,
        graph: bool = True,
    ) -> list[Callable[[], Tensor]]:
        """Looks rows up, and starts to exchange their vectors; see `forward`.

        Args:
            categorical, lengths, samples_by_rank, id_weights: see `forward`.
            graph: False, for `add_gradients`, returns instances of `LookUp` where it can.

        Returns:
            Functions that wait for the vectors of this process's samples, one for the tables and,
            if any, one for the wide term. Gradients flow to the rows looked up, even if their
            values have changed in the meantime.
        """
        categorical = self._hashed(categorical, lengths)
        if self._attended and lengths is None:
            lengths, categorical = torch.ones_like(categorical), categorical.flatten()
        pooling = self._pooling or "sum"
        bags = Bags(categorical, lengths, id_weights, pooling, samples_by_rank)
        if lengths is not None and self._pooling is None:
            bags = self._as_sums(bags)
        with part(LOOKUP):
            found = [self.embeddings.look_up(self._with_attention(bags), self.dtype, graph)]
            if self.wide is not None:
                found.append(self.wide.look_up(bags, torch.float32, graph))
            return found

    def _with_attention(self, bags: Bags) -> Bags:
        """Returns bags with the activation units of this process's attended lists."""
        if not self._attended:
            return bags
        own = self.fields_by_rank[self.world.rank]
        units = self.attention.operands(own[column] for column, _ in self._attended)
        return bags._replace(attended=Attended(self._attended, units))

    def _as_sums(self, bags: Bags) -> Bags:
        """Returns bags of tables with mixed poolings, whose means become weighted sums."""
        assert bags.lengths is not None
        counts = torch.where(self.mean_tables, bags.lengths, 1).clamp(min=1)
        bag_of = ops.bags_of_ids(bags.ids, bags.lengths)
        shares = counts.float().reciprocal().flatten()[bag_of]
        weights = shares if bags.weights is None else shares * bags.weights
        return bags._replace(weights=weights, pooling="sum")

    def rows(self, categorical: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns the rows of the joint table that a batch looks up; see `JointEmbedding.rows`."""
        return self.embeddings.rows(Bags(self._hashed(categorical, lengths), lengths))

    def _hashed(self, categorical: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns ids, modulo the rows of their table with `hash_indices`."""
        if not self.config.hash_indices:
            return categorical
        rows = self.table_rows
        if lengths is None and categorical.shape[1:] != rows.shape:
            raise RuntimeError(f"expected ids [batch, {len(rows)}], got {[*categorical.shape]}")
        if lengths is not None:
            rows = rows.expand(lengths.shape).flatten()[ops.bags_of_ids(categorical, lengths)]
        return categorical.remainder(rows)

    def table_parameters(self) -> TableParameters:
        """Returns the parameters that hold tables; see `JointEmbedding.table_parameters`.

        The wide weights of table i are table `number of tables + i`, of one column.
        """
        return [one for tables in self._all_tables() for one in tables.table_parameters()]

    @staticmethod
    def appended_rows(
        flags: Mapping[str, Any], table: int, shape: tuple[int, int], first: int
    ) -> Tensor:
        """Returns initial values of rows that are appended to a table; see `Initial.added_rows`.

        Args:
            flags: those of the run that made the table; absent ones have their defaults.
        """
        defaults = {field.name: field.default for field in fields(DLRMConfig)}
        own = {"seed": 0, **defaults, **flags}
        std = own["embedding_init_std"] if own["embedding_init"] == "normal" else None
        initial = Initial(own["seed"], own["embedding_init_scale"], std)
        return initial.added_rows(table, shape, first)

    def _all_tables(self) -> list[JointEmbedding]:
        return [self.embeddings] if self.wide is None else [self.embeddings, self.wide]

    @property
    def random(self) -> torch.Generator | None:
        """The generator that dropout draws from; None is torch's default one. It can be set."""
        return self.bottom_mlp.random

    @random.setter
    def random(self, random: torch.Generator | None) -> None:
        for layers in self._mlps():
            layers.random = random

    def _mlps(self) -> list[MLP]:
        return [module for module in self.modules() if isinstance(module, MLP)]

    @contextmanager
    def weights_unchanged(self) -> Iterator[None]:
        """Decides once for all passes of the block whether the native operator runs.

        The block must not change weights, layers or hooks.
        """
        parameters = self.native_parameters(self.table_rows)
        if parameters is not None:
            alone = self.wide is None and self.numerical_embedding is None and not self._attended
            tables = self.embeddings.weight, self.embeddings.table_offsets
            self._unchanged = parameters, tables if alone else None
        try:
            yield
        finally:
            self._unchanged = None


# Parameters of `ops.network`; weight and offsets of the tables, if it can look them up itself.
_Unchanged = tuple[ops.NetworkParameters, tuple[Tensor, Tensor] | None]


def _is_changed(module: nn.Module) -> bool:
    """Returns whether a module or a parameter of it has hooks, or the module another `forward`."""
    hooks: list[Any] = [
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    ]
    for parameter in module._parameters.values():
        if parameter is not None:
            hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    return any(hooks) or "forward" in module.__dict__


def _own_dtype(values: Tensor) -> AbstractContextManager:
    """Returns a context without the caller's autocast: layers have dtypes of their own."""
    device = values.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
