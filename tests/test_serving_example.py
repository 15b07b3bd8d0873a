"""The program of the guide serves a model over a socket, and is the one in `examples`."""

import json
import os
import socket
import subprocess
import sys
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest

import dlrm


def fitted(seed):
    """Returns a model whose users click or do not."""
    rows = {
        "click": [i % 2 for i in range(600)],
        "user": [f"u{i % 2}" for i in range(600)],
        "price": [float(i % 7) for i in range(600)],
    }
    schema = {"label": "click", "numerical": ["price"], "categorical": ["user"]}
    return dlrm.fit(pa.table(rows), schema, max_steps=20, seed=seed, base_device="cpu")


@pytest.fixture
def url(root, tmp_path):
    """Yields the address of a service of the model in `tmp_path / "model"`."""
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason="pip install -e '.[docs]' has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", root / "examples"]
    env = {**os.environ, "MODEL": str(tmp_path / "model")}
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    fitted(1).save(tmp_path / "model")
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            [*command, "serve_fastapi:app", f"--port={port}"], env=env, stdout=log, stderr=log
        ) as process,
    ):
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end and process.poll() is None:
                try:
                    urlopen(f"{address}/docs", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            assert process.poll() is None, (tmp_path / "log").read_text()
            yield address
        finally:
            process.terminate()


def post(address, content=None):
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(address, body, headers), timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_rows_are_scored_faulty_ones_named_and_a_new_model_loaded(url, tmp_path):
    model = dlrm.load(tmp_path / "model")
    row = {"user": "u1", "price": 3.0}
    columns = {"user": "u1", "price": [1.0, 2.0, 3.0]}
    for rows in (row, [row, {"user": "u0", "price": None}], columns):
        assert post(f"{url}/predict", rows) == pytest.approx(model.predict(rows).tolist())
    with pytest.raises(HTTPError) as refused:
        post(f"{url}/predict", {"user": "u1", "price": "cheap"})
    assert refused.value.code == 422
    assert "price" in json.load(refused.value)["detail"]
    other = fitted(2)
    other.save(tmp_path / "model", overwrite=True)
    post(f"{url}/reload")
    assert post(f"{url}/predict", row) == pytest.approx(other.predict(row).tolist())
    assert post(f"{url}/predict", row) != pytest.approx(model.predict(row).tolist())


def test_the_guide_shows_the_program_which_is_short(root):
    program = (root / "examples" / "serve_fastapi.py").read_text()
    assert program in (root / "docs" / "guide" / "serve-python.md").read_text()
    assert len(program.splitlines()) <= 30
