"""An oracle: NVIDIA's DLRM in a few lines of plain torch, with the directory that it saves.

Written from the description of that format, with loops where ours has formulas.
"""

import numpy as np
import torch

from dlrm.data.clicks.feature_spec import FeatureSpec


class NvidiaModel:
    """A model whose vectors stand in `order`; `padding` zeros follow its dots.

    Args:
        order: table numbers.
        rows: of each table, by number.
        interaction: "dot" or "cat".
    """

    def __init__(self, order, rows, interaction="dot", padding=1, dim=4, numerical=3, seed=0):
        self.order, self.interaction, self.padding = order, interaction, padding
        vectors = len(order) + 1
        width = vectors * dim if interaction == "cat" else dim + vectors * (vectors - 1) // 2
        width += 0 if interaction == "cat" else padding
        random = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=random) / shape[-1] ** 0.5

        self.bottom = [(normal(8, numerical), normal(8)), (normal(dim, 8), normal(dim))]
        self.top = [(normal(16, width), normal(16)), (normal(5, 16), normal(5))]
        self.out = (normal(1, 5), normal(1))
        self.tables = [normal(n, dim) for n in rows]

    def __call__(self, numerical, ids):
        hidden = numerical
        for weight, bias in self.bottom:
            hidden = torch.relu(hidden @ weight.T + bias)
        vectors = [hidden] + [self.tables[table][ids[:, table]] for table in self.order]
        if self.interaction == "cat":
            parts = vectors
        else:
            parts = [hidden]
            for i in range(len(vectors)):
                for j in range(i):
                    parts.append((vectors[i] * vectors[j]).sum(1, keepdim=True))
            parts.append(torch.zeros(len(ids), self.padding))
        hidden = torch.cat(parts, dim=1)
        for weight, bias in self.top:
            hidden = torch.relu(hidden @ weight.T + bias)
        return (hidden @ self.out[0].T + self.out[1]).squeeze(1)

    def save(self, directory, config, data):
        """Writes the directory with parameters; `config` holds the values of all flags."""
        directory.mkdir()
        for name, layers in (("bottom_model", self.bottom), ("top_model", self.top)):
            weights, biases = (
                [torch.nn.Parameter(t) for t in ts] for ts in zip(*layers, strict=True)
            )
            torch.save({"weights": weights, "biases": biases}, directory / f"{name}.mlp.pt")
        last = torch.nn.Linear(5, 1)
        last.load_state_dict({"weight": self.out[0], "bias": self.out[1]})
        torch.save(last.state_dict(), directory / "top_model.out.pt")
        for index, table in enumerate(self.tables):
            table.numpy().tofile(directory / f"bottom_model.embeddings.{index}.bin")
            torch.save({"shape": table.shape}, directory / f"embeddings.{index}.meta.pt")
        torch.save({"data": data, "config": config}, directory / "metadata.pt")

    @classmethod
    def load(cls, directory, order, interaction, padding):
        """Reads a directory like a run whose vectors are in `order`."""

        def read(name):
            return torch.load(directory / name, weights_only=True)

        shapes = [read(f"embeddings.{i}.meta.pt")["shape"] for i in range(len(order))]
        model = cls(order, [rows for rows, _ in shapes], interaction, padding)
        for name in ("bottom", "top"):
            lists = read(f"{name}_model.mlp.pt")
            setattr(model, name, list(zip(lists["weights"], lists["biases"], strict=True)))
        last = read("top_model.out.pt")
        model.out = (last["weight"], last["bias"])
        for index, shape in enumerate(shapes):
            file = directory / f"bottom_model.embeddings.{index}.bin"
            size = shape[0] * shape[1]
            model.tables[index] = torch.from_file(str(file), size=size).view(*shape)
        return model


def scored_by(model, dataset):
    """Returns labels of the test split, and a model's logits for it."""
    spec = FeatureSpec.load(dataset)
    numerical = np.fromfile(spec.file("test", spec.numerical[0]), np.float16)
    ids = [np.fromfile(spec.file("test", n), spec.dtype(n)) for n in spec.categorical]
    logits = model(
        torch.from_numpy(numerical).float().view(len(ids[0]), -1),
        torch.from_numpy(np.stack(ids, axis=1).astype(np.int64)),
    )
    return np.fromfile(spec.file("test", spec.label), np.uint8), logits
