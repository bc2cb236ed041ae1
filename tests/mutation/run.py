"""Breaks the library's rules one at a time and shows which test notices.

A mutant is one edit of one file, listed in `mutants.toml` beside this script with the rule that it breaks and the
tests that should fail:

    python tests/mutation/run.py                    all of them, two at a time: some minutes
    python tests/mutation/run.py --only 'jax-*'     those whose names match; may be given several times
    python tests/mutation/run.py --json out.json    the result as data too

The tree is copied once, at the start: the working tree is never touched, and a change that somebody makes to it
meanwhile cannot be taken for a mutant's effect. All tests that follow pass in this copy, and Python is asked whether
the copy is what they import. Then every mutant gets a copy of its own, where its tests run in the order given until
one fails. A mutant is caught when a test's assertion fails. A test that ends in any other error proves little (any
typing mistake does that), so it does not count, nor does one that takes too long.

Exit code 0: every mutant was caught. 1: some were not. 2: nothing was shown, because the table, the tests or the
machine are at fault: a text that does not occur exactly once, an edit that does not compile, a test that does not
exist or fails without any mutation.

A new mutant must leave shapes and types as they are, and change what some input gives, or nothing could catch it.
Name exact tests (with their parameters in brackets): a search for tests would hide that one of them has gone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("duomesh", "tests", "examples", "pyproject.toml")  # what the tests read

# pytest's exit codes
PASSED, FAILED = 0, 1
# how pytest begins the reason of a failed assertion, and of an error that was expected and did not come
ASSERTION = ("AssertionError", "assert ", "Failed: DID NOT RAISE")


class MutationError(Exception):
    """Nothing can be shown; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One edit: `old`, which occurs exactly once in `file`, becomes `new`.

    breaks: the rule that no longer holds. tests: pytest node ids.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a mutant. failed: the first test that did; reason: the line that pytest gives for it."""

    mutant: Mutant
    result: Literal["caught", "survived", "crashed", "timed out"]
    failed: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """A run of pytest. exit_code is None if it took too long."""

    exit_code: int | None
    output: str
    seconds: float

    @property
    def first_failure(self) -> tuple[str, str]:
        """(node id, reason) of the first line of the summary."""
        lines = (line.split(" ", 1)[1] for line in self.output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        node, _, reason = next(lines, "").partition(" - ")
        return node, reason

    @property
    def explanation(self) -> str:
        """Why it did not pass."""
        return "\n".join(filter(None, self.first_failure)) or f"code {self.exit_code}\n{self.output[-3000:]}"


# The table


def read_mutants(path: Path) -> list[Mutant]:
    """Every mutant of the table, all fields given. Raises MutationError."""
    try:
        entries = tomllib.loads(path.read_text("utf-8"))["mutant"]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise MutationError(f"cannot read {path}: {error!r}.") from None
    wanted = {field.name for field in fields(Mutant)}
    mutants: list[Mutant] = []
    for entry in entries:
        if set(entry) != wanted or not entry["tests"]:
            raise MutationError(f"{path.name}: {entry.get('name')!r} must have exactly {', '.join(sorted(wanted))}.")
        mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutationError(f"{path.name}: {', '.join(twice)} occurs twice.")
    return mutants


def select(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    """Those whose name matches a pattern, all if there is none. Raises MutationError for one that matches nothing."""
    names = [mutant.name for mutant in mutants]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = get_close_matches(pattern, names, n=5, cutoff=0.4)
            raise MutationError(f"no mutant is named {pattern}; the closest are {', '.join(close) or 'none'}.")
    return [m for m in mutants if not patterns or any(fnmatchcase(m.name, p) for p in patterns)]


def mutated(mutant: Mutant, root: Path) -> str:
    """The file's text with the edit made. Raises MutationError if the edit is not possible or does not compile."""
    path = root / mutant.file
    if not path.is_file():
        raise MutationError(f"{mutant.name}: there is no file {mutant.file}.")
    text = path.read_text("utf-8")
    count = text.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        found = "equals its replacement" if count == 1 else f"occurs {count} times, not once"
        raise MutationError(f"{mutant.name}: the text to replace {found} in {mutant.file}:\n{mutant.old}")
    changed = text.replace(mutant.old, mutant.new)
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError as error:
        raise MutationError(f"{mutant.name}: {mutant.file} no longer compiles: {error}.") from None
    return changed


def check_table(mutants: Sequence[Mutant], root: Path) -> None:
    """Raises MutationError that lists every mutant whose edit cannot be made."""
    faults = []
    for mutant in mutants:
        try:
            mutated(mutant, root)
        except MutationError as error:
            faults.append(str(error))
    if faults:
        raise MutationError("\n".join(faults))


# Running tests


@contextmanager
def tree_copy(source: Path) -> Iterator[Path]:
    """A copy of a tree, removed at the end. Fresh, so that no compiled file of another text is in it."""
    with tempfile.TemporaryDirectory(prefix="duomesh-mutant-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for name in COPIED:
            if (source / name).is_dir():
                shutil.copytree(source / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source / name, root / name)
        yield root


def python_in(root: Path, words: Sequence[str], timeout: float) -> Run:
    """Runs this interpreter in a copy, whose modules come first."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "",
        "COLUMNS": "1000",  # or pytest cuts its summary
    }
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Run(None, text, time.perf_counter() - began)
    return Run(done.returncode, done.stdout, time.perf_counter() - began)


def run_tests(root: Path, tests: Sequence[str], timeout: float) -> Run:
    """Runs node ids until one fails."""
    options = ["-x", "--tb=no", "-rfE", "--color=no", "-p", "no:cacheprovider", f"--basetemp={root.parent / 'tmp'}"]
    return python_in(root, ["-m", "pytest", *options, *tests], timeout)


def check_unmutated(root: Path, tests: Sequence[str], timeout: float) -> float:
    """Seconds that all the tests take without a mutation. Raises MutationError unless they pass, with this tree."""
    where = python_in(root, ["-c", "import duomesh; print(duomesh.__file__)"], timeout).output.strip()
    if not Path(where).is_relative_to(root):
        raise MutationError(f"the tests would not run in the copy {root}: duomesh is {where}.")
    run = run_tests(root, tests, timeout)
    if run.exit_code is None:
        raise MutationError(f"without any mutation the tests take more than {timeout:g} s.")
    if run.exit_code != PASSED:
        raise MutationError(f"without any mutation the tests do not pass: {run.explanation}")
    return run.seconds


def try_mutant(mutant: Mutant, source: Path, timeout: float) -> Outcome:
    """Runs a mutant's tests. Raises MutationError if pytest could not run them."""
    with tree_copy(source) as root:
        (root / mutant.file).write_text(mutated(mutant, root), "utf-8")
        run = run_tests(root, mutant.tests, timeout)
    if run.exit_code is None:
        return Outcome(mutant=mutant, result="timed out", seconds=run.seconds)
    if run.exit_code == PASSED:
        return Outcome(mutant=mutant, result="survived", seconds=run.seconds)
    test, reason = run.first_failure
    if run.exit_code != FAILED or not test:
        # it failed to import, say: that shows nothing about the rule
        raise MutationError(f"{mutant.name}: pytest could not run its tests: {run.explanation}")
    result: Literal["caught", "crashed"] = "caught" if reason.startswith(ASSERTION) else "crashed"
    return Outcome(mutant=mutant, result=result, failed=test, reason=reason, seconds=run.seconds)


def try_all(mutants: Sequence[Mutant], source: Path, jobs: int, timeout: float, console: Console) -> list[Outcome]:
    """Every mutant's outcome, in the order given, with a progress line on a terminal."""
    columns = (
        TextColumn(
            "{task.completed}/{task.total} mutants, {task.fields[missed]} not caught; last: {task.fields[last]}"
        ),
    )
    with ThreadPoolExecutor(jobs) as pool, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(mutants), missed=0, last="none yet")
        futures: list[Future[Outcome]] = [pool.submit(try_mutant, mutant, source, timeout) for mutant in mutants]
        missed = 0
        try:
            for future in as_completed(futures):
                outcome = future.result()
                missed += outcome.result != "caught"
                progress.update(task, advance=1, missed=missed, last=outcome.mutant.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


# Output


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table(title=f"{len(outcomes)} mutants", title_justify="left")
    table.add_column("mutant")
    table.add_column("what it breaks", ratio=2)
    table.add_column("caught by", ratio=3, overflow="fold")
    table.add_column("seconds", justify="right")
    for outcome in outcomes:
        test = escape(outcome.failed.removeprefix("tests/"))
        by = test if outcome.result == "caught" else f"[bold red]{outcome.result}[/] {test}"
        table.add_row(outcome.mutant.name, escape(outcome.mutant.breaks), by, f"{outcome.seconds:.1f}")
    console.print(table)


def as_json(outcomes: Sequence[Outcome]) -> str:
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        row = asdict(outcome)
        rows.append({**row.pop("mutant"), **row})
    return json.dumps({"passed": all(o.result == "caught" for o in outcomes), "mutants": rows}, indent=2) + "\n"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break known rules one at a time; every break must fail a test.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a name or pattern; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at the same time (default 2)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds a mutant (default 180)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    try:
        mutants = read_mutants(TABLE)
        chosen = select(mutants, options.only)
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        with tree_copy(ROOT) as source:
            check_table(mutants, source)
            console.print(f"first without a mutation: {len(tests)} tests of {len(chosen)} mutants")
            seconds = check_unmutated(source, tests, 10 * options.timeout)
            console.print(f"they pass, in {seconds:.0f} s")
            outcomes = try_all(chosen, source, max(1, options.jobs), options.timeout, console)
    except MutationError as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    show(outcomes, console)
    if options.json is not None:
        options.json.write_text(as_json(outcomes), "utf-8")
    missed = [outcome.mutant.name for outcome in outcomes if outcome.result != "caught"]
    if missed:
        console.print(f"{len(missed)} of {len(outcomes)} mutants were not caught: {', '.join(missed)}")
        return 1
    console.print(f"all {len(outcomes)} mutants were caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
