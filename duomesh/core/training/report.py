"""The report of a run: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duomesh.core.ir.program import ModelProgram
from duomesh.core.publish import publish_file
from duomesh.core.spec.model import BlockSpec, MoeSpec
from duomesh.core.training.charts import Chart, Point, Series, moving_mean, number
from duomesh.core.training.console import duration
from duomesh.core.training.resolve import Resolved, values_of

__all__ = ["installed_versions", "write_report"]

_PACKAGES = ("duomesh", "torch", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "tokenizers")
_SMOOTHED_FROM = 80  # steps from which the loss is also drawn smoothed
_KINDS = {"attention": "attention", "mlp": "feed-forward", "embed": "embedding", "head": "head"}

Rows = Sequence[Mapping[str, Any]]
Region = tuple[float, str]


def installed_versions() -> dict[str, str]:
    """Versions of what a result depends on, found without importing any of it."""
    out = {"python": platform.python_version(), "platform": platform.platform(), "cpu cores": str(os.cpu_count())}
    for name in _PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def write_report(path: Path, rows: Rows, resolved: Resolved, program: ModelProgram, failure: str = "") -> None:
    """Writes the report of the rows that `metrics.read_rows` gave. failure: why the run ended. Raises OutputError."""
    import jinja2

    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    steps = [row for row in rows if row.get("kind") == "step"]
    # a loss over no targets is none
    validations = [row for row in rows if row.get("kind") == "validation" and row.get("targets") != 0]
    runs = [row for row in rows if row.get("kind") == "run"]
    html = environment.from_string(template).render(
        title=Path(resolved.config.train.output).resolve().name,
        subtitle=_subtitle(program, _regions(rows), runs),
        written=time.strftime("%Y-%m-%d %H:%M"),
        failure=failure,
        tiles=_tiles(steps, validations, resolved),
        loss=_loss_chart(steps, validations, _regions(rows)),
        window=_window(steps),
        num_skipped=sum(row["is_skipped"] for row in steps),
        small=_small_charts(steps, _regions(rows)),
        settings=_settings(resolved),
        model=_model(program),
        parts=_parts(program),
        runs=[_run(row) for row in runs],
        versions=runs[-1]["versions"] if runs else installed_versions(),
    )
    publish_file(path, html.encode())


def _subtitle(program: ModelProgram, regions: Sequence[Region], runs: Rows) -> str:
    places = " → ".join(name for _, name in regions) or (_place(runs[-1]) if runs else "")
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in runs))
    size = f"{number(program.num_params)} parameters, {program.spec.num_layers} layers"
    return " · ".join(part for part in (size, places, dtypes) if part)


def _tiles(steps: Rows, validations: Rows, resolved: Resolved) -> list[tuple[str, str, str]]:
    """(label, value, remark)."""
    total = resolved.config.train.steps
    done = steps[-1]["step"] if steps else 0
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    scored = [row for row in validations if row["loss"] is not None]
    tiles = [("steps", f"{done:,}", f"of {total:,}")]
    if losses:
        tiles.append(("training loss", f"{losses[-1]:.4f}", f"from {losses[0]:.4f}"))
    if scored:
        best = min(scored, key=lambda row: float(row["loss"]))
        remark = f"best {best['loss']:.4f} at {best['step']:,}"
        tiles.append(("validation loss", f"{scored[-1]['loss']:.4f}", remark))
    if steps:
        speed = statistics.median(row["tokens_per_s"] for row in steps)
        tiles.append(("tokens/s", number(speed), "median of steps"))
        tiles.append(("tokens", number(sum(row["tokens"] for row in steps)), f"{steps[-1]['tokens']:,} a step"))
        tiles.append(("time in steps", duration(sum(row["step_s"] for row in steps)), "training alone"))
    skipped = sum(row["is_skipped"] for row in steps)
    if skipped:
        tiles.append(("skipped steps", str(skipped), "marked in red"))
    return tiles


def _column(steps: Rows, name: str) -> list[Point]:
    return [(row["step"], row[name]) for row in steps]


def _window(steps: Rows) -> int:
    """Steps that the smoothed loss is a mean of; 1 for none."""
    return max(5, len(steps) // 40) if len(steps) >= _SMOOTHED_FROM else 1


def _place(run: Mapping[str, Any]) -> str:
    """Where a part of the run was made: "torch", "jax dp=2,tp=4". Records of older versions have no plans."""
    return f"{run['backend']} {run.get('plan', '')}".rstrip()


def _regions(rows: Rows) -> list[Region]:
    """(first step, place) of each stretch of steps that were made in one place, in the order of the record."""
    out: list[Region] = []
    run: Mapping[str, Any] = {}
    for row in rows:
        if row.get("kind") == "run":
            run = row
        elif row.get("kind") == "step":
            place = _place(run if run.get("backend") == row["backend"] else row)
            if not out or out[-1][1] != place:
                out.append((row["step"], place))
    return out


def _loss_chart(steps: Rows, validations: Rows, regions: Sequence[Region]) -> str:
    # a skipped step's loss is that of no update
    raw: list[Point] = [(row["step"], None if row["is_skipped"] else row["loss"]) for row in steps]
    lines = _with_mean(raw, _window(steps), "training")
    if validations:
        lines.append(Series("validation", _column(validations, "loss"), "validation", has_dots=True))
    return Chart(
        lines,
        width=1040,
        height=360,
        title="loss by step",
        regions=regions,
        ticks=[row["step"] for row in steps if row["is_skipped"]],
        right=128,
    ).svg()


def _with_mean(points: list[Point], window: int, label: str = "") -> list[Series]:
    """The line, or if it is to be smoothed a faint one under its moving mean."""
    if window == 1:
        return [Series("train", points, label)]
    return [Series("train faint", points), Series("train", moving_mean(points, window), label)]


def _small_charts(steps: Rows, regions: Sequence[Region]) -> list[tuple[str, str, str]]:
    """(title, remark, chart)."""
    wanted = (
        ("tokens_per_s", "Tokens per second", "of the step alone"),
        ("lr", "Learning rate", ""),
        ("grad_norm", "Gradient norm", "before clipping"),
    )
    return [
        (
            title,
            remark,
            Chart(
                _with_mean(_column(steps, name), 1 if name == "lr" else _window(steps)),
                width=336,
                height=200,
                title=title,
                regions=[(x, "") for x, _ in regions],
                has_zero=True,
            ).svg(),
        )
        for name, title, remark in wanted
    ]


def _settings(resolved: Resolved) -> dict[str, list[tuple[str, str, str]]]:
    """Section -> (name, value, source)."""
    out: dict[str, list[tuple[str, str, str]]] = {}
    for dotted, value in values_of(resolved.config).items():
        section, _, name = dotted.partition(".")
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        out.setdefault(section, []).append((name, "none" if value in (None, ()) else shown, resolved.sources[dotted]))
    return out


def _feed_forward(block: BlockSpec) -> list[tuple[str, str]]:
    facts = []
    for name, part in (("feed-forward", block.mlp), ("experts", block.moe)):
        if part is not None:
            width = f"{part.ffn_size:,}, {'gated ' if part.is_gated else ''}{part.activation}"
            count = f"{part.top_k} of {part.num_experts}, each " if isinstance(part, MoeSpec) else ""
            facts.append((name, count + width))
    return facts


def _model(program: ModelProgram) -> list[tuple[str, str]]:
    """Facts of the first block, and of the whole."""
    spec = program.spec
    attention = spec.blocks[0].attention
    kinds = len(program.blocks)
    facts = [
        ("layers", f"{spec.num_layers}, {'all alike' if kinds == 1 else f'of {kinds} kinds'}"),
        ("hidden size", f"{spec.hidden_size:,}"),
        ("heads", f"{attention.num_heads} query, {attention.num_kv_heads} key-value, {attention.head_dim} wide"),
        *_feed_forward(spec.blocks[0]),
        ("vocabulary", f"{spec.vocab_size:,}{', tied' if spec.tie_embeddings else ''}"),
        ("norm", f"{spec.final_norm.kind}, eps {number(spec.final_norm.eps)}"),
    ]
    if attention.rope is not None:
        scaling = attention.rope.scaling.kind if attention.rope.scaling else "none"
        facts.append(("rotary base", f"{attention.rope.base:,.0f}, scaling {scaling}"))
    if attention.window is not None:
        facts.append(("window", f"{attention.window:,} tokens"))
    return [*facts, ("parameters", f"{program.num_params:,}")]


def _parts(program: ModelProgram) -> list[tuple[str, str, float]]:
    """(part, parameters, share in per cent) of each kind of parameter."""
    sizes: dict[str, int] = {}
    for name, param in program.params.items():
        words = name.split(".")
        is_norm = any("norm" in word for word in words)
        kind = "norms" if is_norm else next((label for key, label in _KINDS.items() if key in words), "other")
        sizes[kind] = sizes.get(kind, 0) + param.size
    total = sum(sizes.values())
    return [(kind, number(size), 100 * size / total) for kind, size in sorted(sizes.items(), key=lambda s: -s[1])]


def _run(row: Mapping[str, Any]) -> tuple[str, str, str]:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
    where = f"after step {row['step']:,}" if row["step"] else "from the start"
    library = row["versions"].get(row["backend"])
    what = (f"{row['backend']} {library or ''}".strip(), row["dtype"], row.get("plan", "").replace(",", " "))
    return started, where, ", ".join(filter(None, what))
