"""Imports point one way: from the scripts to the method, never back."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ["methods", "corpora", "encoders", "runtime", "report"]
SCRIPTS = {"train", "distill", "eval"}
FILES = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))]
# What each may import, from the bottom up; a folder's files may import each other.
MACHINE = {f"runtime.{name}" for name in "errors attention mesh processes optimizers files".split()}
MAY = {"losses": set(), "samplers": {"losses"}, "elf": {"runtime.attention"}}
MAY |= {name: {"runtime.errors"} for name in MACHINE}
BELOW = {*MAY, "encoders", "corpora"}
MAY |= {"encoders": BELOW, "corpora": BELOW, "config": {"corpora", "elf", "runtime.errors"}}
MAY |= {"data": {*BELOW, "config"}, "methods": {*BELOW, "config", "data"}}
ABOVE = {*BELOW, "config", "data", "methods", "runtime"}
MAY |= {"runtime": ABOVE, "report": ABOVE}


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(file): file for file in FILES}


def imports(file):
    """List our modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name == "methods" or (name in MODULES and name not in FOLDERS)}


GRAPH = {name: imports(file) - {name} for name, file in MODULES.items()}


def test_the_top_shows_the_method_and_the_scripts():
    tops = {"elf", "losses", "samplers", "data", "config", *SCRIPTS}
    assert {name for name in MODULES if name not in FOLDERS and "." not in name} == tops


def test_no_module_imports_a_script():
    """Only a script may: distill.py trains its rounds by train.py, and eval.py times its step."""
    assert {name for name, found in GRAPH.items() if found & SCRIPTS} <= SCRIPTS


def test_every_import_points_down():
    """Each module imports only what stands below it in the house."""
    odd = {}
    for name, found in GRAPH.items():
        folder = name.split(".")[0]
        may = MAY.get(name, MAY.get(folder)) or set()
        allowed = {
            other for other in found if other in may or other.split(".")[0] in may | {folder} - {"runtime"}
        }
        odd |= {name: found - allowed} if name not in SCRIPTS and found - allowed else {}
    assert not odd


def test_there_are_no_cycles():
    assert len(list(TopologicalSorter(GRAPH).static_order())) == len(GRAPH)
