"""`duomesh verify MODEL SIDE SIDE [SIDE...]`: the same weights and tokens through each side, compared op by op."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from duomesh.api import open_model
from duomesh.core.errors import ConfigError
from duomesh.core.publish import check_place, publish_file
from duomesh.core.verify.compare import Comparison, Row
from duomesh.core.verify.run import VerifyReport
from duomesh.sides import PERTURB, verify

__all__ = ["Args", "run"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


@dataclass(frozen=True)
class Args:
    """Compare the same model on two or more sides, op by op and gradient by gradient. Exit code 0 if all agree
    within the bounds, 1 if not."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A preset's name or a checkpoint directory."""
    sides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SIDE SIDE [SIDE ...]")]
    """torch, jax or hf; the first is the reference. Options follow a colon: torch:device=cuda, jax:model=DIR, and
    fields of a plan: torch:tp=2,dp=2,zero=1 starts ranks, jax:tp=2,mode=explicit takes devices, which a CPU
    simulates."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Compute dtype of every side."""
    seq: int = 64
    """Tokens of a sample."""
    batch: int = 2
    """Samples."""
    seed: int = 0
    """Seed of tokens, and of a preset's weights."""
    grads: bool = False
    """Compare every parameter's gradient too."""
    all: bool = False
    """List every compared tensor, not the worst of each layer."""
    json: Path | None = None
    """Write the whole report here."""


def run(args: Args) -> int:
    for name in ("seq", "batch"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    if args.json is not None:
        check_place(args.json)  # before anything is computed
    source = open_model(args.model, seed=args.seed, perturb=PERTURB)
    report = verify(
        source,
        args.sides,
        dtype=_DTYPES[args.dtype],
        grads=args.grads,
        batch_size=args.batch,
        seq=args.seq,
        seed=args.seed,
    )
    if args.json is not None:
        publish_file(args.json, report.to_json().encode())
    console = Console(soft_wrap=True)
    console.print(f"{report.model}  {args.dtype}  batch {report.batch}  sequence {report.seq}")
    console.print("difference: to the reference side; error: to the reference side in fp64, which the bound limits")
    for comparison in report.comparisons:
        _show(console, comparison, show_all=args.all)
    _conclude(console, report)
    return 0 if report.passed else 1


def _place(row: Row) -> tuple[str, str]:
    """What a row is grouped under: its kind, and the layer or program that it belongs to."""
    parts = row.name.split(".")
    return row.kind, ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _worst(rows: tuple[Row, ...]) -> list[tuple[str, Row]]:
    """For each place in order, the row nearest to (or furthest beyond) its bound."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_place(row), []).append(row)
    out = []
    for (_, place), members in groups.items():
        worst = max(members, key=lambda row: row.error / row.bound if row.bound else row.error * float("inf"))
        out.append((place, worst))
    return out


def _show(console: Console, comparison: Comparison, *, show_all: bool) -> None:
    table = Table(
        title=f"{comparison.side} against {comparison.reference}", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    columns: tuple[tuple[str, Literal["left", "right"]], ...] = (
        ("", "left"),
        ("where", "left"),
        ("worst tensor", "left"),
        ("difference", "right"),
        ("error", "right"),
        ("bound", "right"),
        ("", "left"),
    )
    for title, justify in columns:
        table.add_column(title, justify=justify, no_wrap=True)
    entries = [(_place(r)[1], r) for r in comparison.rows] if show_all else _worst(comparison.rows)
    for place, row in entries:
        mark = "[green]ok[/]" if row.passed else "[bold red]differs[/]"
        local = row.name.removeprefix(place).lstrip(".") or row.name
        table.add_row(row.kind, place, local, f"{row.difference:.2e}", f"{row.error:.2e}", f"{row.bound:.2e}", mark)
    console.print()
    console.print(table)


def _conclude(console: Console, report: VerifyReport) -> None:
    console.print()
    for comparison in report.comparisons:
        row = comparison.first_difference
        names = f"{comparison.side} against {comparison.reference}"
        if row is None:
            console.print(f"[green]passed[/]  {names}: {len(comparison.rows)} tensors agree within their bounds")
            continue
        index = "[" + ", ".join(map(str, row.index)) + "]" if row.index else ""
        console.print(
            f"[bold red]failed[/]  {names}: the first difference is {row.kind} {row.name}{index}", highlight=False
        )
        console.print(
            f"        difference {row.difference:.3e}, error {row.error:.3e}, bound {row.bound:.3e}; "
            f"{comparison.reference} has {row.reference:.9g}, {comparison.side} has {row.got:.9g}"
        )
