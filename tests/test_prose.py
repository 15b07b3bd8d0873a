"""Docstrings open with a noun or a verb, and so do headings: none is a question."""

import ast
import re

import pytest

CLEAN = ("benchmarks", "dlrm", "docs", "examples", "preproc", "triton", "tests")
QUESTION = re.compile(r"(Whether|What|How|Where|Which|Who|Whose|When|Why)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text):
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED))
    return [text for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("name", CLEAN)
def test_no_docstring_opens_with_a_question_word(root, name):
    path = root / name
    files = [path] if path.is_file() else path.rglob("*.py")
    found = [
        f"{file.relative_to(root)}: {text.splitlines()[0]}"
        for file in files
        for text in docstrings(file.read_text())
        if QUESTION.match(text)
    ]
    assert not found


def test_no_heading_is_a_question(root):
    pages = [
        *root.glob("*.md"),
        *(p for d in ("docs", "preproc", "triton") for p in (root / d).rglob("*.md")),
    ]
    headings = [
        f"{page.relative_to(root)}: {heading}"
        for page in pages
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    ]
    assert len(headings) > 100
    assert not [h for h in headings if QUESTION.match(h.partition(": ")[2]) or h.endswith("?")]


def test_a_question_is_found():
    assert QUESTION.match(docstrings('"""Whether it is."""')[0])
    assert not QUESTION.match(docstrings('"""Returns whether it is."""')[0])
