"""Collectives read from compiled modules and traces: small programs whose collectives are known, and module texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

from duomesh.backends.jax.compiled import compiled_collectives
from duomesh.backends.jax.traced import traced_collectives, traced_steps
from duomesh.core.errors import BackendError
from duomesh.core.sharding.compare import Issued, TableRow, at_most, compiled_table
from duomesh.core.sharding.mesh import Mesh

MESH = Mesh.of(dp=2, tp=4)
DP, TP, BOTH, SWAPPED = ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")
gather = partial(Issued, "all-gather", dtype="float32")
reduce = partial(Issued, "all-reduce", dtype="float32")
scatter = partial(Issued, "reduce-scatter", dtype="float32")
exchange = partial(Issued, "all-to-all", dtype="float32")


def traced(body: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """A manual program over the mesh; every device has arrays of these shapes."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(body, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    return jax.jit(f).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def compiled(trace: Any) -> str:
    return str(trace.lower().compile().as_text())


def tiled(collective: Callable[..., Any], axes: Any, dim: int = 0) -> Callable[[Any], Any]:
    return lambda x: collective(x, axes, **{_DIM[collective]: dim}, tiled=True)


_DIM = {lax.all_gather: "axis", lax.psum_scatter: "scatter_dimension"}

# on each device an array of [16, 32]: body, what it issues
PROGRAMS = {
    "psum": (lambda x: lax.psum(x, "tp"), [reduce(TP, elements=512)]),
    "psum over both": (lambda x: lax.psum(x, ("dp", "tp")), [reduce(BOTH, elements=512)]),
    "psum over both, swapped": (lambda x: lax.psum(x, ("tp", "dp")), [reduce(SWAPPED, elements=512)]),
    "pmax": (lambda x: lax.pmax(x, "dp"), [reduce(DP, elements=512)]),
    "gather": (tiled(lax.all_gather, "tp"), [gather(TP, elements=2048)]),
    "gather, untiled": (lambda x: lax.all_gather(x, "dp"), [gather(DP, elements=1024)]),
    "gather over both": (tiled(lax.all_gather, ("dp", "tp"), 1), [gather(BOTH, elements=4096)]),
    "gather over both, swapped": (tiled(lax.all_gather, ("tp", "dp")), [gather(SWAPPED, elements=4096)]),
    "scatter": (tiled(lax.psum_scatter, "dp", 1), [scatter(DP, elements=512)]),
    "scatter over both": (tiled(lax.psum_scatter, ("dp", "tp")), [scatter(BOTH, elements=512)]),
    "scatter over both, swapped": (tiled(lax.psum_scatter, ("tp", "dp"), 1), [scatter(SWAPPED, elements=512)]),
    "exchange": (lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True), [exchange(TP, elements=512)]),
    "exchange, swapped": (
        lambda x: lax.all_to_all(x, ("tp", "dp"), 1, 0, tiled=True),
        [exchange(SWAPPED, elements=512)],
    ),
    "permute": (
        lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
        [Issued("collective-permute", TP, "float32", 512)],
    ),
    "one after another": (
        lambda x: tiled(lax.psum_scatter, "dp")(tiled(lax.all_gather, "tp")(x)),
        [gather(TP, elements=2048), scatter(DP, elements=2048)],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_collective(name: str) -> None:
    """The trace and the compiled module agree where XLA has nothing to combine."""
    body, expected = PROGRAMS[name]
    trace = traced(body, (16, 32))
    assert traced_collectives(trace.jaxpr, MESH) == expected
    assert compiled_collectives(compiled(trace), MESH) == expected


def nested(x: Any) -> Any:
    def inner(c: Any, _: Any) -> Any:
        return lax.psum(jnp.sin(c), "tp"), None

    def outer(c: Any, _: Any) -> Any:
        c, _ = lax.scan(inner, c, None, length=3)
        return lax.all_gather(c, "dp", tiled=True)[:8] * 2, None

    return lax.psum(jnp.cos(lax.scan(outer, x, None, length=5)[0]), ("tp", "dp"))


NESTED = [reduce(TP, elements=64, count=15), gather(DP, elements=128, count=5), reduce(SWAPPED, elements=64)]


def test_nested_scans_multiply() -> None:
    trace = traced(nested, (8, 8))
    assert traced_collectives(trace.jaxpr, MESH) == NESTED
    assert compiled_collectives(compiled(trace), MESH) == NESTED
    steps = list(traced_steps(trace.jaxpr, MESH))
    layer = [reduce(TP, elements=64)] * 3 + [gather(DP, elements=128)]
    assert steps == layer * 5 + [reduce(SWAPPED, elements=64)]


def test_trip_counts_are_found_without_the_compilers_word() -> None:
    text = compiled(traced(nested, (8, 8)))
    bare = re.sub(r'"known_trip_count":\{[^}]*\}', '"none":{}', text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert compiled_collectives(bare, MESH) == NESTED


def test_dtypes_of_the_wire() -> None:
    """As written in the trace; XLA's CPU pipeline widens bf16."""
    trace = traced(lambda x: lax.psum_scatter(x, "tp", tiled=True), (8, 8), dtype=jnp.bfloat16)
    (said,) = traced_collectives(trace.jaxpr, MESH)
    assert said == Issued("reduce-scatter", TP, "bfloat16", 64) and said.bytes == 128
    (made,) = compiled_collectives(compiled(trace), MESH)
    assert made == Issued("reduce-scatter", TP, "float32", 64) and made.bytes == 256


def test_what_the_cpu_pipeline_changes() -> None:
    """Combined all-reduces are listed one by one; equal, unused and loop-invariant ones are made less often."""

    def body(x: Any) -> Any:
        unused = lax.psum(x + 3, "tp")
        equal = lax.psum(x, "tp") * lax.psum(x, "tp")
        others = lax.psum(jnp.sin(x), "tp") + jnp.exp(lax.psum(jnp.cos(x), "tp"))
        again, _ = lax.scan(lambda c, _: (c * lax.all_gather(x, "tp", tiled=True)[:8], unused), x, None, length=5)
        return equal + others + again

    trace = traced(body, (8, 8))
    assert Counter(traced_collectives(trace.jaxpr, MESH)) == {
        reduce(TP, elements=64): 4,
        gather(TP, elements=256, count=5): 1,
    }
    text = compiled(trace)
    assert len(re.findall(r" all-reduce\(", text)) == 1
    assert Counter(compiled_collectives(text, MESH)) == {reduce(TP, elements=64): 3, gather(TP, elements=256): 1}


def test_backward_with_recomputation_in_order() -> None:
    """A movement with a custom backward, in a rematerialised scan: forward, recomputation, then the duals."""

    @jax.custom_vjp
    def gathered(x: Any) -> Any:
        return lax.all_gather(x, "tp", tiled=True)

    gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (lax.psum_scatter(g, "tp", tiled=True),))

    def body(x: Any, w: Any) -> Any:
        layer = jax.checkpoint(lambda h, w: jnp.tanh(gathered(h) @ w)[:8])
        return jax.grad(lambda x, w: lax.scan(lambda h, w: (layer(h, w), None), x, w)[0].sum(), argnums=(0, 1))(x, w)

    trace = traced(body, (8, 8), (3, 8, 8))
    forward, backward = gather(TP, elements=256), [gather(TP, elements=256), scatter(TP, elements=256)]
    assert list(traced_steps(trace.jaxpr, MESH)) == [forward] * 3 + backward * 3
    assert compiled_collectives(compiled(trace), MESH) == [
        gather(TP, elements=256, count=3),
        gather(TP, elements=256, count=3),
        scatter(TP, elements=256, count=3),
    ]


def test_branches() -> None:
    def body(x: Any) -> Any:
        return lax.cond(
            lax.axis_index("dp") == 0,
            lambda x: lax.psum(jnp.sin(lax.psum(x, "tp")), "tp"),
            lambda x: lax.psum(x, "tp") + lax.all_gather(x, "dp", tiled=True)[:8],
            x,
        )

    trace = traced(body, (8, 8))
    expected = {reduce(TP, elements=64, count=2), gather(DP, elements=128)}
    assert set(traced_collectives(trace.jaxpr, MESH)) == expected
    assert set(compiled_collectives(compiled(trace), MESH)) == expected
    assert len(list(traced_steps(trace.jaxpr, MESH))) == 3


def test_at_most_takes_the_largest_count_of_each() -> None:
    one, other = reduce(TP, elements=1), reduce(DP, elements=1)
    twice = reduce(TP, elements=1, count=2)
    assert at_most([[one, one, other], [other, one]]) == [twice, other]
    assert at_most([[other], [twice]]) == [other, twice]
    assert at_most([[], [one]]) == [one] and at_most([]) == []


def test_a_while_loop_needs_a_count_only_around_collectives() -> None:
    def until(step: Callable[[Any], Any]) -> Any:
        return lambda x: lax.psum(lax.while_loop(lambda c: c.sum() < 9, step, x), "dp")

    quiet = traced(until(lambda c: c + 1), (8, 8))
    assert traced_collectives(quiet.jaxpr, MESH) == [reduce(DP, elements=64)]
    assert compiled_collectives(compiled(quiet), MESH) == [reduce(DP, elements=64)]
    loud = traced(until(lambda c: lax.psum(c, "tp")), (8, 8))
    with pytest.raises(BackendError, match="a while loop of the traced program has collectives"):
        traced_collectives(loud.jaxpr, MESH)
    with pytest.raises(BackendError, match=r"the loop while\S* of the compiled module has collectives"):
        compiled_collectives(compiled(loud), MESH)


def test_traces_that_cannot_be_listed() -> None:
    halves = traced(lambda x: lax.psum(x, "tp", axis_index_groups=[[0, 1], [2, 3]]), (8, 8))
    with pytest.raises(BackendError, match="over parts of the axes"):
        traced_collectives(halves.jaxpr, MESH)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        explicit = jax.jit(lambda x: jax.sharding.reshard(x, jax.P("dp"))).trace(jnp.zeros((8, 8)))
    with pytest.raises(BackendError, match="reshard, whose collectives XLA chooses"):
        traced_collectives(explicit.jaxpr, MESH)


def test_axes_of_size_1_are_in_no_group() -> None:
    """A mesh of 8 x 1: what goes over tp alone moves nothing."""
    mesh = jax.make_mesh((8, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def body(x: Any) -> Any:
        return lax.psum(jnp.sin(lax.psum(x, ("dp", "tp"))), "tp")

    f = jax.shard_map(body, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    trace = jax.jit(f).trace(jnp.zeros((4, 4)))
    expected = [reduce(DP, elements=16)]
    assert traced_collectives(trace.jaxpr, Mesh.of(dp=8, tp=1)) == expected
    assert compiled_collectives(compiled(trace), Mesh.of(dp=8, tp=1)) == expected


# Module texts

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(*lines: str, before: str = "", head: str = "num_partitions=8") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true, {head}\n{ADD}{before}\nENTRY %main (p: f32[8,8]) -> f32[] {{\n{body}\n}}\n"


def of(*lines: str, **settings: str) -> list[Issued]:
    return compiled_collectives(module("%p = f32[8,8]{1,0} parameter(0)", *lines, **settings), MESH)


GLOBAL = "channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", TP),
        ("{{0,4},{1,5},{2,6},{3,7}}", DP),
        ("{{0,1,2,3,4,5,6,7}}", BOTH),
        ("{{0,4,1,5,2,6,3,7}}", SWAPPED),
        ("{}", BOTH),
        ("[2,4]<=[8]", TP),
        ("[4,2]<=[2,4]T(1,0)", DP),
        ("[1,8]<=[8]", BOTH),
        ("[1,8]<=[2,4]T(1,0)", SWAPPED),
        ("mesh['dp'=2,'tp'=4] {'tp'}", TP),
        ("mesh['x'=2,'y'=2,'z'=2] {'x'}", DP),
        ("mesh['dp'=2,'tp'=4] {'tp','dp'}", SWAPPED),
        ("mesh['x'=1,'y'=8] {'y'}", BOTH),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", TP),
        ("mesh['b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", DP),
        ("mesh['b'=4,'c'=2], device_ids=(0,4,1,5,2,6,3,7) {'c'}", DP),
    ],
)
def test_forms_of_groups(groups: str, axes: tuple[str, ...]) -> None:
    size = MESH.size(axes[0]) if len(axes) == 1 else 8
    line = f"%x = f32[{8 * size},8]{{1,0}} all-gather(%p), {GLOBAL}, replica_groups={groups}, dimensions={{0}}"
    assert of(line) == [gather(axes, elements=64 * size)]
    line = (
        f"%x = f32[1,8]{{1,0}} reduce-scatter(%p), replica_groups={groups}, {GLOBAL}, dimensions={{0}}, to_apply=%add"
    )
    assert of(line) == [scatter(axes, elements=8 * size)]


@pytest.mark.parametrize(
    ("head", "line", "axes"),
    [
        # numbers are of replicas, or of partitions, or of groups of replicas with all of their partitions
        ("replica_count=8", "all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", TP),
        ("replica_count=8", "all-reduce(%p), replica_groups={}, to_apply=%add", BOTH),
        ("replica_count=2, num_partitions=4", "all-reduce(%p), replica_groups={{0,1}}, to_apply=%add", DP),
        (
            "replica_count=2, num_partitions=4",
            "all-reduce(%p), channel_id=1, replica_groups={{0},{1}}, to_apply=%add",
            TP,
        ),
        ("num_partitions=8", "all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%add", BOTH),
        ("replica_count=2, num_partitions=4", "all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}", TP),
        ("replica_count=2, num_partitions=4", "all-to-all(%p), replica_groups={{0,1}}, dimensions={0}", DP),
        ("num_partitions=8", "all-to-all(%p), channel_id=1, replica_groups={}, dimensions={0}", BOTH),
    ],
)
def test_what_numbers_in_groups_mean(head: str, line: str, axes: tuple[str, ...]) -> None:
    (made,) = of(f"%x = f32[8,8]{{1,0}} {line}", head=head)
    assert (made.axes, made.elements) == (axes, 64)


def test_groups_of_one_device_move_nothing() -> None:
    assert of("%x = f32[8,8]{1,0} all-reduce(%p), replica_groups={{0}}, to_apply=%add") == []
    pairs = "{{0,0},{1,1}}"
    assert of(f"%x = f32[8,8]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}") == []


def test_async_pairs_and_combined_collectives_of_a_gpu() -> None:
    """In the forms of jax 0.11.2 compiled for H200, and in older ones."""
    tp, dp = "mesh['dp'=2,'tp'=4] {'tp'}", "[4,2]<=[2,4]T(1,0)"
    one, two = "bf16[8,8]{1,0}", "bf16[8,8]{1,0}, f32[2,3]{1,0}"
    config = 'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}'
    made = of(
        f"%ag = (({one}), bf16[32,8]{{1,0}}) all-gather-start(%p), {GLOBAL}, replica_groups={tp}, {config}",
        f"%agd = bf16[32,8]{{1,0}} all-gather-done(%ag), {config}",
        f"%old = ({one}, bf16[16,8]{{1,0}}) all-gather-start(%p), {GLOBAL}, replica_groups={dp}, dimensions={{0}}",
        "%oldd = bf16[16,8]{1,0} all-gather-done(%old)",
        f"%ar = (({two}), ({two})) all-reduce-start(%p, %q), {GLOBAL}, replica_groups={tp}, to_apply=%add",
        f"%ard = ({two}) all-reduce-done(%ar)",
        f"%one = f32[3]{{0:T(128)}} all-reduce-start(%q), {GLOBAL}, replica_groups={tp}, to_apply=%add, {config}",
        f"%two = (f32[4]{{0}}, /*index=1*/f32[5]{{0}}) all-reduce-start(%q), {GLOBAL}, replica_groups={tp}",
        f"%rs = (({two}), (bf16[2,8]{{1,0}}, f32[2]{{0}})) reduce-scatter-start(%p, %q), {GLOBAL}, replica_groups={tp}",
        "%rsd = (bf16[2,8]{1,0}, f32[2]{0}) reduce-scatter-done(%rs)",
        f"%aa = (({one}), {one}) all-to-all-start(%p), channel_id=1, replica_groups={dp}, dimensions={{0}}",
        f"%aad = {one} all-to-all-done(%aa)",
        f"%cp = ({one}, {one}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
        "source_target_pairs={{0,4},{4,0},{1,5},{5,1}}",
        f"%cpd = {one} collective-permute-done(%cp)",
    )
    assert made == [
        Issued("all-gather", TP, "bfloat16", 256),
        Issued("all-gather", DP, "bfloat16", 128),
        Issued("all-reduce", TP, "bfloat16", 64),
        Issued("all-reduce", TP, "float32", 6),
        Issued("all-reduce", TP, "float32", 3),
        Issued("all-reduce", TP, "float32", 4),
        Issued("all-reduce", TP, "float32", 5),
        Issued("reduce-scatter", TP, "bfloat16", 64),
        Issued("reduce-scatter", TP, "float32", 8),
        Issued("all-to-all", DP, "bfloat16", 64),
        Issued("collective-permute", DP, "bfloat16", 64),
    ]


def test_computations_that_are_called() -> None:
    """A generic async pair names its computation at both ends; calls, fusions and old conditionals are looked into."""
    before = f"""
%inside (x: f32[8,8]) -> f32[2,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  ROOT %r = f32[2,8]{{1,0}} reduce-scatter(%x), {GLOBAL}, replica_groups=[2,4]<=[8], dimensions={{0}}, to_apply=%add
}}

%plain (y: f32[8,8]) -> f32[8,8] {{
  ROOT %y = f32[8,8]{{1,0}} parameter(0), metadata={{op_name="f, calls=%inside"}}
}}
"""
    start = "%s = ((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%p), calls=%inside"
    once = scatter(TP, elements=64)
    assert of(start, "%d = f32[2,8]{1,0} async-done(%s), calls=%inside", before=before) == [once]
    assert of("%c = f32[2,8]{1,0} call(%p), to_apply=%inside", before=before) == [once]
    assert of("%f = f32[2,8]{1,0} fusion(%p), kind=kCustom, calls=%inside", before=before) == [once]
    assert of("%f = f32[8,8]{1,0} fusion(%p), kind=kLoop, calls=%plain", before=before) == []
    cond = "%c = f32[8,8]{1,0} conditional(%p, %p, %p), true_computation=%plain, false_computation=%inside"
    assert of(cond, before=before) == [once]


def loop(init: int, step: int, compare: str, limit: str, config: str = "") -> list[Issued]:
    before = f"""
%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %t = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%t), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %r = f32[8,8]{{1,0}} all-reduce(%x), {GLOBAL}, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8,8]{{1,0}}) tuple(%next, %r)
}}

%goes_on (t: (s32[], f32[8,8])) -> pred[] {{
  %t = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] {limit}
  ROOT %c = pred[] compare(%i, %n), direction={compare}
}}
"""
    return of(
        f"%i = s32[] constant({init})",
        "%j = s32[] copy(%i)",
        "%t = (s32[], f32[8,8]{1,0}) tuple(%j, %p)",
        f"%w = (s32[], f32[8,8]{{1,0}}) while(%t), condition=%goes_on, body=%body{config}",
        before=before,
    )


@pytest.mark.parametrize(
    ("init", "step", "compare", "limit", "trips"),
    [
        (0, 1, "LT", 5, 5),
        (2, 1, "LT", 5, 3),
        (0, 2, "LT", 5, 3),
        (1, 1, "LE", 5, 5),
        (7, -1, "GT", 0, 7),
        (0, 3, "NE", 9, 3),
    ],
)
def test_counted_loops(init: int, step: int, compare: str, limit: int, trips: int) -> None:
    assert loop(init, step, compare, f"constant({limit})") == [reduce(TP, elements=64, count=trips)]


def test_a_loops_condition_runs_once_more_than_its_body() -> None:
    limit = f"constant(5)\n  %m = f32[8,8]{{1,0}} all-reduce(%i), {GLOBAL}, replica_groups={{}}, to_apply=%add"
    assert loop(0, 1, "LT", limit) == [reduce(BOTH, elements=64, count=6), reduce(TP, elements=64, count=5)]


def test_the_compilers_trip_count_in_both_spellings() -> None:
    new = ', backend_config={"known_trip_count":{"n":"6"},"dynamic_variables":[]}'
    old = r', backend_config="{\"known_trip_count\":{\"n\":\"6\"}}"'
    for config in (new, old):
        assert loop(0, 1, "LT", "custom-call(), custom_call_target=x", config) == [reduce(TP, elements=64, count=6)]
    assert loop(5, 1, "LT", "constant(5)") == []
    for endless in ((0, 0, "LT", "constant(5)"), (0, 1, "LT", "custom-call(), custom_call_target=x")):
        with pytest.raises(BackendError, match="the loop w of the compiled module has collectives"):
            loop(*endless)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"all-reduce(%p), {GLOBAL}, replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, to_apply=%add",
            "not those of",
        ),
        (f"all-reduce(%p), {GLOBAL}, replica_groups={{{{0,4}}}}, to_apply=%add", "not those of"),
        (f"all-reduce(%p), {GLOBAL}, replica_groups=mesh['x'=8] {{'x':(1)2}}, to_apply=%add", "parts of a mesh's axes"),
        (f"all-reduce(%p), {GLOBAL}, replica_groups=<8>, to_apply=%add", "unknown form"),
        ("send(%p), channel_id=2", "has a send"),
        ("ragged-all-to-all(%p), replica_groups={}", "has a ragged-all-to-all"),
        ("collective-broadcast-start(%p), replica_groups={}", "has a collective-broadcast"),
    ],
)
def test_what_cannot_be_listed_is_an_error(line: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        of(f"%x = f32[8,8]{{1,0}} {line}")


def test_wrong_modules() -> None:
    with pytest.raises(BackendError, match="dtype c64"):
        of(f"%x = c64[8]{{0}} all-reduce(%p), {GLOBAL}, replica_groups={{}}, to_apply=%add")
    with pytest.raises(BackendError, match="is for 4 devices and the mesh has 8"):
        of(head="num_partitions=4")
    with pytest.raises(BackendError, match="no ENTRY computation"):
        compiled_collectives("module @jit_f {}", MESH)


# The table


def listed(kind: str, axis: str, size: int, count: int) -> dict[str, Any]:
    return {
        "op": "x",
        "kind": kind,
        "axis": axis,
        "phase": "forward",
        "dtype": "float32",
        "bytes": size,
        "count": count,
    }


def test_the_table_sums_by_kind_and_group() -> None:
    table = compiled_table(
        [
            listed("all-gather", "tp", 1024, 3),
            listed("all-gather", "tp", 256, 2),
            listed("all-reduce", "dp+tp", 256, 1),
            listed("reduce-scatter", "dp+tp", 64, 1),
            listed("all-to-all", "tp", 512, 2),
            listed("all-gather", "dp", 128, 2),
        ],
        [
            gather(TP, elements=256, count=3),
            reduce(SWAPPED, elements=64),
            scatter(SWAPPED, elements=16),
            gather(TP, elements=64, count=2),
            exchange(TP, elements=256, count=2),
            gather(DP, elements=64),
        ],
    )
    assert table.rows == (
        TableRow("all-gather", "tp", 5, 3584, 5, 3584),
        TableRow("all-reduce", "dp+tp", 1, 256, 1, 256),
        TableRow("reduce-scatter", "dp+tp", 1, 64, 0, 0),
        TableRow("all-to-all", "tp", 2, 1024, 2, 2048),
        TableRow("all-gather", "dp", 2, 256, 1, 256),
        TableRow("reduce-scatter", "tp+dp", 0, 0, 1, 64),
    )
    notes = ["", "", "not issued", "2 x the bytes", "same bytes in another count", "not listed"]
    assert [row.note for row in table.rows] == notes and not table.agrees
    assert [row["note"] for row in table.to_dict()] == notes
    lines = str(table).splitlines()
    assert lines[1].split() == ["all-gather", "tp", "5", "3,584", "5", "3,584"]
    assert lines[4].endswith("2 x the bytes") and len(lines) == 7
    assert TableRow("all-gather", "tp", 2, 100, 1, 50).note == "other count, 0.5 x the bytes"


def test_a_trace_agrees_with_a_listing() -> None:
    made = traced_collectives(traced(nested, (8, 8)).jaxpr, MESH)
    right = [
        listed("all-reduce", "tp", 256, 15),
        listed("all-gather", "dp", 512, 5),
        listed("all-reduce", "dp+tp", 256, 1),
    ]
    assert compiled_table(right, made).agrees
    assert not compiled_table(right[:2], made).agrees
