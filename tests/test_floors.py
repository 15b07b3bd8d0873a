"""Every file imports only from lower floors, and torch is imported only where needed."""

import ast
import graphlib
import re
import subprocess
import sys

# Low to high; packages of one line do not import each other.
FLOORS = [
    ["dlrm.host_memory", "dlrm.version"],
    ["dlrm.host_cores"],
    ["dlrm.variables"],
    [
        *("dlrm.documents", "dlrm.environment", "dlrm.locks", "dlrm.step_clock"),
        "dlrm.torch_settings",
    ],
    ["dlrm.files", "dlrm.limits", "dlrm.mapped_files"],
    ["dlrm.command_line", "dlrm.manifest"],
    ["dlrm.remote", "dlrm.pages"],
    ["dlrm.ops", "dlrm.distributed"],
    ["dlrm.metrics"],
    ["dlrm.model", "dlrm.data", "dlrm.train"],
    ["dlrm.tasks", "dlrm.serving", "dlrm.preproc"],
    ["dlrm.session", "dlrm.api"],
    ["dlrm.vision", "dlrm.language"],
    ["dlrm.scripts", "dlrm.deployment"],
    ["preproc", "triton"],
    ["dlrm.published"],
    ["benchmarks", "examples", "demo"],
]
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
FLOOR = {package: height for height, floor in enumerate(FLOORS) for package in floor}
# Packages and modules that import neither torch nor, unless they start it, Spark.
TORCH_FREE = [
    "dlrm.api.dataset",
    "dlrm.api.defaults",
    "dlrm.api.spark_session",
    "dlrm.api.temporary",
    "dlrm.command_line",
    "dlrm.documents",
    "dlrm.environment",
    "dlrm.flags",
    "dlrm.files",
    "dlrm.host_cores",
    "dlrm.host_memory",
    "dlrm.limits",
    "dlrm.locks",
    "dlrm.manifest",
    "dlrm.mapped_files",
    "dlrm.variables",
    "dlrm.version",
    "dlrm.data.choices",
    "dlrm.data.bags",
    "dlrm.data.clicks.config",
    "dlrm.data.clicks.feature_spec",
    "dlrm.data.layout",
    "dlrm.data.clicks.list_columns",
    "dlrm.data.names",
    "dlrm.data.clicks.writer",
    *(f"dlrm.vision.{name}" for name in ("config", "flags", "layout")),
    "dlrm.data.sources",
    *(f"dlrm.language.{name}" for name in ("config", "flags")),
    "dlrm.language.data.config",
    "dlrm.language.pretraining.report",
    "dlrm.language.data.wordpiece",
    "dlrm.data.transform",
    "dlrm.data.verification",
    "dlrm.data.workers",
    *(f"dlrm.deployment.{name}" for name in ("client", "deployer", "export", "server")),
    "dlrm.model.config",
    *(f"dlrm.metrics.{name}" for name in ("grouped", "intervals", "judged", "latency", "ranked")),
    *("dlrm.metrics.slices", "dlrm.metrics.table"),
    "dlrm.pages",
    "dlrm.preproc",
    "dlrm.remote",
    "dlrm.serving.rows",
    *(f"dlrm.serving.{name}" for name in ("exported", "scoring", "sources")),
    "dlrm.serving.server.backend",
    "dlrm.serving.server.reader",
    "dlrm.scripts.common.scoring",
    "dlrm.scripts.convert",
    "dlrm.scripts.dist_main",
    "dlrm.scripts.doctor",
    "dlrm.scripts.evaluate.__main__",
    "dlrm.scripts.gen_csv",
    "dlrm.scripts.main",
    "dlrm.scripts.predict",
    "dlrm.scripts.prepare",
    "dlrm.scripts.schema",
    "dlrm.scripts.simulate_logs",
    "dlrm.scripts.transcode",
    "dlrm.settings",
    "dlrm.tasks.config",
    "dlrm.train.config",
    "dlrm.train.optim.config",
    "dlrm.train.schedule",
]
MAX_MODULES = 16  # in a folder


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


def test_only_scripts_read_the_environment(root):
    commands, wrong, seen = (
        {
            root / "dlrm" / name
            for name in ("scripts", "deployment", "preproc", "session", "published", "remote")
        },
        [],
        0,
    )
    own = {  # the launcher's variables, those set for torch, and those of terminals
        root / "dlrm" / "command_line.py",
        root / "dlrm" / "distributed" / "world.py",
        *(root / "dlrm" / name for name in ("environment.py", "variables.py")),
        root / "dlrm" / "language" / "pretraining" / "command.py",
    }
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
    if not path.is_dir():
        return [name]
    found = (file.relative_to(root).with_suffix("") for file in sorted(path.rglob("*.py")))
    return [".".join(file.parts).removesuffix(".__init__") for file in found]


def test_preprocessing_and_serving_need_no_torch(root):
    modules = [module for name in TORCH_FREE for module in modules_of(root, name)]
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
    crowded = {
        str(folder.relative_to(root)): count
        for folder in [root / "dlrm", *(f for f in (root / "dlrm").rglob("*") if f.is_dir())]
        if (count := len([f for f in folder.glob("*.py") if f.name != "__init__.py"])) > MAX_MODULES
    }
    assert not crowded


def test_packages_import_each_other_in_no_circle(root):
    """Folders of `dlrm` may import siblings and subfolders, but not in a cycle."""
    imported: dict[str, set[str]] = {}
    folders = {path.parent for path in (root / "dlrm").rglob("*.py")}
    names = {".".join(folder.relative_to(root).parts) for folder in folders} - {"dlrm"}
    for path in (root / "dlrm").rglob("*.py"):
        own = ".".join(path.parent.relative_to(root).parts)
        if own in names:
            found = {folder_of(name, names) for name in imports(path)} - {own, None}
            imported.setdefault(own, set()).update(found)
    order = graphlib.TopologicalSorter(imported)
    assert len(list(order.static_order())) == len(imported)


def folder_of(module, names):
    """Returns the innermost folder of a module."""
    parts = (module or "").split(".")
    ends = range(len(parts), 0, -1)
    return next((name for end in ends if (name := ".".join(parts[:end])) in names), None)


def test_no_command_imports_another(root):
    """Only `flags` of another command are imported; `dist_main` is `main` with other defaults."""
    scripts, wrong, seen = root / "dlrm" / "scripts", [], set()
    for path in sorted(scripts.rglob("*.py")):
        own = path.relative_to(scripts).with_suffix("").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] != ["dlrm", "scripts"] or len(parts) < 3:
                continue
            seen.add(parts[2])
            flags_only = parts[3:4] == ["flags"]
            if parts[2] not in (own, "common") and not flags_only:
                wrong.append((own, parts[2]))
    assert wrong == [("dist_main", "main")]
    assert {"common", "evaluate", "checkpoint"} <= seen


def test_json_and_yaml_on_disk_are_read_in_one_place(root):
    """All other JSON comes from a process, a request or a log line."""
    readers = (
        r"json\.load\(|json\.loads\((\([^)]*\)|[^()\n])*\.read_|safe_load|yaml\.load|SafeLoader"
    )
    folders = [root / name for name in ("dlrm", "triton", "preproc")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [path.name for path in files if re.search(readers, path.read_text())]
    assert found == ["documents.py"]
