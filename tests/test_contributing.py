"""The contributors' documents name what exists, and each decision is a full record."""

import re

import pytest
import yaml

import dlrm

PARTS = ["Decision", "Why", "What was rejected", "Consequence"]
DESCRIPTIONS = ("README.md", "overview.md", "life-of-an-op.md")  # which record no decisions
FOLDERS = ("csrc", "dlrm", "tests", "benchmarks", "docs", "examples", "preproc", "triton")
_PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[^`\s]*|setup\.py|[\w-]+\.(?:toml|txt|md))`")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def documents(root):
    """Returns `CONTRIBUTING.md` and the design documents by name."""
    return {
        str(path.relative_to(root)): path.read_text()
        for path in [root / "CONTRIBUTING.md", *sorted(root.glob("docs/design/*.md"))]
    }


def exists(root, path):
    """Returns True if a file matches, also a pattern like `dlrm/ops/<name>.py` or `tests/*.py`."""
    pattern = re.sub(r"<[^>]+>", "*", path).rstrip("/")
    # A clone has no built files.
    return path.endswith(".so") or any(root.glob(pattern))


def test_paths_that_the_documents_name_exist(root):
    found = [(name, path) for name, text in documents(root).items() for path in _PATH.findall(text)]
    assert len(found) > 100
    assert not [f"{name}: {path}" for name, path in found if not exists(root, path)]


def test_classes_functions_and_tables_that_a_recipe_names_are_in_its_files(root):
    recipes = (root / "CONTRIBUTING.md").read_text().split("\n### ")[1:]
    seen, wrong = 0, []
    for recipe in recipes:
        title, _, steps = recipe.partition("\n\n")
        steps = steps.partition("\n## ")[0]
        text = "\n".join(code_of(root, path) for path in _PATH.findall(steps))
        names = re.findall(r"`(?:\w+\.)*([A-Za-z]\w+)`", steps)
        names = [name for name in names if name not in ("py", "txt", "md")]
        seen += len(names)
        wrong += [f"{title}: {one}" for one in names if not re.search(rf"\b{one}\b", text)]
    assert seen > 60
    assert not wrong


def code_of(root, path):
    """Returns the text of a file, or of the modules of a folder."""
    found = root.glob(re.sub(r"<[^>]+>", "*", path).rstrip("/"))
    files = [file for one in found for file in (one.rglob("*.py") if one.is_dir() else [one])]
    return "\n".join(file.read_text() for file in files)


def test_links_of_the_documents_lead_somewhere(root):
    found = [
        (root / name, link)
        for name, text in documents(root).items()
        for link in _LINK.findall(text)
    ]
    assert len(found) > 10
    assert not [f"{path}: {link}" for path, link in found if not (path.parent / link).exists()]


def test_every_decision_is_a_whole_record(root):
    wrong = []
    for name, text in documents(root).items():
        if name.startswith("docs/design/") and not name.endswith(DESCRIPTIONS):
            title, *records = re.split(r"^## ", text, flags=re.MULTILINE)
            assert title.startswith("# ")
            assert records, name
            for record in records:
                parts = re.findall(r"^\* \*\*([^*]+)\*\*: \S", record, flags=re.MULTILINE)
                if parts != PARTS:
                    wrong.append(f"{name}: {record.splitlines()[0]}: {parts}")
    assert not wrong


def test_the_index_names_every_document(root):
    index = (root / "docs" / "design" / "README.md").read_text()
    names = {path.name for path in root.glob("docs/design/*.md")} - {"README.md"}
    assert set(_LINK.findall(index)) == names


@pytest.mark.parametrize("path", ["dlrm/nowhere.py", "csrc/cpu/nowhere.cpp", "nowhere.toml"])
def test_a_path_that_does_not_exist_is_found(root, path):
    assert _PATH.findall(f"see `{path}`") == [path]
    assert not exists(root, path)


def test_the_citation_names_this_version_and_the_papers_authors(root):
    found = yaml.safe_load((root / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert found["version"] == dlrm.__version__
    (paper,) = found["references"]
    assert (paper["authors"][0]["family-names"], paper["year"]) == ("Naumov", 2019)
