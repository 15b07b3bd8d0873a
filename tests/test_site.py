"""The documentation builds as a site, with every page in its navigation and no link broken."""

import re
import subprocess
import sys

import pytest
import yaml


def pages_of(nav):
    for entry in nav:
        (place,) = entry.values() if isinstance(entry, dict) else [entry]
        yield from pages_of(place) if isinstance(place, list) else [place]


def test_the_navigation_has_every_page_of_docs_once(root):
    named = list(pages_of(yaml.safe_load((root / "mkdocs.yml").read_text())["nav"]))
    docs = root / "docs"
    assert len(named) == len(set(named))
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} <= set(named)


LIFE = ["Install", "First model", "Own data", "Train", "Judge", "Serve", "Every day", "Scale"]


def test_the_first_paragraph_of_a_guide_page_links_to_the_next_page(root):
    nav = yaml.safe_load((root / "mkdocs.yml").read_text())["nav"]
    assert [title for entry in nav for title in entry][1:10] == [*LIFE, "Change the code"]
    pages = [
        root / place if (root / place).is_file() else root / "docs" / place
        for place in pages_of(nav[1:10])
    ]
    last = pages.index(root / "CONTRIBUTING.md")
    assert last > 15
    wrong = []
    for page, following in zip(pages[:last], pages[1:], strict=False):
        first = page.read_text().split("\n\n")[1]
        links = re.findall(r"Next:\s[^.]*?\]\(([^)#]+)\)", first)
        if not links or (page.parent / links[0]).resolve() != following:
            wrong.append(f"{page.name}: {links}, expected {following}")
    assert not wrong


@pytest.mark.slow
def test_the_site_builds_strictly_and_its_links_lead_to_files(root, tmp_path):
    pytest.importorskip("material", reason="no mkdocs-material: pip install -e '.[docs]' has it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "commands by task" in (site / "search" / "search_index.json").read_text().lower()
    pages, seen, broken = list(site.rglob("index.html")), 0, []
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', page.read_text()):
            target = (page.parent / link).resolve()
            target = target / "index.html" if target.is_dir() else target
            seen += 1
            broken += [] if target.is_file() else [f"{page.relative_to(site)}: {link}"]
    assert len(pages) > 50
    assert seen > 1000
    assert not broken
    assert (site / "examples" / "train.py").read_text() == (root / "examples/train.py").read_text()
