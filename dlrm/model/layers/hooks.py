"""Hooks of modules and parameters, which only modules and autograd call."""

from torch import Tensor, nn


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a call of the module, or its backward pass, calls a hook."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_hooked(parameter: Tensor) -> bool:
    """Returns whether the parameter's gradient is given to a hook."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
