"""Names and limits of a DLRM's parts, which configurations know without torch."""

import re

DCN = "dcn"
QUADRATIC = "quadratic"
INTERACTION_NAMES = ("cuda_dot", "dot", "cat", DCN, QUADRATIC)
CROSS_STRUCTURES = ("stacked", "parallel")
NO_EMBEDDING = "none"  # numerical fields enter through the bottom MLP only
NUMERICAL_KINDS = (NO_EMBEDDING, "piecewise")
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
        _check_interaction(name, f"--interaction_op {interaction_op}")
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
        _check_interaction(found[1], f"--ensemble {ensemble}")
        kinds += [found[1]] * int(found[2] or 1)
    if len(kinds) < 2:
        raise ValueError(
            f"--ensemble {ensemble}: expected two members or more, got one; "
            f"write {kinds[0]}*2, or --interaction_op {kinds[0]} for a single model"
        )
    return tuple(kinds)


def _check_interaction(name: str, flag: str) -> None:
    if name not in INTERACTION_NAMES:
        raise ValueError(
            f"{flag}: expected {', '.join(INTERACTION_NAMES)}, or several of them with commas "
            f"between, got {name!r}"
        )
