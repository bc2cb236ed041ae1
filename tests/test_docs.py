"""The pages against the code: tables, commands, make targets, links and Python examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duomesh.cli.main import COMMANDS
from duomesh.core.ir.ops import KINDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text("utf-8") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def op_rows() -> list[list[str]]:
    """kind, inputs, parameters, attributes of docs/ir.md's table."""
    lines = PAGES["ir.md"].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| kind |")) + 2
    rows = [cells(line)[:4] for line in lines[start:] if line.startswith("| `")]
    return [[cell.strip("`") for cell in row] for row in rows]


def test_the_op_table_is_that_of_the_code() -> None:
    want = [[name, " ".join(k.inputs), " ".join(k.params), " ".join(k.attrs)] for name, k in KINDS.items()]
    assert op_rows() == want


def commands_in(text: str) -> set[str]:
    """Words that follow `duomesh` where a command line is quoted."""
    return set(re.findall(r"(?:^\$ |`)duomesh ([a-z]+)\b", text, re.MULTILINE))


def test_every_command_is_documented_and_exists() -> None:
    planned = {"plan"}
    named = {name for text in PAGES.values() for name in commands_in(text)}
    assert named - planned <= set(COMMANDS)
    assert commands_in(PAGES["README.md"]) == set(COMMANDS)


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for page, text in PAGES.items():
        named = set(re.findall(r"(?:^|`|\$ )make ([a-z][a-z-]*)", text, re.MULTILINE))
        assert named <= targets, (page, named - targets)
    helped = set(re.findall(r"'make ([a-z-]+) ", makefile))
    assert helped == targets - {"help"}


def test_links_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_files_that_pages_name_exist() -> None:
    """Paths in backquotes, from the root or from the package; what is planned is under a heading that says so."""
    for page, text in PAGES.items():
        if page == "design.md":  # names planned packages
            continue
        for name in set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|md|toml)|(?:[\w-]+/)+)`", text)):
            places = (ROOT / name, ROOT / "duomesh" / name)
            assert any(place.exists() for place in places), f"{page}: {name}"


PYTHON = [
    (page, index, block)
    for page, text in PAGES.items()
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize(("page", "index", "block"), PYTHON, ids=lambda value: str(value)[:12].strip())
def test_python_examples_compile(page: str, index: int, block: str) -> None:
    compile(block, f"{page}, example {index}", "exec")


def test_the_readme_s_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for page, _, block in PYTHON if page == "README.md"]
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "exported" / "model.safetensors").is_file()
