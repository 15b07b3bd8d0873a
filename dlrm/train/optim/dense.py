"""Optimizers: torch's own for dense parameters, and one-pass updates of the rows of a table.

The row optimizers take the gradient of `ops.joint_embedding` as it comes, (rows, values) with rows
repeated, and change in place only the rows that the batch touched.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm import ops
from dlrm.train.optim.lamb import LAMB_FLAVOURS, Lamb

DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam")
NETWORK_OPTIMIZERS = ("sgd", "momentum", "nesterov", "rmsprop_tf", "adam", "adamw", "lamb")
TABLE_OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam")

Weights = Iterable[Tensor] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizers; field names are those of the command line's flags.

    Attributes:
        embedding_optimizer: of the tables: "sgd", "adagrad", "row_wise_adagrad" or "adam" (lazy:
            only touched rows).
        mlp_optimizer: of everything else: "sgd", "adagrad" or "adam".
        freeze_embeddings: compute gradients of the tables but do not update them.
        freeze_mlps: the same for everything else.

    Raises:
        ValueError: an unknown optimizer; flag and value are named.
    """

    embedding_optimizer: str = "sgd"
    mlp_optimizer: str = "sgd"
    freeze_embeddings: bool = False
    freeze_mlps: bool = False

    def __post_init__(self) -> None:
        for flag, kinds in (
            ("embedding_optimizer", TABLE_OPTIMIZERS),
            ("mlp_optimizer", DENSE_OPTIMIZERS),
        ):
            if getattr(self, flag) not in kinds:
                raise ValueError(f"--{flag} {getattr(self, flag)}: expected one of {kinds}")


def dense_optimizer(kind: str, parameters: Iterable[Tensor]) -> Optimizer:
    """Returns torch's fused SGD, Adagrad or Adam, with the learning rate as a device scalar."""
    parameters = list(parameters)
    lr = torch.zeros((), device=parameters[0].device)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, fused=True)
    if kind == "adagrad":
        return Adagrad(parameters, lr=lr, fused=True)
    return torch.optim.Adam(parameters, lr=lr, fused=True)


@dataclass(frozen=True)
class NetworkOptimizerConfig:
    """The optimizer of a network without tables; field names are those of the flags.

    Attributes:
        optimizer: "sgd"; "momentum" or "nesterov": torch's SGD with it; "rmsprop_tf": see
            `RMSpropTF`; "adam" or, with decoupled weight decay, "adamw"; "lamb": see `Lamb`.
        momentum: of "momentum", "nesterov" and "rmsprop_tf".
        rmsprop_decay: weight of the past in the mean squares of "rmsprop_tf".
        optimizer_eps: added to what is divided by; None: 1e-3 for "rmsprop_tf", 1e-6 for "lamb",
            else 1e-8.
        adam_betas: weights of the past in the moments of "adam", "adamw" and "lamb".
        lamb_flavour: one of `LAMB_FLAVOURS`.
        lamb_max_weight_norm: greatest norm of weights that sizes a step of "lamb"; None: any.
        weight_decay: added to gradients times the weights, but for "adamw" and "lamb".
        decay_norm_and_bias: decay weights of norms and biases, too.

    Raises:
        ValueError: an impossible value; flag and value are named.
    """

    optimizer: str = "momentum"
    momentum: float = 0.9
    rmsprop_decay: float = 0.9
    optimizer_eps: float | None = None
    adam_betas: tuple[float, float] = (0.9, 0.999)
    lamb_flavour: str = "nvlamb"
    lamb_max_weight_norm: float | None = None
    weight_decay: float = 0.0
    decay_norm_and_bias: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in NETWORK_OPTIMIZERS:
            raise ValueError(f"--optimizer {self.optimizer}: expected one of {NETWORK_OPTIMIZERS}")
        shares = {"momentum": self.momentum, "rmsprop_decay": self.rmsprop_decay}
        for flag, value in (*shares.items(), *(("adam_betas", beta) for beta in self.adam_betas)):
            if not 0 <= value < 1:
                raise ValueError(f"--{flag} {value}: expected 0 or more, less than 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight_decay {self.weight_decay}: expected 0 or more")
        for flag in ("optimizer_eps", "lamb_max_weight_norm"):
            value = getattr(self, flag)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{flag} {value}: expected a number above 0")
        if self.lamb_flavour not in LAMB_FLAVOURS:
            raise ValueError(
                f"--lamb_flavour {self.lamb_flavour}: expected one of {tuple(LAMB_FLAVOURS)}"
            )


def network_optimizer(config: NetworkOptimizerConfig, model: nn.Module) -> Optimizer:
    """Returns the optimizer of all parameters of a model that are trained.

    Decayed are weights of two dimensions or more, hence neither biases nor those of norms, unless
    the configuration says so.

    Raises:
        ValueError: Adam's moments would have 16 bits.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer in ("adam", "adamw") and any(p.element_size() < 4 for p in trained):
        raise ValueError(
            f"--optimizer {config.optimizer} keeps its moments in the weights' 16 bits under "
            "--precision 16.16, which round 1 - beta away; --precision 16.32 has 32 bits"
        )
    groups = [
        {
            "params": [p for p in trained if (p.ndim > 1 or config.decay_norm_and_bias) == decayed],
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    lr = torch.zeros((), device=trained[0].device)
    eps = config.optimizer_eps or {"rmsprop_tf": 1e-3, "lamb": 1e-6}.get(config.optimizer, 1e-8)
    if config.optimizer == "lamb":
        limit = config.lamb_max_weight_norm or math.inf
        return Lamb(groups, lr, config.lamb_flavour, config.adam_betas, eps, limit)
    if config.optimizer == "rmsprop_tf":
        return RMSpropTF(groups, lr, config.rmsprop_decay, config.momentum, eps)
    if config.optimizer in ("adam", "adamw"):
        make = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return make(groups, lr=lr, betas=config.adam_betas, eps=eps, fused=True)
    momentum = 0.0 if config.optimizer == "sgd" else config.momentum
    nesterov = config.optimizer == "nesterov" and momentum > 0
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    for weight in trained if momentum else ():
        # torch leaves it uninitialised where the first step of all is skipped for an overflow.
        sgd.state[weight]["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
    return sgd


def table_optimizer(
    kind: str,
    parameters: Iterable[Tensor],
    native: bool,
    low: Mapping[Tensor, Tensor] | None = None,
    table_sizes: Mapping[Tensor, Sequence[int]] | None = None,
) -> Optimizer:
    """Returns the optimizer of embedding tables.

    Args:
        kind: one of `TABLE_OPTIMIZERS`.
        parameters: weights `[rows, dim]` with sparse gradients.
        native: one of the row optimizers below; else torch's own for sparse gradients.
        low: the lower halves (int16) of each bfloat16 weight; row optimizers change both.
        table_sizes: rows of the tables of a weight, where `RowOptimizer` may know them.

    Raises:
        ValueError: torch has no such optimizer for sparse gradients.
    """
    parameters = list(parameters)
    if native:
        low, table_sizes = low or {}, table_sizes or {}
        groups = [
            {"params": [weight], "low": low.get(weight), "table_sizes": table_sizes.get(weight)}
            for weight in parameters
        ]
        return ROW_OPTIMIZERS[kind](groups, torch.zeros((), device=parameters[0].device))
    if kind == "row_wise_adagrad":
        raise ValueError(
            "--embedding_optimizer row_wise_adagrad needs --embedding_type joint_fused"
        )
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.0)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.0)
    return torch.optim.SparseAdam(parameters, lr=1.0)


def set_learning_rate(optimizers: Iterable[Optimizer], value: float) -> None:
    """Sets the learning rate of every parameter group, in place where it is a device scalar."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


def handles_loss_scale(optimizer: Optimizer) -> bool:
    """Whether `optimizer.grad_scale` and `optimizer.found_inf` are heeded on the device."""
    ours = isinstance(optimizer, RowOptimizer | RMSpropTF | Lamb)
    return ours or bool(optimizer.defaults.get("fused"))


class Adagrad(torch.optim.Adagrad):
    """torch's fused Adagrad of dense gradients, without a wait for the device.

    torch 2.11 has its kernel for CUDA, and its class refuses to use it there. In checkpoints it is
    torch's, whose name and state it has.
    """

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # where it is not 0, nothing is updated

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "no closure"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            torch._fused_adagrad_(
                weights,
                [weight.grad for weight in weights],
                [self.state[weight]["sum"] for weight in weights],
                steps,
                lr=group["lr"],
                lr_decay=group["lr_decay"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))


class RMSpropTF(Optimizer):
    """RMSprop as TensorFlow has it: s = d*s + (1-d)*g^2 from s = 1; m = mu*m + lr*g/sqrt(s+eps).

    The weights lose m. torch's adds eps to the root, starts s at 0 and keeps the rate out of m.

    Args:
        groups: weights, or groups of them, with `weight_decay`: g grows by it times the weight.
        lr: learning rate, a scalar on the weights' device.
        decay: d.
        momentum: mu.
        eps: of the formula.
    """

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # where it is not 0, nothing is updated

    def __init__(self, groups: Weights, lr: Tensor, decay: float, momentum: float, eps: float):
        defaults = {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for weight in group["params"]:
                wide = _widened(weight.detach())  # in 16 bits, 1 - d would be rounded away
                self.state[weight]["square"] = torch.ones_like(wide)
                self.state[weight]["momentum"] = torch.zeros_like(wide)

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "no closure"
        found_inf = self.found_inf
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            kept = self._kept(weights)
            self._update(weights, [w.grad for w in weights if w.grad is not None], group)
            for tensor, old in kept:
                assert found_inf is not None
                tensor.copy_(torch.where(torch.eq(found_inf, 0), tensor, old))

    def _update(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        squares = [self.state[weight]["square"] for weight in weights]
        moments = [self.state[weight]["momentum"] for weight in weights]
        grads = [_widened(grad) for grad in grads]
        if self.grad_scale is not None:
            grads = list(torch._foreach_div(grads, self.grad_scale))
        if group["weight_decay"]:
            decayed = [_widened(weight) for weight in weights]
            grads = list(torch._foreach_add(grads, decayed, alpha=group["weight_decay"]))
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, grads, grads, 1 - group["decay"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        steps = torch._foreach_div(grads, roots)
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_mul_(moments, group["momentum"])
        torch._foreach_add_(moments, steps)
        torch._foreach_sub_(weights, moments)

    def _kept(self, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Under a loss scale, each tensor that a step changes with a copy of it."""
        if self.found_inf is None:
            return []
        states = (state for weight in weights for state in self.state[weight].values())
        return [(tensor, tensor.clone()) for tensor in (*weights, *states)]


def _widened(value: Tensor) -> Tensor:
    """The value in float32 where it has 16 bits, else itself."""
    return value.float() if value.element_size() < 4 else value


class RowOptimizer(Optimizer):
    """Updates in place the rows named by sparse gradients; see the subclasses.

    Args:
        parameters: weights `[rows, dim]`, or groups of them; a bfloat16 weight is in a group of its
            own, whose option "low" is its lower halves (`ops.split_float32`). A group's option
            "table_sizes", see `ops.row_sgd_`, says that every gradient is that of one look-up of
            one row of each table; torch merges the rows of several, even where it leaves repeats.
        lr: learning rate, a scalar on the weights' device.
        options: the subclass's own.
    """

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # where it is not 0, nothing is updated

    def __init__(self, parameters: Weights, lr: Tensor, **options: float):
        super().__init__(parameters, {"lr": lr, "low": None, "table_sizes": None, **options})
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad_dtype = None  # half-precision gradients come as they are, uncopied
                self.state[weight].update(self.initial_state(weight))

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        assert closure is None, "row optimizers take no closure"
        for group in self.param_groups:
            for weight in group["params"]:
                if (grad := weight.grad) is not None:
                    self.update(weight, grad._indices()[0], grad._values(), group)

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        raise NotImplementedError

    def options(self, group: dict) -> dict[str, Any]:
        """What every row update takes."""
        return {
            "low": group["low"],
            "table_sizes": group["table_sizes"],
            "grad_scale": self.grad_scale,
            "found_inf": self.found_inf,
        }


class RowSGD(RowOptimizer):
    """w -= lr * g."""

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        ops.row_sgd_(weight, rows, grad, group["lr"], **self.options(group))


class RowAdagrad(RowOptimizer):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as torch.optim.Adagrad (Duchi et al., 2011)."""

    kernel = staticmethod(ops.row_adagrad_)

    def __init__(self, parameters: Weights, lr: Tensor, eps: float = 1e-10):
        super().__init__(parameters, lr, eps=eps)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.zeros_like(weight, dtype=torch.float32)}

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        self.kernel(
            weight,
            self.state[weight]["sum"],
            rows,
            grad,
            group["lr"],
            eps=group["eps"],
            **self.options(group),
        )


class RowWiseAdagrad(RowAdagrad):
    """Adagrad with one state a row, the sum of the mean squared gradient: 1/dim of the memory."""

    kernel = staticmethod(ops.row_wise_adagrad_)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {"sum": weight.new_zeros(len(weight), dtype=torch.float32)}


class RowAdam(RowOptimizer):
    """Adam (Kingma and Ba, 2015) on touched rows alone, as torch.optim.SparseAdam."""

    def __init__(
        self,
        parameters: Weights,
        lr: Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ):
        super().__init__(parameters, lr, beta1=beta1, beta2=beta2, eps=eps)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {
            "exp_avg": torch.zeros_like(weight, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32),
            "step": torch.zeros((), device=weight.device),
        }

    def update(self, weight: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        state = self.state[weight]
        ops.row_adam_(
            weight,
            state["exp_avg"],
            state["exp_avg_sq"],
            rows,
            grad,
            group["lr"],
            state["step"] + 1,
            betas=(group["beta1"], group["beta2"]),
            eps=group["eps"],
            **self.options(group),
        )
        state["step"] += 1 if self.found_inf is None else self.found_inf == 0


ROW_OPTIMIZERS: dict[str, Callable[[Weights, Tensor], RowOptimizer]] = {
    "sgd": RowSGD,
    "adagrad": RowAdagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": RowAdam,
}
