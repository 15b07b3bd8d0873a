"""Docstrings and headings open with a noun or a verb, and the spelling is American."""

import ast
import os
import re
import subprocess

import pytest

CLEAN = ("benchmarks", "dlrm", "docs", "examples", "preproc", "triton", "tests")
QUESTION = re.compile(r"(Whether|What|How|Where|Which|Who|Whose|When|Why)\b")
# Extended regular expressions of words in British spelling, and of their endings.
BRITISH = (
    "(behavi|col|fav|flav|neighb|hon|lab|hum|rum|vig|endeav|harb|vap|arm)our",
    "(al|ass|atur|er|gan|gn|il|im|it|l[ae]r|mat|mbol|nch|on|or|rd|stom|t[aio]m|tor)"
    "is(e[drs]?|ing|ations?|able)([^a-z]|$)",
    "anal[iy]s(e[drs]?|ing)([^a-z]|$)",
    "(cancel|channel|fuel|initial|label|level|marshal|model|signal|total|travel|tunnel)l(ed|er|ing)",
    "(^|[^a-z])(un)?cent(re[ds]?|ring)([^a-z]|$)",
    "(^|[^a-z])((centi|kilo|milli)?(met|lit)|calib|fib|spect|theat)res?([^a-z]|$)",
    "analogue|catalogu|dialogue|programmes?([^a-z]|$)|(lic|def|off|pret)ences?([^a-z]|$)",
    "acknowledgement|judgement|(age|cue)ing([^a-z]|$)|(benefit|focus)(t|s)ed|fulfil(s|[^a-z]|$)",
    "artefact|grey|mould|plough|sceptic|skilful|storey|instalment|aluminium|tyre|draught",
    "(^|[^a-z])(burnt|dreamt|leant|learnt|smelt|spelt|spoilt|whilst|amongst)",
    "(^|[^a-z])(to|after|up|down|on|in|out)wards([^a-z]|$)",
)
# Lines, by a part, whose spelling is that of other programs or of data.
EXCUSED = {
    "benchmarks/reproduce.py": ("BARS: Towards Open Benchmarking",),
    "dlrm/data/tables/names.py": ("neighbourhood", "color colour"),
    "dlrm/published/documents/ipu_cnn.yaml": ("--optimiser", "--normalise-input", "isation-target"),
    "docs/systems.md": ("--optimiser", "--normalise-input", "isation-target"),
    "tests/language/test_squad.py": ("square kilometres",),
}
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


def british(root):
    """Returns the lines of tracked text files in British spelling that have no excuse."""
    found = subprocess.run(
        ["git", "grep", "-nIiE", "|".join(BRITISH), "--", ".", ":!tests/test_prose.py"],
        check=False,
        cwd=root,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    if found.returncode > 1:
        pytest.skip("no clone, which lists the files")
    lines = [line.split(":", 2) for line in found.stdout.splitlines()]
    return [
        f"{path}:{number}: {line}"
        for path, number, line in lines
        if not any(part in line for part in EXCUSED.get(path, ()))
    ]


def test_the_spelling_is_american(root):
    assert not british(root)


WORDS = """behaviour colour flavours neighbouring favourite labelled cancelling modelled centre
centred metre grey analyse recognised initialise serialisation optimiser licence programme judgement
catalogue standardise artefact learnt towards"""


@pytest.mark.parametrize("word", WORDS.split())
def test_a_british_form_is_found(word):
    assert re.search("|".join(BRITISH), word)
