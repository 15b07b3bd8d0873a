"""Import lines of the documents run."""

import re


def test_import_lines_of_the_documents_run(root):
    documents = [*root.glob("*.md"), *root.glob("[!.]*/**/*.md")]
    texts = [path.read_text(encoding="utf-8") for path in documents]
    lines = sorted(
        {line for text in texts for line in re.findall(r"^from dlrm.* import .*$", text, re.M)}
    )
    assert len(lines) > 5
    for line in lines:
        exec(line, {})
