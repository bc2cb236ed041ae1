"""The table of mutants fits the code that it breaks, and the script that tries them tells caught from not caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mutation import run


def test_every_edit_of_the_table_can_be_made() -> None:
    """A change of the code moves its mutants along."""
    mutants = run.read_mutants(run.TABLE)
    assert len(mutants) >= 100
    run.check_table(mutants, run.ROOT)


def test_every_test_of_the_table_exists() -> None:
    for mutant in run.read_mutants(run.TABLE):
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.split('[')[0]}(" in (run.ROOT / file).read_text("utf-8"), mutant.name


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one function and one test, instead of this one."""
    root = tmp_path / "toy"
    files = {
        "duomesh/__init__.py": "def double(x):\n    return 2 * x\n\n\ndef unused():\n    return 1\n",
        "tests/test_toy.py": "from duomesh import double\n\n\ndef test_double():\n    assert double(3) == 6\n",
        "examples/README.md": "",
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "TABLE", root / "mutants.toml")
    return root


def write_table(root: Path, **edits: tuple[str, str]) -> None:
    """name=(old, new)"""
    rows = [
        f"[[mutant]]\nname = '{name}'\nbreaks = 'a rule'\nfile = 'duomesh/__init__.py'\nold = '{old}'\nnew = '{new}'\n"
        "tests = ['tests/test_toy.py::test_double']\n"
        for name, (old, new) in edits.items()
    ]
    (root / "mutants.toml").write_text("\n".join(rows))


def test_a_mutant_is_judged_by_its_test(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a failed assertion counts; the tree stays as it was."""
    write_table(
        toy,
        wrong=("return 2 * x", "return 3 * x"),
        idle=("return 1", "return 2"),
        crash=("return 2 * x", "return 2 * y"),
    )
    before = (toy / "duomesh/__init__.py").read_text()

    def results(*words: str) -> tuple[int, dict[str, Any]]:
        code = run.main([*words, "--json", str(toy / "out.json")])
        data = json.loads((toy / "out.json").read_text())
        assert data["passed"] == (code == 0)
        return code, {row["name"]: (row["result"], row["failed"]) for row in data["mutants"]}

    test = "tests/test_toy.py::test_double"
    want = {"wrong": ("caught", test), "idle": ("survived", ""), "crash": ("crashed", test)}
    assert results() == (1, want)
    assert "2 of 3 mutants were not caught: idle, crash" in capsys.readouterr().out
    assert results("--only", "w*") == (0, {"wrong": ("caught", test)})
    write_table(toy, slow=("return 2 * x", "while True: pass"))
    assert results("--timeout", "2") == (1, {"slow": ("timed out", "")})
    assert (toy / "duomesh/__init__.py").read_text() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("return 4", "return 5"), "occurs 0 times, not once"),
        (("return", "return 0 and"), "occurs 2 times, not once"),
        (("return 1", "return 1"), "equals its replacement"),
        (("return 1", "return ("), "no longer compiles"),
    ],
)
def test_an_edit_that_cannot_be_made_is_an_error_of_the_table(
    toy: Path, capsys: pytest.CaptureFixture[str], edit: tuple[str, str], message: str
) -> None:
    """Of the whole table, whatever was asked for."""
    write_table(toy, bad=edit, good=("return 2 * x", "return x"))
    assert run.main(["--only", "good"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mutation: bad: ") and message in error and "good" not in error


def test_nothing_is_shown_by_tests_that_fail_anyway(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(toy, wrong=("return 2 * x", "return 3 * x"))
    (toy / "tests/test_toy.py").write_text("def test_double():\n    assert False\n")
    assert run.main([]) == 2
    assert "without any mutation the tests do not pass" in capsys.readouterr().err
    (toy / "tests/test_toy.py").write_text("def test_other():\n    pass\n")
    assert run.main([]) == 2
    assert "not found" in capsys.readouterr().err
