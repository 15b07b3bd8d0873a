"""Documented import lines run; former import paths name the same objects as current ones."""

import importlib
import re

import pytest

EARLIER_PATHS = {
    "dlrm.data.augment": "dlrm.vision.augmentation",
    "dlrm.data.loader": "dlrm.data.clicks.datasets",
    "dlrm.data.log_lines": "dlrm.data.sources.log_lines",
    "dlrm.data.pretraining": "dlrm.language.pretraining.dataset",
    "dlrm.data.transform": "dlrm.data.transform.transform",
}


def test_import_lines_of_the_documents_run(root):
    documents = [*root.glob("*.md"), *root.glob("[!.]*/**/*.md")]
    texts = [path.read_text(encoding="utf-8") for path in documents]
    lines = sorted(
        {line for text in texts for line in re.findall(r"^from dlrm.* import .*$", text, re.M)}
    )
    assert len(lines) > 5
    for line in lines:
        exec(line, {})


@pytest.mark.parametrize(("earlier", "present"), EARLIER_PATHS.items())
def test_earlier_paths_name_the_same_objects(earlier, present):
    alias, module = importlib.import_module(earlier), importlib.import_module(present)
    assert alias.__all__
    for name in alias.__all__:
        assert getattr(alias, name) is getattr(module, name)
