"""The catalog has every table number and command that the documents print, where these are here."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from dlrm.published.rows import catalog, select

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("DLRM_SHARED_DATA", ROOT.parent / "shared" / "data"))
TEXTS = {path.name[:3]: path.read_text() for path in sorted(DATA.parent.glob("sources/00*.md"))}
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(TEXTS) < 5, reason="the source documents are not here"),
]
CATALOG = catalog()
NUMBER = re.compile(r"\d+(?:\.\d+)?")
FIGURE = r"(\d+(?:\.\d+)?)\s?(images/sec|queries/sec|sent/sec|sps|%)"
COMMAND = re.compile(r"(python3?|poprun|git|docker|cd|mkdir|export|\./\S+) |[A-Z_]+=")
# Commands without a row: they set up, prepare data or configure Spark.
NO_ROWS = re.compile(r"(git|cd|docker|mkdir|export|\./prepare_dataset.sh)\b|USE_FREQUENCY_LIMIT=")
DERIVED = ("/full", "-as-titled")  # rows that change a printed command
MACHINES = {"DGX A100": "dgx-a100", "DGX-1": "dgx-1", "DGX-2": "dgx-2"}


def tables(source, title=""):
    """Yields heading and cells of each table line, column titles included."""
    heading = ""
    for line in TEXTS.get(source, "").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        is_rule = all(set(cell) <= set("-: ") for cell in cells)
        if line.startswith("|") and title in heading and not is_rule:
            yield heading, [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell) for cell in cells]


def commands(source):
    """Returns the commands in fenced blocks, which also contain help texts and logs."""
    fence = re.compile(r"^```\w*[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in fence.findall(TEXTS[source]) for line in block.splitlines()]
    found = [" ".join(line.split()) for line in lines if COMMAND.match(f"{line} ")]
    return [line for line in found if not NO_ROWS.match(line)]


def published(name):
    return [figure.value for figure in CATALOG[name].published]


@pytest.mark.parametrize("source", ["000", "003", "004"])
def test_rows_quote_their_document(source):
    text = " ".join(TEXTS[source].split())
    for row in select(source):
        parts = re.split(r", | \[\.\.\.\] ?", row.quotation)
        assert row.quotation in text or all(part in text for part in parts), row.id
        assert source == "000" or row.hardware in text


def test_every_figure_of_gaudi_has_a_row():
    found = Counter((f.value, f.unit) for row in select("000") for f in row.published)
    printed = Counter((float(value), unit) for value, unit in re.findall(FIGURE, TEXTS["000"]))
    two_corpora = {43.0, 8.5, 109.4, 20.0}  # one figure for wiki and bookwiki
    assert found == {
        (value, unit): 2 if value in two_corpora else count
        for (value, unit), count in printed.items()
    }


@pytest.mark.parametrize(
    ("title", "part", "of_single", "of_amp", "machines"),
    [
        ("Training accuracy", "accuracy", (0, 2), (1, 3, 4), 4),
        ("Training performance", "throughput", (0,), (1, 2), 7),
    ],
)
def test_every_figure_of_dlrm_belongs_to_one_row(title, part, of_single, of_amp, machines):
    seen = set()
    for heading, (gpus, size, _, *cells) in tables("001", title):
        if not gpus.isdigit():
            continue
        machine = next(name for words, name in MACHINES.items() if words in heading)
        single = "tf32" if machine == "dgx-a100" else "fp32"
        for precision, places in ((single, of_single), ("amp", of_amp)):
            name = f"nvidia/dlrm-{size}/{part}/{machine}-{gpus}gpu/{precision}"
            assert published(name) == [float(cells[place]) for place in places]
            assert CATALOG[name].processes == int(gpus)
            seen.add(name)
    assert seen == {name for name in CATALOG if f"/{part}/" in name}
    assert len(seen) == 2 * machines


def test_every_seed_of_dlrm_belongs_to_one_row():
    lines = [cells for _, cells in tables("001", "stability")]
    numbered = [cells for cells in lines if cells[0].isdigit()]
    assert len(numbered) == 16
    for seed, *numbers in numbered:
        for precision, number in zip(("amp", "fp32"), numbers, strict=True):
            name = f"nvidia/dlrm-small/seed-{seed}/{precision}"
            assert published(name) == [float(number)]
            assert f"--seed={seed}" in CATALOG[name].flags
    (mean,) = (cells for cells in lines if "mean" in cells[0])
    assert published("nvidia/dlrm-small/seeds") == [float(cell.strip("*")) for cell in mean[1:]]


@pytest.mark.parametrize(
    ("title", "variants"),
    [("ResNet50", ["rn50/fp32-b128"]), ("BERT", ["bert-base/fp32-bmax", "bert-base/fp32-b32"])],
)
def test_every_throughput_of_dlperf_belongs_to_one_row(title, variants):
    printed = []
    for _, (framework, _, *cells) in list(tables("002", title))[1:]:
        for variant, text in zip(variants, cells, strict=False):
            if number := NUMBER.match(text):
                size = re.search(r"bsz=\d+", text)
                system = f"{framework} ({size[0]})" if size else framework
                printed.append((variant, system, float(number[0])))
        for text in cells:
            assert NUMBER.match(text) or text in ("TODO", "**QJ**", "**SX**")
        assert not any(NUMBER.match(text) for text in cells[len(variants) :])
    figures = [(v, f) for v in variants for f in CATALOG[f"dlperf/{v}/4n32d"].published]
    assert sorted(printed) == sorted((v, f.system, f.value) for v, f in figures)


def test_no_other_table_has_numbers():
    known = ("Training accuracy", "Training performance", "Training stability", "ResNet50-V1.5")
    for heading, cells in (line for source in TEXTS for line in tables(source)):
        if not heading.startswith((*known, "BERT base")):
            assert not any(NUMBER.fullmatch(cell) for cell in cells), heading


@pytest.mark.parametrize("source", ["001", "003", "004"])
def test_every_command_belongs_to_a_row(source):
    printed = {row.printed for row in select(source)} - {None}
    lines = commands(source)
    readings = [[line.replace("[--amp]", ""), line.replace("[--amp]", "--amp")] for line in lines]
    assert printed == {" ".join(line.split()) for both in readings for line in both}
    if source == "001":  # its tables share commands
        return
    for line, times in Counter(lines).items():
        own = [row for row in select(source) if row.printed == line]
        own = [row for row in own if not row.id.endswith(DERIVED)]
        swept = own[0].quotation.partition("argument to be one of ")[2]
        assert len(own) == times * len(swept.split(", ")), line
        assert not swept or [row.given["batch_size"] for row in own] == swept.split(", ")
