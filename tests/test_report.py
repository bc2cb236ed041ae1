"""The report: one file that needs nothing else, and shows what the record holds."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_session import tiny_spec

from duomesh.core.errors import OutputError
from duomesh.core.ir.build import build_program
from duomesh.core.training.charts import Chart, Series, moving_mean, number
from duomesh.core.training.console import duration
from duomesh.core.training.report import write_report
from duomesh.core.training.resolve import Resolved, resolve

PROGRAM = build_program(tiny_spec(num_layers=2))


def step(number: int, loss: float | None, backend: str = "torch", *, is_skipped: bool = False) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "time": 0.0,
        "loss": loss,
        "lr": 0.1 / number,
        "grad_norm": None if is_skipped else 1.0,
        "tokens": 128,
        "tokens_per_s": 1000.0,
        "step_s": 0.128,
        "backend": backend,
        "is_skipped": is_skipped,
    }


def validation(number: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "validation", "step": number, "time": 0.0, "loss": loss, "samples": 3, "tokens": 48}


def run_row(number: int, backend: str) -> dict[str, Any]:
    versions = {"python": "3.11", "torch": "9.8.7", "<b>odd": "<script>"}
    return {"kind": "run", "step": number, "time": 0.0, "backend": backend, "dtype": "float32", "versions": versions}


def settings(**given: str) -> Resolved:
    overrides = [("data.paths", "a,b"), ("model.preset", "tiny"), ("train.steps", "200")]
    return resolve(None, [*overrides, *((name.replace("__", "."), value) for name, value in given.items())])


def render(tmp_path: Path, rows: list[dict[str, Any]], resolved: Resolved | None = None) -> str:
    write_report(tmp_path / "report.html", rows, resolved or settings(), PROGRAM)
    return (tmp_path / "report.html").read_text()


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects them."""

    void = ("meta", "br", "line", "path", "circle", "i")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag, tag

    def classes(self, name: str) -> int:
        return sum(name in (attrs.get("class") or "").split() for _, attrs in self.tags)


ROWS = [
    run_row(0, "torch"),
    *(step(i, 6 - i / 50) for i in range(1, 101)),
    validation(50, 5.5),
    run_row(100, "jax"),
    *(step(i, 6 - i / 50, "jax") for i in range(101, 150)),
    step(150, None, "jax", is_skipped=True),
    validation(150, 3.25),
]


def test_the_report_is_self_contained(tmp_path: Path) -> None:
    html = render(tmp_path, ROWS)
    page = Page(html)
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in page.tags)
    assert not re.search(r"https?:|url\(|@import|src=|href=", html)
    assert html.count("<svg") == 4
    assert "prefers-color-scheme: dark" in html


def test_what_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    html = render(tmp_path, ROWS, settings(train__output="<img>", data__tokenizer="<i>&"))
    assert "&lt;img&gt;" in html and "<img>" not in html
    assert "&lt;script&gt;" in html and "&lt;b&gt;odd" in html and "&lt;i&gt;&amp;" in html


def test_c164_every_value_is_shown_with_its_source(tmp_path: Path) -> None:
    html = render(tmp_path, ROWS)
    rows = re.findall(r'<tr class="(\w+)"><td>(\w+)</td><td class="value">(.*?)</td>.*?pill">([\w ]+)<', html)
    assert len(rows) == len(settings().sources)
    assert ("given", "paths", "a, b", "command line") in rows
    assert ("default", "betas", "0.9, 0.95", "default") in rows
    assert ("default", "stop_step", "none", "default") in rows


def test_numbers_and_backends_are_shown(tmp_path: Path) -> None:
    html = render(tmp_path, ROWS)
    page = Page(html)
    text = re.sub(r"<[^>]+>", " ", html)
    assert "torch → jax" in text and "torch 9.8.7, float32" in text and "after step 100" in text
    assert re.search(r"steps\s+150\s+of 200", text)
    assert re.search(r"training loss\s+3\.0200\s+from 5\.9800", text)
    assert re.search(r"validation loss\s+3\.2500\s+best 3\.2500 at 150", text)
    assert re.search(r"tokens\s+19\.2k\s+128 a step", text)
    assert re.search(r"skipped steps\s+1", text)
    assert page.classes("skip") == 1 and page.classes("switch") == 4  # one in each chart
    assert sum(tag == "circle" for tag, _ in page.tags) == 2  # the validation points


def names_of(svg: str) -> list[tuple[float, float, str]]:
    """(x, y, name) of the regions of a chart."""
    found = re.findall(r'class="region" x="([\d.]+)" y="([\d.]+)">([^<]*)<', svg)
    return [(float(x), float(y), name) for x, y, name in found]


def test_every_place_of_a_run_is_marked(tmp_path: Path) -> None:
    """A change of the plan alone, too; a run that is taken up where it was is no change."""
    places = [("torch", "tp=2,dp=2,zero=1"), ("jax", "tp=4,dp=2"), ("jax", "tp=4,dp=2"), ("jax", "dp=8"), ("torch", "")]
    rows: list[dict[str, Any]] = [run_row(0, "jax")]  # one that was ended before its first step
    for i, (backend, plan) in enumerate(places):
        rows.append({**run_row(10 * i, backend), "plan": plan})
        rows += [step(n, 6 - n / 50, backend) for n in range(10 * i + 1, 10 * i + 11)]
    html = render(tmp_path, rows)
    text = re.sub(r"<[^>]+>", " ", html)
    assert "torch tp=2,dp=2,zero=1 → jax tp=4,dp=2 → jax dp=8 → torch" in text
    assert Page(html).classes("switch") == 4 * 3
    loss = html.split("<svg", 2)[1]
    assert [name for _, _, name in names_of(loss)] == ["torch tp=2,dp=2,zero=1", "jax tp=4,dp=2", "jax dp=8", "torch"]
    assert "torch 9.8.7, float32, tp=2 dp=2 zero=1" in text


def test_names_of_short_stretches_do_not_overlap() -> None:
    names = ["torch tp=2,dp=2,zero=1", "jax tp=4,dp=2", "torch", "jax tp=2,dp=2,zero=3,sequence_parallel"]
    regions = list(zip([1.0, 3.0, 5.0, 99.0], names, strict=True))
    svg = Chart([Series("train", [(float(i), float(i)) for i in range(1, 101)])], 1040, 360, "x", regions).svg()
    found = names_of(svg)
    assert [name for _, _, name in found] == names
    for (x, y, name), (other_x, other_y, _) in itertools.combinations(found, 2):
        assert y != other_y or x + 7 * len(name) < other_x
    assert all(x + 7 * len(name) < 1040 for x, _, name in found)
    grid = [float(y) for y in re.findall(r'class="grid".*?y1="([\d.]+)"', svg)]
    assert max(y for _, y, _ in found) < min(grid)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [run_row(0, "torch")],
        [run_row(0, "torch"), step(1, None, is_skipped=True)],
        [run_row(0, "torch"), step(1, 5.0)],
        [run_row(0, "torch"), step(1, 5.0), step(2, 5.0), validation(2, None)],
    ],
    ids=["nothing", "no step", "only skipped", "one step", "flat"],
)
def test_a_run_that_hardly_began_has_a_report(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    html = render(tmp_path, rows)
    Page(html)
    assert "nan" not in html.replace("tenant", "").lower().split("<main>")[1]


def test_an_unwritable_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/report\.html"):
        write_report(tmp_path / "file" / "report.html", ROWS, settings(), PROGRAM)


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    """The lines of a chart, each a list of points; a break starts a new one."""
    (path,) = re.findall(r'<path [^>]*d="([^"]*)"', svg)
    return [
        [tuple(map(float, p.split())) for p in part.split("L")]  # type: ignore[misc]
        for part in path.split("M")[1:]
    ]


def test_a_line_passes_through_its_values() -> None:
    values = [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0), (20.0, 5.0)]
    ((a, b, c, d),) = points_of(Chart([Series("train", values)], 400, 200, "x").svg())
    # x and y are linear in the values, y upwards
    assert b[0] - a[0] == c[0] - b[0] and d[0] - a[0] == 4 * (b[0] - a[0])
    assert a[1] > c[1] > b[1] > d[1]
    assert (a[1] - b[1]) - 2 * (a[1] - c[1]) == 0 and (a[1] - d[1]) - 2 * (a[1] - b[1]) == 0
    assert d[1] > 0 and a[1] < 200 and a[0] > 0 and d[0] < 400


def test_a_missing_value_breaks_the_line() -> None:
    values = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, 1.0), (5.0, 3.0)]
    assert [len(part) for part in points_of(Chart([Series("train", values)], 400, 200, "x").svg())] == [2, 2]


def test_thinning_keeps_every_spike() -> None:
    values = [(float(i), 1.0) for i in range(100_000)]
    values[54_321] = (54_321.0, 9.0)
    values[54_400] = (54_400.0, 0.0)
    (line,) = points_of(Chart([Series("train", values)], 400, 200, "x").svg())
    assert len(line) <= 1500
    heights = [y for _, y in line]
    assert sorted(heights)[0] < sorted(heights)[1] and sorted(heights)[-1] > sorted(heights)[-2]


def test_end_labels_do_not_overlap() -> None:
    lines = [Series(css, [(0.0, 1.0), (1.0, last)], css) for css, last in (("a", 2.0), ("b", 2.001), ("c", 1.999))]
    svg = Chart(lines, 400, 200, "x").svg()
    heights = sorted(float(y) for y in re.findall(r'class="end \w" x="[\d.]+" y="([\d.]+)"', svg))
    assert len(heights) == 3 and all(b - a >= 16 for a, b in itertools.pairwise(heights))


def test_moving_mean_is_centred_and_skips_gaps() -> None:
    points = [(float(i), float(v) if v is not None else None) for i, v in enumerate([1, 2, 6, None, 4])]
    assert moving_mean(points, 3) == [(0, 1), (1, 3), (2, 4), (3, None), (4, 4)]
    assert moving_mean(points, 1) == points


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e-4, "1e-4"),
        (2.5e-5, "2.5e-5"),
        (0.003, "0.003"),
        (0.25, "0.25"),
        (15, "15"),
        (1500, "1,500"),
        (12_345, "12.3k"),
        (3_400_000, "3.4M"),
        (8.03e9, "8.03B"),
        (-2e4, "-20k"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ticks_are_round_numbers_that_enclose_the_values() -> None:
    for low, high in [(0.37, 6.1), (1e-5, 3e-4), (-3, 8), (5, 5), (0, 0), (123, 123.4)]:
        svg = Chart([Series("train", [(0.0, low), (1.0, high)])], 400, 200, "x").svg()
        heights = [float(y) for y in re.findall(r'class="grid" [^>]*y1="([\d.]+)"', svg)]
        assert 2 <= len(heights) <= 8
        steps = [a - b for a, b in itertools.pairwise(heights)]
        assert all(math.isclose(s, steps[0], abs_tol=0.2) for s in steps)  # coordinates have one digit
        (line,) = points_of(svg)
        assert all(min(heights) <= y <= max(heights) for _, y in line)
