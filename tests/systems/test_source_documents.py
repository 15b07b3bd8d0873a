"""The catalog has every table number and command that the documents print."""

import os
import re
from collections import Counter
from pathlib import Path

import documents
import pytest

from dlrm.published.rows import catalog, select

pytestmark = pytest.mark.long
CATALOG = catalog()
FACTS = documents.saved()
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# Commands without a row: they set up, prepare data or configure Spark.
NO_ROWS = {
    "git clone https://github.com/NVIDIA/DeepLearningExamples": "setup",
    "cd DeepLearningExamples/PyTorch/Recommendation/DLRM": "setup",
    "docker build . -t nvidia_dlrm_pyt": "setup",
    "mkdir -p data": "setup",
    "docker run --runtime=nvidia -it --rm --ipc=host  -v ${PWD}/data:/data nvidia_dlrm_pyt bash": (
        "setup"
    ),
    "cd preproc": "preprocessing",
    "./prepare_dataset.sh": "preprocessing",
    "cd -": "preprocessing",
    "export SPARK_LOCAL_DIRS=/data/spark-tmp": "Spark",
    "export INPUT_PATH=/data/criteo": "Spark",
    "export OUTPUT_PATH=/data/output": "Spark",
    "export TOTAL_CORES=80": "Spark",
    "export TOTAL_MEMORY=800": "Spark",
    "USE_FREQUENCY_LIMIT=15": "Spark",
}
DERIVED = ("/full", "-as-titled")  # rows that change a printed command
MACHINES = {"DGX A100": "dgx-a100", "DGX-1": "dgx-1", "DGX-2": "dgx-2"}


def test_the_facts_are_those_of_the_documents():
    folder = os.environ.get("DLRM_SOURCES")
    if not folder:
        pytest.skip("DLRM_SOURCES names no folder with the documents")
    assert documents.extracted(Path(folder)) == FACTS
    texts = {path.name[:3]: path.read_text() for path in Path(folder).glob("00[34]*.md")}
    for row in CATALOG.values():
        if text := texts.get(row.source[:3]):
            assert row.quotation in text or all(p in text for p in row.quotation.split(", "))
            assert row.hardware in text


def test_every_figure_of_gaudi_has_a_row():
    published = Counter()
    for row in select("000"):
        for figure in row.published:
            published[figure.value, figure.unit] += 1
    printed = Counter((float(value), unit) for value, unit in FACTS["figures"])
    assert published.keys() == printed.keys()
    two_corpora = {43.0, 8.5, 109.4, 20.0}  # one figure for wiki and bookwiki
    for (value, unit), count in published.items():
        assert count == (2 if value in two_corpora else printed[value, unit]), (value, unit)


def lines_of(title):
    return [(heading, cells) for heading, cells in FACTS["tables"]["001"] if title in heading]


def results_of(title):
    """Yields machine, GPUs, model and numbers of each line."""
    for heading, cells in lines_of(title):
        if cells[0].isdigit():
            machine = next(name for words, name in MACHINES.items() if words in heading)
            yield machine, cells[0], cells[1], [float(cell) for cell in cells[3:]]


@pytest.mark.parametrize(
    ("title", "part", "of_single", "of_amp", "machines"),
    [
        ("Training accuracy", "accuracy", (0, 2), (1, 3, 4), 4),
        ("Training performance", "throughput", (0,), (1, 2), 7),
    ],
)
def test_every_figure_of_dlrm_belongs_to_one_row(title, part, of_single, of_amp, machines):
    seen = set()
    for machine, gpus, size, numbers in results_of(title):
        single = "tf32" if machine == "dgx-a100" else "fp32"
        for precision, places in ((single, of_single), ("amp", of_amp)):
            row = CATALOG[f"nvidia/dlrm-{size}/{part}/{machine}-{gpus}gpu/{precision}"]
            assert [figure.value for figure in row.published] == [numbers[p] for p in places]
            assert row.processes == int(gpus)
            seen.add(row.id)
    assert seen == {name for name in CATALOG if f"/{part}/" in name}
    assert len(seen) == 2 * machines


def test_every_seed_of_dlrm_belongs_to_one_row():
    lines = [cells for _, cells in lines_of("stability") if cells[0].isdigit()]
    assert len(lines) == 16
    for seed, *numbers in lines:
        for precision, number in zip(("amp", "fp32"), numbers, strict=True):
            row = CATALOG[f"nvidia/dlrm-small/seed-{seed}/{precision}"]
            assert [figure.value for figure in row.published] == [float(number)]
            assert f"--seed={seed}" in row.flags
    (mean,) = (cells for _, cells in lines_of("stability") if "mean" in cells[0])
    row = CATALOG["nvidia/dlrm-small/seeds"]
    assert [figure.value for figure in row.published] == [float(c.strip("*")) for c in mean[1:]]


@pytest.mark.parametrize(
    ("title", "variants"),
    [
        ("ResNet50", {2: "rn50/fp32-b128"}),
        ("BERT", {2: "bert-base/fp32-bmax", 3: "bert-base/fp32-b32"}),
    ],
)
def test_every_throughput_of_dlperf_belongs_to_one_row(title, variants):
    lines = [cells for heading, cells in FACTS["tables"]["002"] if title in heading][1:]
    seen = set()
    for framework, _, *cells in lines:
        for column, text in enumerate(cells, 2):
            number = NUMBER.match(text)
            if not number:
                assert text in ("TODO", "**QJ**", "**SX**")
                continue
            row = CATALOG[f"dlperf/{variants[column]}/4n32d"]
            found = {(f.system.partition(" (")[0], f.value) for f in row.published}
            assert (framework, float(number[0])) in found
            seen.add((row.id, framework))
            size = re.search(r"bsz=(\d+)", text)
            assert not size or any(f"(bsz={size[1]})" in f.system for f in row.published)
    at_32 = [row for row in select("002") if row.grid == "4n32d" and title[:4].lower() in row.id]
    at_32 = at_32 or [CATALOG[f"dlperf/{variants[2]}/4n32d"]]
    assert len(seen) == sum(len(row.published) for row in at_32)


def test_no_other_table_has_numbers():
    known = ("Training accuracy", "Training performance", "Training stability", "ResNet50-V1.5")
    for name, lines in FACTS["tables"].items():
        for heading, cells in lines:
            if not heading.startswith((*known, "BERT base")):
                assert not any(NUMBER.fullmatch(cell) for cell in cells), (name, heading)


@pytest.mark.parametrize("source", ["001", "003", "004"])
def test_every_command_belongs_to_a_row_or_is_named_as_none(source):
    printed = {}
    for row in select(source):
        if row.printed:
            printed.setdefault(" ".join(row.printed.split()), []).append(row)
    used = set()
    lines = Counter(" ".join(line.split()) for line in FACTS["commands"][source])
    for line in FACTS["commands"][source]:
        if line in NO_ROWS:
            continue
        readings = (line.replace("[--amp]", ""), line.replace("[--amp]", "--amp"))
        for reading in {" ".join(text.split()) for text in readings}:
            rows = printed.get(reading, [])
            assert rows, f"no row is printed as {reading}"
            used.add(reading)
            if source != "001":  # there, tables share commands
                own = [row for row in rows if not row.id.endswith(DERIVED)]
                assert len(own) == lines[reading], reading
    swept = {text for text, rows in printed.items() if source != "001"} - used
    for text in swept:  # "Change the --batch-size argument to be one of"
        rows = [row for row in printed[text] if not row.id.endswith(DERIVED)]
        assert all("infer" in row.id for row in rows), text
    assert source != "001" or used == printed.keys()


def test_the_parts_have_as_many_rows_as_the_inventory():
    sources = Counter(row.source for row in CATALOG.values())
    assert {f"000 A{number}" for number in range(1, 36)} == {s for s in sources if s[:3] == "000"}
    assert sum(row.source.startswith("002") for row in CATALOG.values()) == 36
    titled = {name for name in CATALOG if "-as-titled" in name and not name.endswith("/full")}
    assert len(titled) == 7
    in_003 = [n for n in CATALOG if CATALOG[n].source[:3] == "003" and "/full" not in n]
    in_004 = [n for n in CATALOG if CATALOG[n].source[:3] == "004"]
    assert len(in_003) == 42 + 2  # its C12 trains rows to the end: the rows "/full"
    assert len(in_004) == 18 + 5
