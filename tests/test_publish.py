"""Outputs appear whole or not at all, and an output that cannot replace an older one leaves it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from duomesh.core.errors import OutputError
from duomesh.core.publish import is_temporary, publish_directory, publish_file


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with publish_directory(target) as work:
        (work / "a").write_text("1")
        assert not target.exists() and is_temporary(work)
    assert contents(tmp_path) == {"deep/out/a": "1"}


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), publish_directory(tmp_path / "out") as work:
        (work / "a").write_text("1")
        raise ValueError("mine")
    assert not any(tmp_path.iterdir())


def test_overwriting_replaces_the_whole_directory(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("0")
    with pytest.raises(OutputError, match="is not empty"), publish_directory(target):
        raise AssertionError("must not be entered")
    with publish_directory(target, overwrite=True) as work:
        (work / "new").write_text("1")
    assert contents(tmp_path) == {"out/new": "1"}


def test_a_failed_overwrite_puts_the_old_directory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename of the new directory fails after the old one was moved aside."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("0")
    rename = Path.rename

    def fail(self: Path, other: Path) -> Path:
        if other == target and self.name != "old":
            raise OSError(28, "No space left on device", str(self))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match="No space left"), publish_directory(target, overwrite=True) as work:
        (work / "new").write_text("1")
    assert contents(tmp_path) == {"out/old": "0"}


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="a file of that name exists"), publish_directory(tmp_path / "out"):
        raise AssertionError("must not be entered")
    with pytest.raises(OutputError, match=str(tmp_path / "out" / "x")):
        publish_file(tmp_path / "out" / "x", b"")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "report"
    publish_file(target, b"one")
    publish_file(target, b"two")
    assert contents(tmp_path) == {"report": "two"}
