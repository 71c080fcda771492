"""The documents name only what exists, and the map leaves out nothing of the paper."""

import contextlib
import importlib
import io
import re
import shlex
import sys
from functools import lru_cache, reduce
from pathlib import Path
from unittest import mock

import pytest

from config import TrainConfig, parse
from elf import CONTROL_TOKENS, SIZES
from encoders.t5 import T5_CONFIGS
from report import paper
from report.claims import CLAIMS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "results" / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = (ROOT / "docs" / "paper-map.md").read_text()
FOLDERS = ["", "methods/", "corpora/", "encoders/", "runtime/", "report/"]
MODULES = {str(file.relative_to(ROOT)) for folder in FOLDERS for file in ROOT.glob(f"{folder}*.py")}
MODULES -= {f"{folder}__init__.py" for folder in FOLDERS}
each_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)


def exists(name: str) -> bool:
    """Check that a dotted name is a file, or an attribute (or dataclass field) that can be imported."""
    parts = name.split(".")
    n = max((i for i in range(1, len(parts)) if "/".join(parts[:i]) + ".py" in MODULES), default=0)
    if not n:
        return (ROOT / name).exists()
    owner = reduce(getattr, parts[n:-1], importlib.import_module(".".join(parts[:n])))
    return hasattr(owner, parts[-1]) or parts[-1] in getattr(owner, "__dataclass_fields__", {})


@lru_cache
def help_of(script: str, *subcommand: str) -> str:
    """Capture the --help of a script, in this process."""
    argv, out = [script, *subcommand, "--help"], io.StringIO()
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        importlib.import_module(script.removesuffix(".py")).main()
    return out.getvalue()


def odd_in(command: str) -> list[str]:
    """List the parts of a command that do not exist: script, subcommand, name of a table or figure, flags."""
    script, *words = command.split()
    if script not in MODULES:
        return [script]
    subcommand = [word for word in words[:1] if script == "eval.py" and not word.startswith("--")]
    texts, odd = [help_of(script), help_of(script, *subcommand)], []
    for word, text in zip(words, texts if subcommand else [], strict=False):
        choices = re.search(r"^usage: .*\{(.*)\}$", text, re.MULTILINE)  # of the next word, if it has choices
        odd += [word] if choices and word not in choices[1].split(",") else []
    flags = re.findall(r"--[\w-]+", texts[-1])
    claims = words[words.index("--only") + 1 :] if "--only" in words else []
    odd += [word for word in words if word.startswith("--") and word not in flags]
    return odd + [word for word in claims if word not in CLAIMS]


def rows(text: str) -> list[tuple[str, str]]:
    """Find the left and the right cell of every row in tables of two columns."""
    return re.findall(r"^\| (?!paper \|)(.*) \| (.*) \|$", text.replace("\\|", "/"), re.MULTILINE)


def sections() -> list[tuple[str, str]]:
    """Split the map into headings and the text below each."""
    return [tuple(part.split("\n", 1)) for part in re.split(r"^## ", MAP, flags=re.MULTILINE)[1:]]


def test_every_name_in_the_map_exists():
    """The right side of the map is a name to import, a file, a command, or the reason why there is none."""
    for left, right in rows(MAP):
        names = re.findall(r"`([^`]+)`", right)
        assert names or "not here: " in right or "](#" in right, left
        for name in names:
            assert exists(name) if " " not in name else not odd_in(name), f"{left}: {name}"


def test_every_default_in_the_map_is_that_of_its_command():
    """`config.TrainConfig.x` = value: the default of the command in the heading above it."""
    for heading, text in sections():
        command = re.search(r"`train\.py ([^`]*)`", heading)
        config = parse(shlex.split(command[1]), "") if command else None
        for field, value in re.findall(r"Config\.(\w+)` = ([^\s,;:]+)", text):
            assert str(getattr(config, field)) == value, f"{heading}: {field}"


@pytest.mark.parametrize("kind, last", [("Eq.", 5), ("Alg.", 6), ("Table", 11), ("Figure", 18)])
def test_nothing_of_the_paper_is_missing(kind, last):
    """Every equation, algorithm, table and figure of the paper has a row."""
    numbers = {int(n) for left, _ in rows(MAP) for n in re.findall(rf"^{re.escape(kind)} (\d+)[a-z]?:", left)}
    assert numbers == set(range(1, last + 1))


def test_table_7_is_the_default():
    """Every hyperparameter of Table 7 is in the map, and has the paper's value with `--model elf-b`."""
    table = next(text for heading, text in sections() if "Table 7" in heading)
    default = parse(["--model", "elf-b"], "")
    derived = {"embedding": T5_CONFIGS["t5-small"]["d_model"], "width": SIZES["elf-b"]["width"]}
    derived |= {"epochs": default.steps / 19_017, "warm-up epochs": round(default.warmup_steps / 19_017, 3)}
    derived |= {"control tokens of each kind": CONTROL_TOKENS, "weight_decay": 0}
    for key, value in paper.HYPERPARAMETERS.items():
        if key in TrainConfig.__dataclass_fields__:
            assert str(getattr(default, key)).lower() == str(value).lower(), key
            assert f"`config.TrainConfig.{key}` = {getattr(default, key)}" in table
        elif key not in ("device", "hours an epoch"):
            assert derived[key] == value, key


@each_document
def test_every_link_leads_somewhere(file):
    """Relative links lead to a file, and to a heading in it if they name one."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", file.read_text()):
        path = file.parent / target if target else file
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text().lower(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles], anchor


@each_document
def test_every_command_and_import_works(file):
    """Commands name scripts, subcommands and flags that exist, and imports name what is there."""
    text = file.read_text().replace("\\\n", " ")
    commands = re.findall(r"python (\w+\.py\b[^`\n#\"&]*)", text)
    assert not {command: odd for command in commands if (odd := odd_in(command))}
    for module, names in re.findall(r"from ([a-z]+\.\w+) import ([\w, ]+)", text):
        assert all(exists(f"{module}.{name}") for name in names.split(", ")), module


def test_the_readme_is_short():
    """The README has about 900 words; everything else is in docs/ and results/."""
    assert 800 <= len((ROOT / "README.md").read_text().split()) <= 1000


def test_every_file_is_explained():
    """docs/files.md has a row for every module, and the README's tree a line for every one at the top."""
    explained = {name.strip("`") for name, _ in rows((ROOT / "docs" / "files.md").read_text())}
    assert explained - {"file"} == MODULES
    tree = set(re.findall(r"^([\w.]+/?)  ", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {name for name in MODULES if "/" not in name} <= tree
    assert all((ROOT / name).exists() for name in tree)
