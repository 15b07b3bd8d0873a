"""Layers of a user's own: modules that are registered by name, made, called and checked.

A registered class is made like a built-in layer, whatever the process, its initial values depend
only on the seed and the name, and the shape of its output is known from a call with two samples.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from dlrm.model.layers.choices import BUILT_IN, OWN
from dlrm.model.layers.initialize import generator
from dlrm.model.layers.interaction import Interaction
from dlrm.model.layers.mlp import MLP
from dlrm.model.layers.numerical_embedding import NumericalEmbedding

Made = TypeVar("Made", bound=Callable[..., nn.Module])
_SAMPLES = 2  # of the call that tells the shape of an output
_SEEDED = threading.Lock()  # torch's default generator is that of all threads


def register_interaction(name: str) -> Callable[[Made], Made]:
    """Registers a module of yours as an interaction, which `interaction_op` then takes by its name.

    Use it as a decorator of a class. It is made as `Mine(num_vectors, dim)`, with the number of
    vectors of a sample and their size. Its `forward(dense, embeddings)` gets the vector of the
    bottom MLP, `[samples, dim]`, and those of numerical and categorical fields, `[samples,
    num_vectors - 1, dim]`. It returns `[samples, width]` of any width, the input of the top MLP.

    Args:
        name: an identifier. A later registration of the same name replaces an earlier one.

    Raises:
        ValueError: the name is none, or is that of a built-in layer.
    """
    return _register("interaction_op", name)


def register_numerical_embedding(name: str) -> Callable[[Made], Made]:
    """Registers a module of yours for the vectors of numerical fields: `numerical_embedding`.

    Use it as a decorator of a class. It is made as `Mine(num_fields, dim)`. Its
    `forward(numerical)` gets float32 `[samples, num_fields]` and returns the vectors of all fields,
    `[samples, num_fields, dim]`. They enter the interaction besides that of the bottom MLP.

    Args:
        name: an identifier. A later registration of the same name replaces an earlier one.

    Raises:
        ValueError: the name is none, or is that of a built-in layer.
    """
    return _register("numerical_embedding", name)


def register_top_mlp(name: str) -> Callable[[Made], Made]:
    """Registers a module of yours instead of the hidden layers of the top MLP: `top_mlp`.

    Use it as a decorator of a class. It is made as `Mine(num_inputs, sizes)`, with the width of the
    interaction and the hidden sizes in `top_mlp_sizes`, which it may ignore. Its `forward(inputs)`
    gets `[samples, num_inputs]` and returns `[samples, width]` of any width, from which a linear
    layer makes the logit.

    Args:
        name: an identifier. A later registration of the same name replaces an earlier one.

    Raises:
        ValueError: the name is none, or is that of a built-in layer.
    """
    return _register("top_mlp", name)


def _register(setting: str, name: str) -> Callable[[Made], Made]:
    if not isinstance(name, str):
        raise ValueError(
            f"{setting}: expected a name in parentheses before the class, got {name!r}"
        )
    if not name.isidentifier() or hasattr(nn.ModuleDict, name) or name in BUILT_IN[setting]:
        raise ValueError(
            f"{setting} {name!r}: expected an identifier that names neither a layer of the package "
            "nor a method of torch.nn.ModuleDict"
        )

    def add(made: Made) -> Made:
        OWN[setting][name] = made
        return made

    return add


class OwnLayer(nn.Module):
    """Calls a registered module and checks the shape of its output.

    Args:
        setting: the setting that names it.
        sizes: the arguments with which it is made.
        inputs: shape of each of its inputs, without the samples.
        seed: seed of its initial values, which also depend on its name.

    Attributes:
        shape: shape of its output, without the samples.

    Raises:
        ValueError: it cannot be made or called, is no module, has weights that are not float32, or
            returns no tensor of floating-point numbers with a row for each sample.
    """

    def __init__(
        self,
        setting: str,
        name: str,
        sizes: Sequence[int | Sequence[int]],
        inputs: Sequence[Sequence[int]],
        seed: int,
    ) -> None:
        super().__init__()
        self.title = f"{setting} {name}"
        examples = [torch.zeros(_SAMPLES, *shape) for shape in inputs]
        with _seeded(seed, f"{setting}.{name}"), torch.no_grad():
            try:
                self.module = OWN[setting][name](*sizes)
            except Exception as error:
                raise ValueError(f"{self.title}: cannot be made with {sizes}: {error}") from error
            self._check_module()
            output = self._called(examples)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            got = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"{self.title}: expected a tensor of floating-point numbers, got {got}"
            )
        self.shape = [*output.shape[1:]]
        if not output.ndim or len(output) != _SAMPLES:
            raise self._of_another_shape(examples, output, ["width"])

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.module(*inputs)
        if [*output.shape] != [len(inputs[0]), *self.shape]:
            raise self._of_another_shape(inputs, output, self.shape)
        return output

    def expect(self, *shape: int | str) -> None:
        """Raises ValueError for an output of another shape; texts stand for any number."""
        same = all(isinstance(a, str) or a == b for a, b in zip(shape, self.shape, strict=False))
        if len(shape) != len(self.shape) or not same:
            raise ValueError(
                f"{self.title}: expected an output {_listed('samples', *shape)}, got "
                f"{_listed('samples', *self.shape)} from {type(self.module).__name__}"
            )

    def _check_module(self) -> None:
        if not isinstance(self.module, nn.Module):
            got = type(self.module).__name__
            raise ValueError(f"{self.title}: expected a torch.nn.Module, got {got}")
        if "_parameters" not in vars(self.module):
            raise ValueError(f"{self.title}: expected an __init__ that calls super().__init__()")
        for name, weight in self.module.named_parameters():
            if not isinstance(weight, nn.UninitializedParameter) and weight.dtype != torch.float32:
                raise ValueError(
                    f"{self.title}: expected float32 weights, got {weight.dtype} for {name}"
                )

    def _called(self, examples: Sequence[Tensor]) -> object:
        """Returns the output for two samples, in evaluation mode: no statistics change."""
        try:
            return self.module.eval()(*examples)
        except Exception as error:
            shapes = ", ".join(_listed(*example.shape) for example in examples)
            name = type(self.module).__name__
            raise ValueError(f"{self.title}: {name} fails for inputs {shapes}: {error}") from error
        finally:
            self.module.train()

    def _of_another_shape(
        self, inputs: Sequence[Tensor], output: Tensor, shape: Sequence[int | str]
    ) -> ValueError:
        return ValueError(
            f"{self.title}: expected an output {_listed(len(inputs[0]), *shape)}, got "
            f"{_listed(*output.shape)} from {type(self.module).__name__}"
        )


class OwnInteraction(Interaction):
    """A registered interaction; arguments are those of `OwnLayer` and `Interaction`."""

    def __init__(self, name: str, num_vectors: int, dim: int, seed: int) -> None:
        super().__init__(num_vectors, dim)
        inputs = [[dim], [num_vectors - 1, dim]]
        self.own = OwnLayer("interaction_op", name, (num_vectors, dim), inputs, seed)
        self.own.expect("width")
        (self.width,) = self.own.shape

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        device, half = dense.device.type, dense.dtype != torch.float32
        if not half or device == "meta":
            return self.own(dense, embeddings)
        with torch.autocast(device, dense.dtype):  # its weights are float32
            return self.own(dense, embeddings)

    def exportable(self) -> tuple[nn.Module, list[int] | None]:
        return self.own.module, None


class OwnNumericalEmbedding(NumericalEmbedding):
    """A registered numerical embedding; arguments are those of `OwnLayer`."""

    def __init__(self, name: str, num_fields: int, dim: int, seed: int) -> None:
        nn.Module.__init__(self)
        self.num_fields, self.dim = num_fields, dim
        sizes = num_fields, dim
        self.own = OwnLayer("numerical_embedding", name, sizes, [[num_fields]], seed)
        self.own.expect(num_fields, dim)

    def forward(self, numerical: Tensor) -> Tensor:
        return self.own(numerical.float())

    def exportable(self) -> nn.Module:
        return self.own.module


def own_top_mlp(
    name: str, num_inputs: int, sizes: Sequence[int], seed: int, dtype: torch.dtype
) -> tuple[MLP, int]:
    """Returns an MLP that consists of a registered module, and the width of its output.

    Args:
        name: name of the module.
        num_inputs: columns of its input.
        sizes: hidden sizes of `top_mlp_sizes`.
        dtype: dtype to compute in.
    """
    own = OwnLayer("top_mlp", name, (num_inputs, tuple(sizes)), [[num_inputs]], seed)
    own.expect("width")
    return MLP(own, dtype=dtype), own.shape[0]


def own_layers(model: nn.Module) -> list[str]:
    """Returns the setting, name and class of each of a model's registered modules."""
    own = (module for module in model.modules() if isinstance(module, OwnLayer))
    return [*dict.fromkeys(f"{one.title} ({type(one.module).__name__})" for one in own)]


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Seeds torch's default CPU generator within the block, which only one thread enters."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator(seed, name).initial_seed())
        yield


def _listed(*sizes: int | str) -> str:
    return f"[{', '.join(map(str, sizes))}]"
