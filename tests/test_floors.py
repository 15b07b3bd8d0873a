"""Every file imports from lower floors only, and where torch is not needed it is not imported."""

import ast
import subprocess
import sys

import pytest

# Low to high; files of one line do not import each other's packages.
FLOORS = [
    ["dlrm.files"],
    ["dlrm.manifest"],
    ["dlrm.ops", "dlrm.distributed"],
    ["dlrm.model", "dlrm.data", "dlrm.train"],
    ["dlrm.tasks", "dlrm.serving", "preproc"],
    ["dlrm.systems"],
    ["dlrm.scripts", "triton"],
    ["benchmarks", "demo"],
]
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
FLOOR = {package: height for height, floor in enumerate(FLOORS) for package in floor}
TORCH_FREE = [
    "dlrm",
    "dlrm.files",
    "dlrm.manifest",
    "dlrm.data.layout",
    "dlrm.data.feature_spec",
    "dlrm.data.transform",
    "dlrm.data.transform_difference",
    "dlrm.data.text_columns",
    "dlrm.data.dictionaries",
    "dlrm.data.id_lookup",
    "dlrm.data.native",
    "dlrm.data.writer",
    "dlrm.data.csv_cells",
    "dlrm.data.csv_columns",
    "dlrm.data.csv_transform",
    "dlrm.data.transcode",
    "dlrm.data.transcode_spec",
    "dlrm.serving.rows",
    "dlrm.serving.shares",
    "dlrm.scripts.verify_dataset",
    "dlrm.data.log_lines",
    "dlrm.data.image_layout",
    "dlrm.data.tfrecord",
    "dlrm.data.instances",
    "dlrm.data.pretraining_writer",
    "dlrm.data.raw_text",
    "dlrm.data.text_formats",
    "dlrm.data.text_layout",
    "dlrm.data.text_report",
    "dlrm.data.wordpiece",
    "dlrm.data.verification",
    "dlrm.data.workers",
    "preproc.convert_to_binary",
    "preproc.dictionaries",
    "preproc.engines",
    "preproc.hashing",
    "preproc.image_shards",
    "preproc.image_sources",
    "preproc.prepare_images",
    "preproc.prepare_text",
    "preproc.options",
    "preproc.pipeline",
    "preproc.counted_splits",
    "preproc.stage",
    "preproc.raw_log",
    "preproc.report",
    "preproc.simulate_logs",
    "preproc.spark_engine",
    "preproc.tasks",
    "preproc.work_folder",
]


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return next((p for p in (".".join(parts[:2]), parts[0]) if p in FLOOR), None)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_files_import_from_lower_floors_only(root):
    wrong, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        own = package_of(".".join(path.relative_to(root).with_suffix("").parts))
        for package in filter(None, map(package_of, imports(path))) if own else ():
            seen.add(own)
            if package != own and FLOOR[package] >= FLOOR[own]:
                wrong.append(f"{path.relative_to(root)} imports {package}")
    assert not wrong
    assert {"dlrm.model", "dlrm.data", "dlrm.train", "dlrm.tasks", "dlrm.scripts"} <= seen


def test_only_scripts_read_flags_and_the_environment(root):
    scripts, wrong, seen = root / "dlrm" / "scripts", [], 0
    of_the_launcher = root / "dlrm" / "distributed.py"  # whose variables are all it reads
    for path in sorted((root / "dlrm").rglob("*.py")):
        if scripts not in path.parents and path != of_the_launcher:
            seen += 1
            names = {name.split(".")[0] for name in imports(path)}
            tree = ast.walk(ast.parse(path.read_text()))
            used = {node.attr for node in tree if isinstance(node, ast.Attribute)}
            used |= {name.rpartition(".")[2] for name in imports(path)}
            if found := names & {"absl"} | used & ENVIRONMENT:
                wrong.append(f"{path.relative_to(root)} uses {', '.join(sorted(found))}")
    assert not wrong
    assert seen > 20


@pytest.mark.parametrize("module", TORCH_FREE)
def test_preprocessing_and_serving_need_no_torch(root, module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=root)
    assert done.returncode == 0
