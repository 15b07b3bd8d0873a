"""Names and limits of a DLRM's parts, which configurations know without torch."""

DCN = "dcn"
INTERACTION_NAMES = ("cuda_dot", "dot", "cat", DCN)
CROSS_STRUCTURES = ("stacked", "parallel")
NO_EMBEDDING = "none"  # numerical fields enter through the bottom MLP only
NUMERICAL_KINDS = (NO_EMBEDDING, "piecewise", "periodic", "bins")
MAX_BINS = 256  # of a field, as in a fitted transform
OUTPUT_INITS = ("uniform", "normal")
POOLINGS = ("sum", "mean")
_DOTS = {"dot", "cuda_dot"}


def interaction_names(interaction_op: str) -> list[str]:
    """Returns the names listed in a value of `--interaction_op`.

    Raises:
        ValueError: a name is unknown, or two names stand for the same products.
    """
    names = interaction_op.split(",")
    for name in names:
        if name not in INTERACTION_NAMES:
            raise ValueError(
                f"--interaction_op {interaction_op}: expected {', '.join(INTERACTION_NAMES)}, or "
                f"several of them with commas between, got {name!r}"
            )
        if names.count(name) > 1:
            raise ValueError(f"--interaction_op {interaction_op}: {name} is named twice")
    if {*names} >= _DOTS:
        raise ValueError(
            f"--interaction_op {interaction_op}: dot and cuda_dot are the same products"
        )
    return names
