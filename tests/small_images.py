"""Image networks of few blocks and channels."""

from dlrm.vision import efficientnet, resnet


def shrink(setitem=dict.__setitem__):
    """Shrinks all variants, in this process or, by `monkeypatch.setitem`, in a test."""
    for variants, few in (
        (resnet.VARIANTS, {"depths": (1, 1, 1, 1)}),
        (efficientnet.VARIANTS, {"width": 0.25, "depth": 0.5}),
    ):
        for name, variant in list(variants.items()):
            setitem(variants, name, variant._replace(**few))
