"""Sharded programs -> one pure function over a dict of parameters.

Equal layers are stacked along a new first dim and scanned, so that compile time does not grow with depth; a repeated
pattern of different layers is one scan whose body holds the pattern. Instructions are walked while JAX traces and leave
nothing behind but the names of ops, as scopes, in the compiled module.

Not here: the optimizer, micro-batches (`session`), and what an instruction does to arrays (`modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from duomesh.backends.jax.bodies import Body
from duomesh.backends.jax.modes import Mode
from duomesh.backends.jax.ops import OPS
from duomesh.backends.jax.pullback import regathered
from duomesh.core.ir.program import check_kinds
from duomesh.core.ir.storage import Segment
from duomesh.core.sharding.program import Reshard, ShardedProgram
from duomesh.core.sharding.stacks import Stack, Stacks

__all__ = ["LoweredModel", "Params"]

Params = dict[str, jax.Array]
_OPTIONAL = ("samples", "places", "dropout_keys", "segment_ids")


class LoweredModel:
    """A model as pure functions.

    Args:
        stacks: the model on its mesh, and how its parameters are stored.
        mode: what runs an instruction.
        dtype: of weights and activations.
        wide_dtype: dtype of statistics, tables and losses: float32, or float64 in a float64 run.
        allow_cudnn: whether attention may use cuDNN's kernel.
        remat: whether backward computes a layer again from its input, and keeps nothing else of it.

    Raises BackendError for a model with ops that `OPS` lacks.
    """

    def __init__(
        self,
        stacks: Stacks,
        mode: Mode,
        *,
        dtype: Any,
        wide_dtype: Any,
        allow_cudnn: bool,
        remat: bool = False,
    ) -> None:
        self.program, self.stacks = stacks.sharded.model, stacks
        check_kinds(self.program, OPS, "jax")
        self._mode, self._dtype, self._wide, self._remat = mode, dtype, wide_dtype, remat
        self._blocks = {block.name for block in self.program.blocks}
        functions = {**OPS, "attention": partial(OPS["attention"], allow_cudnn=allow_cudnn)}
        self._written = {name: self._write(made, functions) for name, made in stacks.sharded.programs.items()}
        # of `dropout_keys`
        self._rows = {prefix: row for row, (prefix, _) in enumerate(self.program.steps)}

    def _write(self, sharded: ShardedProgram, functions: Mapping[str, Any]) -> list[Reshard | Body]:
        """Instructions with everything that does not depend on arrays."""
        extents = self.stacks.sharded.extents(batch=1, seq=1)  # no parameter depends on them
        # a layer that is computed again gathers again anyway, and once is enough
        is_again = self._remat and sharded.program.name in self._blocks
        gathered = {} if is_again else {made.result: made for made in sharded.reshards() if made.regathers}
        return [
            made if isinstance(made, Reshard) else Body.of(sharded, made, extents, gathered, functions)
            for made in sharded.instructions
            if not (isinstance(made, Reshard) and made.result in gathered)
        ]

    def _weights(self, name: str, params: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What each op of a program takes of its parameters, by op; parameters by local name."""
        sharded = self.stacks.sharded.programs[name]
        env: dict[str | None, Any] = {None: None}
        env.update(params)
        found = {}
        for made in self._written[name]:
            if isinstance(made, Body):
                found[made.name] = self._mode.pack(made, [env[operand] for operand in made.operands[made.inputs :]])
            elif made.source in env:
                env[made.result] = self._mode.reshard(sharded, made, env[made.source])
        return found

    def _run(
        self, name: str, values: Mapping[str, Any], weights: Mapping[str, list[Any]], *, records: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One program. Returns its outputs by their outside names and, with `records`, what each op made."""
        sharded = self.stacks.sharded.programs[name]
        env: dict[str | None, Any] = {None: None}
        env.update({v.name: values[v.name] for v in sharded.program.inputs})
        for c in sharded.program.constants:
            env[c.name] = jnp.asarray(np.asarray(c.data, np.float32), self._wide)
        record: dict[str, Any] = {}
        for made in self._written[name]:
            if isinstance(made, Body):
                inputs = [env[operand] for operand in made.operands[: made.inputs]]
                with jax.named_scope(made.name):
                    results = self._mode.call(sharded, made, inputs, weights[made.name])
                env.update(zip(made.results, results, strict=True))
                if records:
                    joined = [self._mode.join(sharded, *pair) for pair in zip(made.results, results, strict=True)]
                    record.update(zip(made.results, joined, strict=True))
            elif made.source in env:
                x = env[made.source]
                env[made.result] = None if x is None else self._mode.reshard(sharded, made, x)
        return {outside: env[value] for outside, value in sharded.outputs}, record

    def _apply(
        self,
        name: str,
        values: Mapping[str, Any],
        params: Mapping[str, Any],
        stacks: Mapping[str, Stack],
        record: dict[str, Any] | None,
        *,
        is_scanned: bool = False,
    ) -> dict[str, Any]:
        """`_run` on entries of stored arrays, gathered where they are shared, with what backward does again.

        stacks: of each parameter by local name. record: receives what each op made.
        """
        program = self.stacks.sharded.programs[name].program
        run = partial(self._run, name, records=record is not None)

        def weights(params: Mapping[str, Any]) -> dict[str, list[Any]]:
            if self.stacks.zero == 3:
                params = {n: self._mode.member(stacks[n], x, self._dtype) for n, x in params.items()}
            return self._weights(name, params)

        def plain(varied: Mapping[str, Any], fixed: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
            return run({**varied, **fixed}, weights(params))

        apply: Callable[..., Any] = plain
        if self._remat and name in self._blocks:
            # what a scan saves cannot be merged with what its backward makes again; elsewhere it could be
            policy = jax.checkpoint_policies.nothing_saveable
            apply = jax.checkpoint(plain, policy=policy, prevent_cse=not is_scanned)
        elif self.stacks.zero == 3:
            apply = regathered(weights, lambda varied, fixed, made: run({**varied, **fixed}, made))
        names = [v.name for v in program.inputs]
        varied = {n: values[n] for n in names if n in program.differentiated}
        out, made = apply(varied, {n: values[n] for n in names if n not in varied}, params)
        if record is not None:
            record.update(made)
        result: dict[str, Any] = out
        return result

    def _segment(
        self, index: int, segment: Segment, values: dict[str, Any], params: Params, records: dict[str, Any] | None
    ) -> jax.Array:
        """Runs one segment's layers and returns the stream."""
        programs = [self.program.blocks[kind] for kind in segment.pattern]
        names = [
            {p.name: f"segments.{index}.{position}.{p.name}" for p in program.params}
            for position, program in enumerate(programs)
        ]
        stacks = [{local: self.stacks.stacks[name] for local, name in found.items()} for found in names]
        arrays = [{local: params[name] for local, name in found.items()} for found in names]
        keys = [self._layer_keys(values["dropout_keys"], segment.layers(position)) for position in range(len(names))]
        is_scanned = segment.repeats > 1

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            made = []
            for program, found, local, key in zip(programs, stacks, *layer, strict=True):
                record: dict[str, Any] | None = None if records is None else {}
                inputs = {**values, "x": x, "dropout_key": key}
                x = self._apply(program.name, inputs, local, found, record, is_scanned=is_scanned)["x"]
                made.append(record)
            return x, made if records is not None else None

        if is_scanned:
            x, made = jax.lax.scan(body, values["x"], (arrays, keys))
        else:
            x, made = body(values["x"], (arrays, jax.tree.map(lambda rows: rows[0], keys)))
            made = jax.tree.map(lambda value: value[None], made)
        if records is not None:
            for position in range(len(segment.pattern)):
                for i, layer in enumerate(segment.layers(position)):
                    records |= {f"layers.{layer}.{name}": value[i] for name, value in made[position].items()}
        return x

    def _layer_keys(self, keys: jax.Array | None, layers: range) -> jax.Array | None:
        """[len(layers), 2]: the rows of some layers."""
        first = self._rows["layers.0."]
        return None if keys is None else keys[first + layers.start : first + layers.stop : layers.step]

    def __call__(self, params: Params, inputs: Mapping[str, Any], records: dict[str, Any] | None = None) -> jax.Array:
        """Logits [B, S, V]; with "labels" and "loss_mask" among the inputs, the weighted sum of token losses.

        Arrays are as the mode has them.

        Args:
            params: stored arrays as ops meet them; with ZeRO 3 as they are stored.
            inputs: tokens and positions [B, S] int32, and optionally segment_ids [B, S], labels [B, S] int32 and
                loss_mask [B, S] wide; to drop anything, also what `core.dropout.dropout_inputs` gives.
            records: receives every op output under its global name.
        """
        values: dict[str, Any] = {**dict.fromkeys(_OPTIONAL), **inputs}
        keys = values["dropout_keys"]

        def apply(prefix: str, name: str) -> None:
            local: dict[str, Any] | None = None if records is None else {}
            values["dropout_key"] = None if keys is None else keys[self._rows[prefix]]
            program = self.stacks.sharded.programs[name].program
            canonical = {p.name: self.stacks.sharded.canonical(prefix, p.name) for p in program.params}
            found = {n: self.stacks.of(full) for n, full in canonical.items()}
            arrays = {n: params[full] for n, full in canonical.items()}
            values.update(self._apply(name, values, arrays, found, local))
            if records is not None and local is not None:
                records.update({prefix + name: value for name, value in local.items()})

        apply("embed.", "embed")
        apply("tables.", "tables")
        for i, segment in enumerate(self.stacks.segments):
            values["x"] = self._segment(i, segment, values, params, records)
        apply("head.", "head")
        if "labels" not in inputs:
            logits: jax.Array = values["logits"]
            return logits
        apply("loss.", "loss")
        loss: jax.Array = values["loss_sum"]
        return loss
