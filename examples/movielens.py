"""Trains a model on the files of MovieLens, to be served.

    python examples/movielens.py ml-latest-small model

Reads `ratings.csv` (userId, movieId, rating, timestamp) and `movies.csv` (movieId, title, genres),
and writes the model, which tells whether a user gives a movie four stars or more.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

import dlrm

HISTORY = 50  # movies that a row knows a user has rated before
LISTS = ("seen", "liked_before", "months")
SCHEMA = {
    "version": 1,
    "label": "liked",
    "categorical": [
        {"column": "userId", "type": "integer", "frequency_limit": 5},
        {"column": "movieId", "type": "integer", "table": "movies", "frequency_limit": 3},
        {
            **{"column": "seen", "type": "integer", "table": "movies", "frequency_limit": 3},
            **{"max_length": HISTORY, "pooling": "attention", "target": "movieId"},
        },
        {"column": "liked_before", "type": "integer", "max_length": HISTORY},
        {"column": "months", "type": "integer", "max_length": HISTORY},
        {"column": "genres", "max_length": 10, "ordered": False},
    ],
    "groups": ["userId"],
}


def rows_of(folder: Path) -> pa.Table:
    """Returns a row for each rating, the oldest first, with what the user had rated before it."""
    ratings = csv.read_csv(folder / "ratings.csv").sort_by(
        [("timestamp", "ascending"), ("userId", "ascending"), ("movieId", "ascending")]
    )
    movies = csv.read_csv(folder / "movies.csv")
    genres = dict(zip(movies["movieId"].to_pylist(), movies["genres"].to_pylist(), strict=True))
    columns: dict[str, list] = {name: [] for name in (*LISTS, "genres")}
    of_users: dict[int, list[tuple[int, int, int]]] = {}
    names = ("userId", "movieId", "rating", "timestamp")
    for user, movie, rating, now in zip(*(ratings[n].to_pylist() for n in names), strict=True):
        past = of_users.setdefault(user, [])
        known = past[-HISTORY:]
        columns["seen"].append([seen for seen, _, _ in known])
        columns["liked_before"].append([seen for seen, liked, _ in known if liked])
        columns["months"].append([(now - then) // 2_592_000 for _, _, then in known])
        columns["genres"].append(genres.get(movie, "").split("|"))
        past.append((movie, int(rating >= 4), now))
    liked = (np.array(ratings["rating"]) >= 4).astype(np.int8)
    return pa.table(
        {
            **{name: ratings[name] for name in ("userId", "movieId")},
            **{name: pa.array(columns[name], pa.list_(pa.int64())) for name in LISTS},
            "genres": pa.array(columns["genres"], pa.list_(pa.string())),
            "liked": liked,
        }
    )


def main(folder: Path, output: Path, **settings: Any) -> None:
    """Trains on the first nine tenths of the ratings, tests on the others, and saves the model."""
    rows = rows_of(folder)
    cut = 9 * len(rows) // 10
    model = dlrm.fit(rows[:cut], SCHEMA, test=rows[cut:], recipe="auto", **settings)
    print(f"test AUC {model.evaluate(rows[cut:])['auc']:.4f}")
    model.save(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
