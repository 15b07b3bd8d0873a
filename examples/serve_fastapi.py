"""Serves a model over HTTP by FastAPI.

MODEL=click-model uvicorn --app-dir examples serve_fastapi:app --workers 2
"""

import os

from fastapi import FastAPI, HTTPException

import dlrm

app = FastAPI()
served = {"model": dlrm.load(os.environ["MODEL"])}  # each worker has its own


@app.post("/predict")
def predict(rows: dict | list[dict]) -> list[float]:
    """Returns the score of each row; of one row, of rows, or of columns as `predict` takes them."""
    try:
        return served["model"].predict(rows).tolist()
    except (TypeError, ValueError) as error:
        raise HTTPException(status_code=422, detail=str(error)) from None


@app.post("/reload")
def reload() -> str:
    """Loads the model anew; requests are answered by the old one until then."""
    served["model"] = dlrm.load(os.environ["MODEL"])
    return repr(served["model"])
