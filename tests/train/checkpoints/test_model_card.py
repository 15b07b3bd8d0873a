"""A checkpoint's card: what a person needs to know about a model before loading it."""

import re

import dlrm
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.reports.model_card import MODEL_CARD, model_card


def test_a_checkpoint_has_a_card_with_data_metrics_and_a_way_to_load_it(trained, tmp_path):
    checkpoint = Checkpoint.open(trained.checkpoint).path
    card = (checkpoint / MODEL_CARD).read_text()
    best = Checkpoint(checkpoint).progress["best"]
    assert f"# Model card: step {int(best['step'])}" in card
    assert f"| auc | {best['auc']:.6f} |" in card
    assert "* rows: train 4,000, test 1,000" in card
    assert card.count("* rows") == 1
    assert f"* source: `{trained.dataset}`" in card
    assert "--embedding_dim=8" in card
    assert "--bottom_mlp_sizes=16,8" in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    names = {"rows": trained.rows[:3]}
    scored = code.replace("THIS_DIRECTORY", str(checkpoint)).replace(
        "model.predict", "scores = model.predict"
    )
    exec(scored, names)
    assert (names["scores"] == dlrm.load(checkpoint).predict(names["rows"])).all()
    commands = re.findall(r"^dlrm (\w+) --checkpoint THIS_DIRECTORY", card, re.MULTILINE)
    assert commands == ["predict", "evaluate"]
    Checkpoint(checkpoint).copy(tmp_path / "copy")
    assert "model.predict(rows)" in (tmp_path / "copy" / MODEL_CARD).read_text()


def test_what_is_not_recorded_is_said():
    card = model_card({}, {}, False)
    assert card.count("Nothing is recorded.") >= 2
    assert "--load_checkpoint_path" in card
