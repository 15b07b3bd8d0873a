"""Pages: what they escape, their tables and charts, and how browsers of any width show them."""

import html
import json
import re
import shutil
import subprocess

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables_testing import prepare

from dlrm.pages import Bar, Section, Tile, document, note, table
from dlrm.pages.charts import ChartLine, chart
from dlrm.preproc.duckdb_engine import local_engine

NASTY = "<script>alert('&')</script>"
LONG = "a_column_whose_name_has_no_space_and_is_much_longer_than_a_phone_is_wide" * 2
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Gives the page around it a title with what does not fit: the page, texts of charts, bars.
MEASURE = """<script>addEventListener('load', () => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const found = [], box = one => one.getBoundingClientRect();
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`page ${wide}`);
  document.querySelectorAll('svg').forEach(svg => {
    const texts = [...svg.querySelectorAll('text')], all = box(svg);
    texts.forEach((text, i) => {
      const own = box(text);
      if (own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1)
        found.push(`outside: ${text.textContent}`);
      texts.slice(i + 1).forEach(other => {
        if (meet(own, box(other))) found.push(`${text.textContent} on ${other.textContent}`); });
    });
  });
  document.querySelectorAll('td.plot').forEach(cell => {
    const text = box(cell.querySelector('.text'));
    cell.querySelectorAll('.track *').forEach(one => {
      if (meet(text, box(one))) found.push(`bar on ${cell.textContent}`); });
    if (text.right > box(cell).right + 1) found.push(`outside: ${cell.textContent}`);
  });
  parent.document.title = JSON.stringify([innerWidth, found]);
})</script>"""


def test_everything_on_a_page_is_escaped():
    rows = [[NASTY, NASTY, Bar(NASTY, 0.5, level=NASTY)]]
    parts = [
        note(NASTY),
        table([("", [NASTY, "a", "b"])], rows, NASTY),
        chart(NASTY, NASTY, NASTY, [ChartLine(NASTY, [0, 1], [1, 2])], NASTY, (0, 1, 0, 2)),
    ]
    text = document(NASTY, [NASTY], [Tile(NASTY, NASTY, NASTY)], [Section(NASTY, parts)])
    assert "<script" not in text
    assert text.count(html.escape(NASTY).replace("&#x27;", "&#39;")) == 22


def test_a_very_long_name_is_shortened_in_the_head_of_its_row():
    text = str(table([("", ["name", "a"])], [["x" * 3000, "1"], ["y" * 200, "2"]], "names"))
    assert "... (3,000 characters) ..." in text
    assert "x" * 101 not in text
    assert "y" * 200 in text


def test_columns_of_words_are_on_the_left_and_long_ones_wrap():
    rows = [["a", "test", "1.5", 3, "x " * 30], ["b", "train", "–", None, "y"]]
    text = table([("", ["", "split", "value", "rows", "meaning"])], rows, "table")
    kinds = re.findall(r'<th scope="col"(?: class="(\w+)")?>(\w*)</th>', text)[1:]
    assert kinds == [("words", "split"), ("", "value"), ("", "rows"), ("long", "meaning")]


def test_a_chart_draws_intervals_and_a_histogram_below_its_lines():
    line = ChartLine(
        "model", [0.2, 0.8], [0.1, 0.9], False, True, [(0.0, 0.3), (0.7, 1.0)], [0, 0.5, 1], [3, 1]
    )
    text = chart("Title", "x", "y", [line], "Told.", (0, 1, 0, 1))
    assert 'aria-label="Title. Told."' in text
    assert text.count("<circle") == 2
    (outline,) = re.findall(r'd="M(\S+) (\S+)V(\S+)H\S+V(\S+)H\S+V(\S+)Z"', text)
    _, floor, first, second, end = map(float, outline)
    assert floor == end
    assert (floor - first) == pytest.approx(3 * (floor - second), rel=0.01)
    reaches = [float(reach) for reach in re.findall(r"m-3 0h6m-6 (\S+)h6", text)]
    height = float(re.search(r'd="M\S+ 10V(\S+)"', text)[1]) - 10 - 44 - 8  # less the histogram
    assert reaches == pytest.approx([0.3 * height, 0.3 * height], abs=0.11)


@pytest.fixture(scope="module")
def pages(trained, tmp_path_factory):
    """Returns a page of each kind: of an evaluation, and of a dataset's report."""
    folder = tmp_path_factory.mktemp("pages")
    words = (f"--checkpoint={trained.checkpoint}", f"--dataset={trained.dataset}", "--importance")
    words += (f"--against={trained.checkpoint}", "--slices=categorical 2,numerical 0")
    forked.succeed("dlrm.scripts.evaluate", *words, f"--output={folder / 'evaluation'}")
    random = np.random.default_rng(0)
    rows = {
        "bought": random.random(900) < 0.5,
        "split": ["train"] * 600 + ["test"] * 150 + ["validation"] * 150,
        NASTY: random.random(900) + np.repeat([0, 0.1, 0.4], 300),
        LONG: random.integers(0, 40, 900) + np.repeat([0, 3, 30], 300),
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    schema = {"label": "bought", "numerical": [NASTY], "categorical": [LONG]}
    output = folder / "dataset"
    with local_engine(1) as engine:
        prepare(
            schema, [folder / "rows.parquet"], output, engine, report=True, split_column="split"
        )
    return [
        folder / "evaluation/evaluation.html",
        output / "report.html",
    ]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [400, 1400, 2000])
def test_pages_fit_screens_of_any_width(pages, width, tmp_path):
    for page in pages:
        text = page.read_text()
        assert NASTY not in text
        measured = tmp_path / page.name  # in a frame, since windows are at least 500 px wide
        content = html.escape(text.replace("</body>", f"{MEASURE}</body>"))
        style = f"width: {width}px; height: 2400px; border: 0"
        measured.write_text(f"<title></title><iframe style='{style}' srcdoc='{content}'></iframe>")
        dom = browse(tmp_path, width, "--dump-dom", f"file://{measured}")
        title = html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1])
        assert json.loads(title) == [width, []], page.name
        picture = tmp_path / f"{page.stem}.png"
        browse(tmp_path, width, f"--screenshot={picture}", f"file://{page}")
        assert int.from_bytes(picture.read_bytes()[16:20], "big") == width
        for figure in re.findall(r"<svg.*?>", text):
            assert len(re.search('aria-label="(.*?)"', figure)[1]) > 20


def browse(folder, width, *words):
    assert CHROMIUM is not None
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    flags += (f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400")
    done = subprocess.run(
        [CHROMIUM, *flags, *words], stdout=subprocess.PIPE, check=True, timeout=60, text=True
    )
    return done.stdout
