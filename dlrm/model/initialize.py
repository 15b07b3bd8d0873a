"""Random generators for initial weights that depend on a seed and a name, and on nothing else."""

import hashlib

import torch


def generator(seed: int, name: str) -> torch.Generator:
    """Returns a CPU generator whose stream is fixed by `seed` and `name`.

    A parameter's initial value thus does not depend on which others are made, in which order, or by
    which process.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
