"""The pages against the code: tables, commands and what they print, make targets, links, Python examples, pictures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import duomesh as dm
from duomesh.cli.main import COMMANDS, main
from duomesh.core.ir.ops import KINDS
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.rules import mesh_and_rules
from duomesh.core.sharding import transitions
from duomesh.core.sharding.modes import Mode
from duomesh.core.sharding.transitions import INVARIANT, PARTIAL, REPLICATED, Kind, shard

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text("utf-8") for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: str, header: str) -> list[list[list[str]]]:
    """Cells without backquotes of every table of a page whose header begins like this."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE):
        head, _, *rows = block.splitlines()
        if head.startswith(header):
            found.append([[cell.strip("`") for cell in cells(row)] for row in rows])
    return found


def test_the_op_table_is_that_of_the_code() -> None:
    want = [[name, " ".join(k.inputs), " ".join(k.params), " ".join(k.attrs)] for name, k in KINDS.items()]
    (rows,) = tables("ir.md", "| kind |")
    assert [row[:4] for row in rows] == want


@pytest.mark.parametrize("page", ["design.md", "sharding.md"])
def test_the_table_of_transitions_is_that_of_the_code(page: str) -> None:
    states = {str(state): state for state in (shard("d"), INVARIANT, PARTIAL, REPLICATED, shard("e"))}
    (rows,) = tables(page, "| transition |")
    for name, ahead, back in rows:
        before, after = (states[word] for word in name.split(" -> "))
        assert transitions.forward(before, after).value == ahead, name
        assert transitions.backward(before, after).value == back, name
    kinds = {tuple(word[0] for word in row[0].split(" -> ")) for row in rows}
    assert len(rows) == len(kinds) == len(Kind) ** 2 - len(Kind) + 1  # of equal kinds only S(d) -> S(e) moves


@pytest.mark.parametrize("page", ["design.md", "sharding.md"])
def test_the_tables_of_states_and_modes_name_those_of_the_code(page: str) -> None:
    (rows,) = tables(page, "| state |")
    states = [shard("d"), INVARIANT, PARTIAL, REPLICATED]
    assert [(row[0].split("`")[0], row[-1]) for row in rows] == [(str(s), str(transitions.dual(s))) for s in states]
    (modes,) = tables(page, "| mode |")
    assert [row[0].split("`")[0] for row in modes] == list(get_args(get_type_hints(Mode)["kind"]))


@pytest.mark.parametrize(
    ("number", "model", "plan"),
    [
        (0, "tiny-llama3", "tp=4,dp=4,cp=2,sequence_parallel,zero=1,zero_shard=2"),
        (1, "tiny-moe", "tp=2,dp=4,ep=4,etp=1,sequence_parallel"),
    ],
)
def test_the_rules_of_a_plan_are_those_of_the_code(number: int, model: str, plan: str) -> None:
    words = {False: "no", True: "yes"}
    mesh, rules = mesh_and_rules(dm.spec.preset(model), Plan.parse(plan))
    sizes = [str(axis.size) for axis in mesh.axes]
    want = [
        [r.axis, n, " ".join(r.params), r.data or "", r.stream or "", r.order, words[r.regathers], words[r.shares]]
        for n, r in zip(sizes, rules, strict=True)
    ]
    assert f"`{plan}` for\n{model}" in PAGES["sharding.md"] or f"`{plan}` for {model}" in PAGES["sharding.md"]
    assert tables("sharding.md", "| axis |")[number] == want


def test_the_block_on_paper_is_that_of_the_code() -> None:
    """States of results, and movements by value in order, of docs/sharding.md's section 6."""
    listing = dm.explain("llama3-8b", "tp=2,dp=2,sequence_parallel,zero=1,precision=bfloat16", seq=8192)
    ops = {op["op"]: op for op in listing.ops if op["program"] == "block0"}
    (rows,) = tables("sharding.md", "| op |")
    for name, _, operands, result in rows:
        op = ops[name.split("`")[0]]
        assert op["states"] == {"dp": "S(batch)", "tp": result}, name
        moved = re.findall(r"\*\*`([^`]+)`\*\*", operands)
        assert moved == [f"{m['before']} -> {m['after']}" for m in op["moves"]], name
    (rows,) = tables("sharding.md", "| movement |")
    moves = [m for op in ops.values() for m in op["moves"]]
    want = [(m["value"], f"{m['before']} -> {m['after']}", m["backward"]) for m in reversed(moves)]
    assert [(*re.split("`: `", row[0]), row[1]) for row in rows] == want


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


# Sharding: what examples and commands print, and pictures

# a Python example, and the next block, which is what it prints
PRINTED = re.findall(r"^```python\n(.*?)^```.*?^```\n(.*?)^```", PAGES["sharding.md"], re.MULTILINE | re.DOTALL)


def test_examples_of_sharding_print_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, as a reader would; the picture that they draw is the one that the page shows."""
    names: dict[str, Any] = {"__name__": "sharding"}
    assert len(PRINTED) == PAGES["sharding.md"].count("```python\n") > 0
    for block, printed in PRINTED:
        exec(compile(block, "sharding.md", "exec"), names)
        assert capsys.readouterr().out == printed
    assert names["svg"] == (ROOT / "docs/pictures/moe-block.svg").read_text("utf-8"), "draw it again, as the page does"


EXPLAINED = [
    (page, command, printed)
    for page, text in PAGES.items()
    for command, printed in re.findall(
        r"^```\n\$ duomesh (explain [^\n]*--plan[^\n]*)\n(.*?)^```", text, re.M | re.DOTALL
    )
]


@pytest.mark.parametrize(("page", "command", "printed"), EXPLAINED, ids=[page for page, _, _ in EXPLAINED])
def test_explain_prints_what_pages_quote(
    page: str, command: str, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line that is not left out, in order; a picture is the one that is committed."""
    words = shlex.split(command)
    quoted = [line for line in printed.splitlines() if line != "..."]
    target = words[words.index("--picture") + 1] if "--picture" in words else None
    if target is not None:
        words[words.index(target)] = str(tmp_path / "drawn.svg")
        quoted = [line.replace(target, str(tmp_path / "drawn.svg")) for line in quoted]
    assert main(words) == 0
    lines = iter(capsys.readouterr().out.splitlines())
    for line in quoted:
        assert line in lines, f"{page}: {line}"
    if target is not None:
        assert (tmp_path / "drawn.svg").read_bytes() == (ROOT / target).read_bytes(), f"draw it again: {command}"


def test_every_picture_is_drawn_by_a_page() -> None:
    shown = {target for text in PAGES.values() for target in re.findall(r"\(pictures/([^)]+)\)", text)}
    assert shown == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert len(EXPLAINED) >= 3
