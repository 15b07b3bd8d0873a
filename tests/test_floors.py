"""The layout beyond the contracts of import-linter: torch, the environment, one place for each."""

import ast
import re
import subprocess
import sys

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
# Packages and modules of dlrm that import neither torch nor, unless they start it, Spark.
TORCH_FREE = """
    api.dataset api.spark_session api.temporary
    command_line documents environment files flags limits locks machine manifest
    mapped_files pages remote settings variables version
    data.bags data.choices data.clicks.config data.clicks.feature_spec data.clicks.list_columns
    data.clicks.writer data.layout data.names data.sources data.transform data.verification
    data.workers
    deployment.client deployment.deployer deployment.export deployment.server
    language.config language.flags language.prepare_text language.wordpiece
    metrics.auc metrics.judged metrics.latency metrics.ranked
    metrics.table model.config preproc
    scripts.common.scoring scripts.convert scripts.dist_main
    scripts.doctor scripts.evaluate.__main__ scripts.gen_csv scripts.main scripts.predict
    scripts.prepare scripts.schema scripts.simulate_logs scripts.transcode
    serving.exported serving.rows serving.scoring serving.server.backend serving.server.reader
    serving.sources
    tasks.config train.config train.optim.config train.schedule
    vision.config vision.flags
""".split()  # noqa: SIM905  # a list literal has a line for each
MAX_MODULES = 16  # in a folder


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_scripts_read_the_environment(root):
    commands = {
        root / "dlrm" / name for name in ("scripts", "deployment", "preproc", "published", "remote")
    }
    own = {  # the launcher's variables, those set for torch, and those of terminals
        *(root / "dlrm" / f"{name}.py" for name in ("command_line", "environment", "variables")),
        root / "dlrm" / "distributed" / "world.py",
        *(root / "dlrm" / "tasks" / f"{name}.py" for name in ("ending", "start")),
    }
    wrong, seen = [], 0
    for path in sorted((root / "dlrm").rglob("*.py")):
        if not commands & set(path.parents) and path not in own:
            seen += 1
            tree = ast.walk(ast.parse(path.read_text()))
            used = {node.attr for node in tree if isinstance(node, ast.Attribute)}
            used |= {name.rpartition(".")[2] for name in imports(path)}
            if found := used & ENVIRONMENT:
                wrong.append(f"{path.relative_to(root)} uses {', '.join(sorted(found))}")
    assert not wrong
    assert seen > 20


def test_one_module_parses_flags_and_none_has_global_ones(root):
    files = [path for name in ("dlrm", "preproc", "triton") for path in (root / name).rglob("*.py")]
    parsers = {
        str(path.relative_to(root))
        for path in files
        if {"absl", "argparse"} & {name.split(".")[0] for name in imports(path)}
    }
    assert parsers == {"dlrm/flags.py"}
    assert "flags.FLAGS" not in (root / "dlrm" / "flags.py").read_text()


def modules_of(root, name):
    """Returns the module, or all modules of a package."""
    path = root.joinpath(*name.split("."))
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    parts = (file.relative_to(root).with_suffix("").parts for file in found)
    return [".".join(own).removesuffix(".__init__") for own in parts]


def test_preprocessing_and_serving_need_no_torch(root):
    modules = [module for name in TORCH_FREE for module in modules_of(root, f"dlrm.{name}")]
    assert len(modules) > 2 * len(TORCH_FREE)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'pyspark'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'"
    )
    subprocess.run([sys.executable, "-c", code, *modules], check=True, cwd=root)


def test_no_folder_has_more_modules_than_fit_the_eye(root):
    folders = [root / "dlrm", *(path for path in (root / "dlrm").rglob("*") if path.is_dir())]
    counts = {path: len([*path.glob("[!_]*.py")]) for path in folders}
    assert not {path: count for path, count in counts.items() if count > MAX_MODULES}


def test_json_and_yaml_on_disk_are_read_in_one_place(root):
    """All other JSON comes from a process, a request or a log line."""
    readers = (
        r"json\.load\(|json\.loads\((\([^)]*\)|[^()\n])*\.read_|safe_load|yaml\.load|SafeLoader"
    )
    folders = [root / name for name in ("dlrm", "triton", "preproc")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [path.name for path in files if re.search(readers, path.read_text())]
    assert found == ["documents.py"]
