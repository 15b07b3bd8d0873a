"""A column can be numerical and categorical, from preparation to scores."""

import numpy as np
import pyarrow as pa

import dlrm

ROWS = 600
SCHEMA = {
    "label": "y",
    "numerical": [{"column": "age", "missing_values": ["-1"]}, "price"],
    "categorical": [{"column": "age", "type": "integer"}, "shop"],
}


def rows():
    random = np.random.default_rng(0)
    age, price = random.integers(-1, 30, ROWS), random.random(ROWS)
    columns = {"y": random.integers(0, 2, ROWS), "age": age, "price": price}
    return pa.table({**columns, "shop": [f"s{i % 7}" for i in range(ROWS)]})


def test_a_column_can_be_a_number_and_an_id(tmp_path):
    settings = {"max_steps": 4, "batch_size": 64, "embedding_dim": 4, "base_device": "cpu"}
    model = dlrm.fit(rows(), SCHEMA, **settings)
    assert model.transform.names == ["age", "price", "shop"]
    assert model.row_transform.schema.numerical_names == ["age_number", "price"]
    assert model.row_transform.schema.categorical_names == ["age", "shop"]
    scores = model.predict(rows())
    model.save(tmp_path / "model")
    loaded = dlrm.load(tmp_path / "model")
    dicts = rows().drop_columns(["y"]).to_pylist()
    for given in (rows().to_pylist(), dicts):
        np.testing.assert_allclose(loaded.predict(given), scores, rtol=1e-6)
    changed = [{**row, "age": 500} for row in dicts[:5]]
    assert not np.allclose(loaded.predict(changed), scores[:5])
    assert set(loaded.evaluate(rows())) >= {"auc"}
