"""Names and limits of a DLRM's parts, which configurations know without torch.

Names of a user's own layers are added by `dlrm.model.layers.own`.
"""

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

DCN = "dcn"
QUADRATIC = "quadratic"
INTERACTION_NAMES = ("cuda_dot", "dot", "cat", DCN, QUADRATIC)
CROSS_STRUCTURES = ("stacked", "parallel")
NO_EMBEDDING = "none"  # numerical fields enter through the bottom MLP only
NUMERICAL_KINDS = (NO_EMBEDDING, "piecewise", "periodic", "bins")
PLAIN_MLP = "mlp"
BUILT_IN = {  # by the setting that names them
    "interaction_op": INTERACTION_NAMES,
    "numerical_embedding": NUMERICAL_KINDS,
    "top_mlp": (PLAIN_MLP,),
}
OWN: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in BUILT_IN}
REGISTERED_BY = {
    "interaction_op": "register_interaction",
    "numerical_embedding": "register_numerical_embedding",
    "top_mlp": "register_top_mlp",
}
ENTRY_POINTS = "dlrm.layers"  # group of installed packages' modules that register layers
MAX_BINS = 256  # of a field, as in a fitted transform
OUTPUT_INITS = ("uniform", "normal")
POOLINGS = ("sum", "mean")
ATTENTION = "attention"  # the pooling of lists that a dataset may ask for beside `POOLINGS`
_DOTS = {"dot", "cuda_dot"}


def interaction_names(interaction_op: str) -> list[str]:
    """Returns the names listed in a value of `--interaction_op`.

    Raises:
        ValueError: a name is unknown, or two names stand for the same products.
    """
    names = interaction_op.split(",")
    for name in names:
        check_layer("interaction_op", name, f"--interaction_op {interaction_op}")
        if names.count(name) > 1:
            raise ValueError(f"--interaction_op {interaction_op}: {name} is named twice")
    if {*names} >= _DOTS:
        raise ValueError(
            f"--interaction_op {interaction_op}: dot and cuda_dot are the same products"
        )
    return names


def ensemble_kinds(ensemble: int | str) -> tuple[str, ...]:
    """Returns the interaction of each member of a mixed ensemble, none for a number of members.

    Args:
        ensemble: the value of `--ensemble`, such as 8 or "dot*3,quadratic*2".

    Raises:
        ValueError: it is neither a number from 1 on nor a list of interactions.
    """
    if isinstance(ensemble, int):
        if not 1 <= ensemble < 2**31:
            raise ValueError(f"--ensemble {ensemble}: expected 1 or more, below 2**31")
        return ()
    kinds: list[str] = []
    for part in ensemble.split(","):
        found = re.fullmatch(r"(\w+)(?:\*([1-9]\d{0,2}))?", part)
        if not found:
            raise ValueError(
                f"--ensemble {ensemble}: expected a number of members, or interactions with "
                f"numbers such as dot*3,quadratic*3, got {part!r}"
            )
        check_layer("interaction_op", found[1], f"--ensemble {ensemble}")
        kinds += [found[1]] * int(found[2] or 1)
    if len(kinds) < 2:
        raise ValueError(
            f"--ensemble {ensemble}: expected two members or more, got one; "
            f"write {kinds[0]}*2, or --interaction_op {kinds[0]} for a single model"
        )
    return tuple(kinds)


def check_layer(setting: str, name: str, flag: str | None = None) -> None:
    """Refuses a layer that is neither built in nor registered.

    Args:
        setting: the setting that names it, one of `BUILT_IN`.
        flag: the flag with its value, if `name` is only a part of it.

    Raises:
        ValueError: the name is unknown; the message says how to register it.
    """
    if name in BUILT_IN[setting] or is_own(setting, name):
        return
    known = ", ".join((*BUILT_IN[setting], *OWN[setting]))
    expected = f"one of {known}"
    if setting == "interaction_op":
        expected = f"{known}, or several of them with commas between"
    hint = ""
    if name.isidentifier():
        hint = (
            "; to use a layer of your own, first import the module that registers it with "
            f'@dlrm.{REGISTERED_BY[setting]}("{name}")'
        )
    flag = flag or f"--{setting} {name}"
    raise ValueError(f"{flag}: expected {expected}, got {name!r}{hint}")


def is_own(setting: str, name: str) -> bool:
    """Returns whether a user has registered a layer; an unknown name loads the entry points."""
    if name not in BUILT_IN[setting] and name not in OWN[setting]:
        _load_entry_points()
    return name in OWN[setting]


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
