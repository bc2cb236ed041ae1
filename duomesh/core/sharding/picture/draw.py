"""From a sharded program to boxes and wires, and from these, once they have places, to a scene."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import ceil
from typing import Protocol

from duomesh.core.sharding.collectives import Collective, inner_axes
from duomesh.core.sharding.layouts import Step
from duomesh.core.sharding.mesh import Mesh
from duomesh.core.sharding.picture import parts
from duomesh.core.sharding.picture.graph import Arrangement, Wire
from duomesh.core.sharding.picture.labels import INK, PAPER, SIZE, Row
from duomesh.core.sharding.picture.order import Rows, arrange_rows
from duomesh.core.sharding.picture.parts import STREAM_WIDTH, WIRE, Act, Unit
from duomesh.core.sharding.picture.place import place
from duomesh.core.sharding.picture.scene import Line, Part, Scene, Text, text_width
from duomesh.core.sharding.program import Reshard, ShardedCall, ShardedProgram
from duomesh.core.sharding.transitions import Action

__all__ = ["draw_program", "scene_of_program"]

_MARGIN, _TITLE, _LEAST_WIDTH = 24.0, 17.0, 780.0
_BETWEEN_BOXES = 24.0
_RULE = "#d5dbe1"
_STREAM = "x"
_SHORT = {Action.KEEP_FIRST: "keep first", Action.PAD: "pad"}


def draw_program(
    sharded: ShardedProgram, mesh: Mesh, *, title: str = "", collectives: Iterable[Collective] = ()
) -> str:
    """An SVG document of a program: ops from top to bottom, with movements and layouts between them.

    Parameters, and what comes from outside without a gradient (rotary tables, labels, masks), are named in the boxes of
    the ops that take them, unless they are moved first.

    Args:
        mesh: that the program was written for. Axes of size 1 are left out.
        title: the heading; the program's name if empty.
        collectives: as `step_collectives` lists them; with them each movement says how many elements it moves.
    """
    return scene_of_program(sharded, mesh, title=title, collectives=collectives).svg()


def scene_of_program(
    sharded: ShardedProgram, mesh: Mesh, *, title: str = "", collectives: Iterable[Collective] = ()
) -> Scene:
    """The same as data."""
    return _Drawing(sharded, mesh, collectives).scene(title or sharded.program.name)


class _Card(Protocol):
    """A unit that is drawn once its surroundings are known; `parts` says what they are."""

    def __call__(self, *, is_alone: bool, pitch: float) -> Unit: ...


def _below_source(row: Row, card: _Card, *, is_alone: bool, pitch: float) -> Unit:
    return parts.moved_source(row, card(is_alone=is_alone, pitch=pitch))


class _Drawing:
    """Makes cards and wires, has them placed, and paints them."""

    def __init__(self, sharded: ShardedProgram, mesh: Mesh, collectives: Iterable[Collective]) -> None:
        self._sharded, self._mesh = sharded, mesh
        self._amounts: dict[tuple[str, str, tuple[str, ...], str], dict[int, None]] = {}
        for made in collectives:
            self._amounts.setdefault((made.op, made.kind, made.axes, made.phase), {})[made.elements] = None
        self._cards: list[_Card] = []
        self._late: set[int] = set()
        self._made: dict[str, tuple[int, int]] = {}  # by name: the card, and which of its values
        self._used: dict[str, list[int]] = {}  # by name: the cards that take it
        self._add_cards()

    # Cards

    def _add_cards(self) -> None:
        taken = {name for made in self._sharded.calls() for name in made.operands}
        taken |= {made.source for made in self._sharded.reshards()} | {name for _, name in self._sharded.outputs}
        for value in self._sharded.program.inputs:
            if value.name not in taken:
                self._cards.append(partial(parts.source, self._row(value.name)))
        for made in self._sharded.instructions:
            if isinstance(made, Reshard):
                self._add_movement(made)
            else:
                self._add_call(made)
        for outside, name in reversed(self._sharded.outputs):  # the main one comes first and ends the main column
            self._add(partial(parts.sink, outside), [name], [])

    def _add(self, card: _Card, operands: Sequence[str], results: Iterable[str]) -> None:
        for name in operands:
            if name not in self._made:
                self._made[name] = (len(self._cards), 0)
                self._cards.append(partial(parts.source, self._row(name)))
        for name in dict.fromkeys(operands):
            self._used.setdefault(name, []).append(len(self._cards))
        for i, name in enumerate(results):
            self._made[name] = (len(self._cards), i)
        self._cards.append(card)

    def _row(self, name: str) -> Row:
        layout = self._sharded.layouts[name].items()
        is_weight = self._sharded.origin[name] in self._sharded.program.param_by_name
        return Row(name, tuple((axis, state) for axis, state in layout if self._is_split(axis)), is_weight)

    def _is_split(self, axis: str) -> bool:
        return self._mesh.size(axis) > 1

    def _add_call(self, made: ShardedCall) -> None:
        op = made.call.op
        present = [name for name in made.operands if name is not None]
        inside = [name for name in dict.fromkeys(present[1:]) if self._is_aside(name)]
        rows, values = ([self._row(name) for name in names] for names in (inside, op.outputs))
        card = partial(parts.op, op.kind, op.name, rows, self._own(made), values)
        self._add(card, [name for name in present if name not in inside], op.outputs)

    def _is_aside(self, name: str) -> bool:
        """Whether a name is written into the boxes that take it."""
        program = self._sharded.program
        outside = {value.name for value in program.inputs} | {constant.name for constant in program.constants}
        return name in program.param_by_name or (name in outside and name not in program.differentiated)

    def _add_movement(self, made: Reshard) -> None:
        origin = self._sharded.origin[made.source]
        where = f"{self._sharded.program.name}.{origin}"
        acts = [self._act(step, where, "forward") for step in made.ahead] or [Act(True, "nothing")]
        if made.regathers:
            acts += [self._act(step, where, "recompute") for step in made.ahead if step.action.is_collective]
        nothing = "nothing" if self._has_gradient(origin) else "no gradient"
        acts += [self._act(step, where, "backward") for step in made.back] or [Act(False, nothing)]
        is_local = not any(step.action.is_collective for step in (*made.ahead, *made.back))
        name = f"{made.source} -> {made.result}"
        card: _Card = partial(parts.movement, name, acts, self._row(made.result), is_local=is_local)
        is_only = sum(other.source == made.source for other in self._sharded.reshards()) == 1
        if is_only and self._is_aside(made.source):
            card = partial(_below_source, self._row(made.source), card)
        self._late.add(len(self._cards))
        self._add(card, [] if is_only and self._is_aside(made.source) else [made.source], [made.result])

    def _has_gradient(self, origin: str) -> bool:
        return origin in self._sharded.program.param_by_name or origin in self._sharded.program.differentiated

    def _act(self, step: Step, where: str, phase: str) -> Act:
        word = _SHORT.get(step.action, step.action.value)
        content = word if step.action is Action.NOTHING else f"{word} {' '.join(step.axes)}"
        content += " again" if phase == "recompute" else ""
        return Act(phase == "forward", content, self._amount(where, step.action, step.axes, phase))

    def _amount(self, where: str, action: Action, axes: tuple[str, ...], phase: str) -> str:
        return " or ".join(f"{count:,}" for count in self._amounts.get((where, action.value, axes, phase), ()))

    def _own(self, made: ShardedCall) -> list[Act]:
        """What the op does where an axis that it reduces over is split."""
        axes = tuple(axis for axis in inner_axes(self._sharded, made) if self._is_split(axis))
        where, action = f"{self._sharded.program.name}.{made.call.op.name}", Action.ALL_REDUCE
        acts = [
            Act(when == "forward", what, self._amount(f"{where} {what}", action, axes, when)) for when, what in made.own
        ]
        return [Act(None, f"{action.value} {' '.join(axes)}"), *acts] if axes and acts else []

    # Places

    def scene(self, title: str) -> Scene:
        names, streams = list(self._used), self._streams()
        wires = [Wire(*self._made[name], tuple(self._used[name]), name in streams) for name in names]
        orders = arrange_rows(len(self._cards), wires, self._late)
        units = self._draw_cards(orders[0], wires)
        nodes = [unit.node for unit in units]
        placed = min((place(rows, nodes, wires) for rows in orders), key=lambda placed: placed.width)
        drawn = list(self._lines(placed, names, streams))
        for unit, (x, y) in zip(units, placed.places, strict=True):
            drawn += unit.group.at(x, y)
        return self._framed(title, drawn, placed)

    def _streams(self) -> set[str]:
        """Names of the residual stream: it comes in as x, and adds hand it on."""
        found = {value.name for value in self._sharded.program.inputs if value.name == _STREAM}
        for made in self._sharded.calls():
            if made.call.op.kind == "add" and found.intersection(made.call.op.inputs):
                found.update(made.call.op.outputs)
        return found

    def _draw_cards(self, rows: Rows, wires: Sequence[Wire]) -> list[Unit]:
        """Cards as wide as their rows allow, from the last to the first: labels leave room for the boxes below them."""
        row_of = {item: number for number, row in enumerate(rows.items) for item in row}
        takes = Counter(target for wire in wires for target in wire.targets)
        units: dict[int, Unit] = {}
        column: dict[int, float] = {}  # the widest of a unit and of those that only continue it
        for number in reversed(range(len(self._cards))):
            mine = [wire for wire in wires if wire.source == number]
            following = [[t for t in wire.targets if row_of[t] == row_of[number] + 1] for wire in mine]
            widest = max((column[t[0]] for t in following if len(t) == 1 and takes[t[0]] == 1), default=0.0)
            beside = [item for item in rows.items[row_of[number]] if item not in rows.lanes]
            pitch = widest + _BETWEEN_BOXES if widest else 0.0
            units[number] = self._cards[number](is_alone=len(beside) == 1, pitch=pitch)
            column[number] = max(units[number].node.width, widest if len(mine) == 1 else 0.0)
        return [units[number] for number in range(len(self._cards))]

    # Painting

    def _lines(self, placed: Arrangement, names: Sequence[str], streams: set[str]) -> Iterator[Part]:
        """Lines of values; the residual stream is on top, and thick where it is handed on."""
        hands_on = {self._made[name][0] for name in streams} | {len(self._cards) - 1}
        lines = []
        for path in placed.paths:
            name = names[path.wire]
            width = STREAM_WIDTH if name in streams and path.target in hands_on else 1.5
            is_dashed = not self._has_gradient(self._sharded.origin[name])
            lines.append(Line(path.points, WIRE, width, has_arrow=True, is_dashed=is_dashed, of=name))
        yield from sorted(lines, key=lambda line: line.width)
        for wire in dict.fromkeys(lane.wire for lane in placed.lanes):
            longest = max((lane for lane in placed.lanes if lane.wire == wire), key=lambda lane: lane.bottom - lane.top)
            yield from parts.lane_name(names[wire], longest.x, longest.top, longest.bottom)

    def _framed(self, title: str, drawn: Iterable[Part], placed: Arrangement) -> Scene:
        """With margins, heading and legend."""
        inner = max(placed.width, _LEAST_WIDTH, text_width(title, _TITLE))
        sizes = " ".join(f"{axis.name}={axis.size}" for axis in self._mesh.axes) or "of one rank"
        key = parts.legend(inner, has_amounts=bool(self._amounts))
        top = _MARGIN + 54
        start = top + key.height + 32
        painted: list[Part] = [
            Text(_MARGIN, _MARGIN + 14, title, _TITLE, INK, is_bold=True),
            Text(_MARGIN, _MARGIN + 36, f"mesh {sizes}", SIZE, INK),
            *key.at(_MARGIN, top),
            Line(((_MARGIN, start - 16), (_MARGIN + inner, start - 16)), _RULE, 1),
        ]
        left = _MARGIN + (inner - placed.width) // 2
        painted += [part.moved(left, start) for part in drawn]
        return Scene(title, ceil(inner + 2 * _MARGIN), ceil(start + placed.height + _MARGIN), PAPER, tuple(painted))
