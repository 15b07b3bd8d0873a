"""The page on MovieLens: from files of its form, with invented rows, to a model that is served."""

import importlib.util
import json
import shlex

import numpy as np
import pytest
from test_documented_commands import ROOT, blocks

import dlrm
from dlrm.data.schema.schema import Schema
from dlrm.train.checkpoints.checkpoint import Checkpoint

PAGE = ROOT / "docs" / "guide" / "movielens.md"
GENRES = ("Action", "Comedy", "Drama", "Western")
SMALL = {"epochs": 8, "batch_size": 64, "lr": 0.02, "dropout": 0.0}
SMALL |= {"embedding_dim": 8, "bottom_mlp_sizes": (8,)}


def program(name):
    """Returns a program of the examples as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    """Returns a folder with files of MovieLens's form, whose users like one genre."""
    folder, random = tmp_path_factory.mktemp("movielens"), np.random.default_rng(0)
    genres, likes = random.integers(0, 4, 40), random.integers(0, 4, 50)
    lines = [
        f'{i + 1},"Invented, The ({1980 + i})",{GENRES[one]}|Drama' for i, one in enumerate(genres)
    ]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *lines]) + "\n")
    users, movies = random.integers(0, 50, 2000), random.integers(0, 40, 2000)
    stars = np.where(genres[movies] == likes[users], 4.5, 2) + random.choice([0, 0.5, -1], 2000)
    times = random.integers(1_000_000_000, 1_100_000_000, 2000)
    rows = (
        f"{u + 1},{m + 1},{s},{t}" for u, m, s, t in zip(users, movies, stars, times, strict=True)
    )
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]))
    return folder


def test_rows_know_what_came_before_them(movielens):
    rows = program("movielens").rows_of(movielens).to_pylist()
    ratings = np.genfromtxt(movielens / "ratings.csv", delimiter=",", names=True)
    ratings = ratings[np.lexsort((ratings["movieId"], ratings["userId"], ratings["timestamp"]))]
    for place in (0, 700, 1999):
        now, before = ratings[place], ratings[:place]
        past = before[before["userId"] == now["userId"]][-50:]
        months = (now["timestamp"] - past["timestamp"]) // (30 * 24 * 3600)
        assert rows[place]["movieId"] == now["movieId"]
        assert rows[place]["liked"] == (now["rating"] >= 4)
        assert rows[place]["seen"] == past["movieId"].tolist()
        assert rows[place]["liked_before"] == past[past["rating"] >= 4]["movieId"].tolist()
        assert rows[place]["months"] == months.tolist()
        assert "Drama" in rows[place]["genres"]


def test_the_schema_of_the_page_is_that_of_the_program(tmp_path):
    (text,) = (block.text for block in blocks(PAGE) if block.language == "yaml")
    (tmp_path / "schema.yaml").write_text(text)
    expected = Schema.from_dict(program("movielens").SCHEMA)
    assert Schema.load(tmp_path / "schema.yaml") == expected


def test_the_files_become_a_model_that_is_served(movielens, tmp_path, capsys, monkeypatch):
    commands = [block.text for block in blocks(PAGE) if block.language == "bash"]
    (python, *_), curl = (shlex.split(text) for text in commands)
    assert python == "python"
    example = program("movielens")
    example.main(movielens, tmp_path / "model", **SMALL)
    assert float(capsys.readouterr().out.split()[-1]) > 0.75
    # Users, movies, those liked before, months and genres, and then the wide weights.
    dims = [table["dim"] for table in Checkpoint(tmp_path / "model").config["tables"]]
    assert dims == [8] * 5 + [1] * 5
    row = json.loads(curl[curl.index("-d") + 1])
    expected = dlrm.load(tmp_path / "model").predict(row).tolist()
    pytest.importorskip("fastapi", reason="pip install -e '.[docs]' has it")
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    assert program("serve_fastapi").predict(row) == expected
