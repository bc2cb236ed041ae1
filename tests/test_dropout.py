"""Dropout: masks as a function of where an element stands, equal on every backend and however a step is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_cases import dropped_by_hand
from spec_cases import BLOCK, attention, model

from duomesh.api import new_session
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.data.sampler import Sampler
from duomesh.core.dropout import DropoutKey, dropout_inputs
from duomesh.core.errors import BackendError, DataError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.program import ModelProgram
from duomesh.core.session import AdamW, Session
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.kernels.reference.dropout import kept
from duomesh.kernels.reference.model import ReferenceModel

Array = npt.NDArray[Any]
BACKENDS = ("torch", "jax")
KEY = DropoutKey(seed=11, step=7)
SPEC = model(dropout=0.25, embedding_scale=3.0)
# scanned, scanned over a pattern, not scanned
SPECS = {
    "equal_layers": SPEC,
    "pattern": model(*[attention(window=3), BLOCK] * 2, dropout=0.4),
    "different_layers": model(BLOCK, attention(window=3), attention(window=5), dropout=0.1),
}


def mask(samples: Any, places: Any, words: tuple[int, int], **attrs: Any) -> Array:
    counted = [np.asarray(x, np.int64).astype(np.int32) for x in (samples, places, words)]
    return kept(counted[0], counted[1], counted[2], **{"features": 64, "rate": 0.1, "site": 0, **attrs})


# Masks


def test_masks_are_those_of_the_stated_words() -> None:
    """Element by element from the paper's Philox; words above 2^31 are negative numbers here."""
    samples, places = np.array([3, -5], np.int32), np.array([0, 9, 2**31 - 1], np.int32)
    for words, site in (((1, -2), 0), ((-(2**31), 77), 4)):
        key = np.array(words, np.int32)
        want = ~dropped_by_hand(samples, places, key, 7, 0.6, site)
        assert want.any() and not want.all()
        assert np.array_equal(kept(samples, places, key, features=7, rate=0.6, site=site), want)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 9, 64), (4, 3, 5, 6), (1, 130, 30)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_all_backends_draw_the_same_bits(shape: tuple[int, ...], dtype: str) -> None:
    """Results and gradients too: nothing is summed, and all round alike."""
    import jax
    import torch

    from duomesh.backends.jax.ops import dropout as of_jax
    from duomesh.backends.torch.arrays import to_array, to_tensor
    from duomesh.backends.torch.ops import dropout as of_torch
    from duomesh.core.arrays import DTYPES
    from duomesh.kernels.reference.adjoints import dropout as adjoint
    from duomesh.kernels.reference.ops import dropout as of_numpy

    rng = np.random.default_rng(sum(shape))
    x, cotangent = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
    counted = [rng.integers(-(2**31), 2**31, n).astype(np.int32) for n in (shape[0], shape[1], 2)]
    attrs: dict[str, Any] = {"rate": 0.3, "site": 1}
    want = of_numpy(x, *counted, **attrs)
    d_want = adjoint((cotangent,), (x, *counted), (), **attrs)[0]

    tensor = to_tensor(x).requires_grad_()
    out = of_torch(tensor, *map(torch.from_numpy, counted), **attrs)
    (d_out,) = torch.autograd.grad(out, tensor, to_tensor(cotangent))
    with jax.enable_x64(dtype == "float64"):
        made, pull = jax.vjp(jax.jit(lambda x: of_jax(x, *counted, **attrs)), x)
        (d_made,) = pull(cotangent)
    for name, got, d_got in (("torch", to_array(out), to_array(d_out)), ("jax", np.asarray(made), np.asarray(d_made))):
        assert got.dtype == d_got.dtype == x.dtype, name
        assert np.array_equal(got, want) and np.array_equal(d_got, d_want), name


def within(count: float, total: int, probability: float) -> bool:
    """Whether a count of independent events is within six standard deviations of what is expected."""
    return abs(count - total * probability) <= 6 * sqrt(total * probability * (1 - probability))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_rate_says(rate: float) -> None:
    """Of 10^5 elements; six standard deviations are less than 1 % of those that are kept at a rate of 0.1."""
    drawn = mask(range(5), range(200), (1, 2), features=100, rate=rate)
    assert within(drawn.sum(), 100_000, 1 - rate)
    for dim in range(3):  # and of every sample, place and feature
        others = tuple(i for i in range(3) if i != dim)
        assert all(within(n, drawn.size // drawn.shape[dim], 1 - rate) for n in drawn.sum(axis=others))


def keys_of(key: DropoutKey, spec: ModelSpec = SPEC) -> dict[str, tuple[int, int]]:
    """The words of each application of a program, by prefix."""
    program = build_program(spec)
    batch = Batch(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), sample_ids=np.zeros(1, np.int64))
    rows = dropout_inputs(program, batch, key)["dropout_keys"]
    assert rows is not None and rows.dtype == np.int32
    return {prefix: (int(k0), int(k1)) for (prefix, _), (k0, k1) in zip(program.steps, rows, strict=True)}


def test_c081_masks_that_must_differ_are_independent() -> None:
    """Another seed, step, layer, op of a layer, sample, place or group of features: as many elements are kept by both
    masks as by two that know nothing of each other."""
    words = keys_of(KEY)["layers.0."]
    one = mask(range(10, 20), range(20), words)
    others = {
        "seed": mask(range(10, 20), range(20), keys_of(replace(KEY, seed=12))["layers.0."]),
        "step": mask(range(10, 20), range(20), keys_of(replace(KEY, step=8))["layers.0."]),
        "layer": mask(range(10, 20), range(20), keys_of(KEY)["layers.1."]),
        "program": mask(range(10, 20), range(20), keys_of(KEY)["embed."]),
        "op": mask(range(10, 20), range(20), words, site=1),
        "sample": mask(range(20, 30), range(20), words),
        "place": mask(range(10, 20), range(20, 40), words),
        "sample and place exchanged": mask(range(20), range(10, 20), words).transpose(1, 0, 2),
        "feature": np.roll(one, 1, axis=2),
        "group of features": np.roll(one, 4, axis=2),
    }
    for name, other in others.items():
        assert within((one & other).sum(), one.size, 0.9 * 0.9), name
    assert np.array_equal(one, mask(range(10, 20), range(20), keys_of(KEY)["layers.0."]))


def test_a_part_has_the_bits_of_the_whole() -> None:
    """Samples, places in any order (zigzag), and features from the first on."""
    samples, places = np.arange(5, 13), np.arange(24)
    whole = mask(samples, places, (3, 4), features=30)
    zigzag = np.r_[0:6, 18:24]
    assert np.array_equal(mask(samples[2:6], places[zigzag], (3, 4), features=30), whole[2:6][:, zigzag])
    assert np.array_equal(mask(samples, places, (3, 4), features=13), whole[..., :13])


# What a pass is given


def test_every_dropout_of_a_model_has_words_of_its_own() -> None:
    program = build_program(SPEC)
    keys = keys_of(KEY)
    sites = {
        (keys[prefix], dict(op.attrs)["site"])
        for prefix, part in program.steps
        for op in part.ops
        if op.kind == "dropout"
    }
    names = [prefix + op.name for prefix, part in program.steps for op in part.ops if op.kind == "dropout"]
    assert names == [
        "embed.dropout",
        *(f"layers.{i}.{name}_post_dropout" for i in range(2) for name in ("attention", "mlp")),
    ]
    assert len(sites) == len(names)


def test_dropout_is_the_last_thing_before_the_stream() -> None:
    """After a norm of the output; what it makes is added, and nothing else reads it."""
    spec = model(replace(BLOCK, attention_post_norm=SPEC.final_norm), dropout=0.1)
    for program in build_program(spec).distinct:
        readers = {name: op.name for op in program.ops for name in op.inputs if name is not None}
        for op in program.ops:
            if op.kind == "dropout" and program.name != "embed":
                assert readers[op.outputs[0]] == op.name.replace("post_dropout", "residual")
                assert op.inputs[0] in ("attention_post_norm", "mlp.down")


def test_a_model_without_dropout_has_no_op_and_no_input_for_it() -> None:
    program = build_program(replace(SPEC, dropout=0.0))
    assert not program.has_dropout and build_program(SPEC).has_dropout
    assert not {"samples", "places", "dropout_key"} & {v.name for part in program.distinct for v in part.inputs}
    assert not any(op.kind == "dropout" for part in program.distinct for op in part.ops)
    assert set(dropout_inputs(program, batches()[0], KEY).values()) == {None}
    assert set(dropout_inputs(build_program(SPEC), batches()[0], None).values()) == {None}


def test_batches_say_which_samples_they_hold() -> None:
    program = build_program(SPEC)
    tokens = np.zeros((2, 3), np.int32)
    with pytest.raises(DataError, match="a step with dropout needs sample_ids in every batch"):
        dropout_inputs(program, Batch(tokens, tokens), KEY)
    with pytest.raises(DataError, match=r"sample_ids have shape \(3,\); 2 samples need one each"):
        Batch(tokens, tokens, sample_ids=np.arange(3))
    with pytest.raises(DataError, match="sample_ids are float64; they must be integers"):
        Batch(tokens, tokens, sample_ids=np.zeros(2))
    # a run of many samples: what is above 32 bits is dropped
    made = dropout_inputs(program, Batch(tokens, tokens, sample_ids=np.array([2**40 + 5, 2**32 - 1])), KEY)
    assert made["samples"] is not None and made["samples"].tolist() == [5, -1]
    assert made["places"] is not None and made["places"].tolist() == [0, 1, 2]


def test_the_sampler_numbers_samples_through_all_epochs() -> None:
    """Text that comes again in a later epoch, or twice in a step, is another sample."""
    sampler = Sampler(np.arange(21), 4)
    made = sampler.batches(3, 6, 2)
    assert [batch.sample_ids.tolist() for batch in made if batch.sample_ids is not None] == [[3, 4], [5, 6], [7, 8]]
    ids = sampler.sample_ids(3, 6)
    assert len(set(ids.tolist())) < 6
    for batch, first in zip(made, range(0, 6, 2), strict=True):
        assert np.array_equal(batch.tokens[:, 0], 4 * ids[first : first + 2])


# Models


def batches(cut: int = 2) -> list[Batch]:
    """Four samples of eleven tokens with unequal numbers of targets, in micro-batches of `cut`."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 37, (4, 12)).astype(np.int32)
    labels = ids[:, 1:].copy()
    labels[0, :4] = labels[2, 3:] = IGNORE
    numbers = np.array([2**33 + 1, 17, 2, 90])
    cuts = [slice(i, i + cut) for i in range(0, 4, cut)]
    return [Batch(np.ascontiguousarray(ids[c, :-1]), labels[c], sample_ids=numbers[c]) for c in cuts]


def params_of(program: ModelProgram) -> dict[str, Array]:
    return dict(initial_params(program, seed=3, perturb=0.3))


@lru_cache
def reference(spec: ModelSpec) -> ReferenceModel:
    program = build_program(spec)
    return ReferenceModel(program, {n: p.astype(np.float64) for n, p in params_of(program).items()})


def session(spec: ModelSpec, backend: str) -> Session:
    made = new_session(spec, backend=backend, dtype="float64", device="cpu")
    made.load_params(params_of(made.program).items())
    return made


def assert_same(got: tuple[float, dict[str, Array]], want: tuple[float, dict[str, Array]]) -> None:
    assert abs(got[0] - want[0]) <= bound("loss", "float64") * abs(want[0])
    for name, grad in want[1].items():
        error = relative_error(grad, got[1][name], floor=gradient_floor(want[1]))[0]
        assert error <= bound("gradient", "float64"), name


def test_masks_do_not_depend_on_micro_batches() -> None:
    model = reference(SPEC)
    want = model.loss_and_grads(batches(4), KEY)
    for cut in (1, 2):
        assert_same(model.loss_and_grads(batches(cut), KEY), want)
    without = model.loss_and_grads(batches(4))[0]
    other = model.loss_and_grads(batches(4), replace(KEY, step=8))[0]
    assert len({want[0], without, other}) == 3


def test_the_reference_drops_what_the_masks_say() -> None:
    """Zeros where the mask has them, the rest of the op's input divided by 1 - rate."""
    values = reference(SPEC).forward(batches(4)[0], KEY)
    keys = keys_of(KEY)
    sources = {"embed.dropout": "embed.scale", "layers.1.mlp_post_dropout": "layers.1.mlp.down"}
    for name, source in sources.items():
        prefix = name.rpartition(".")[0] + "."
        site = int(name.endswith("mlp_post_dropout"))
        ids = np.array([2**33 + 1, 17, 2, 90])
        keep = mask(ids, range(11), keys[prefix], features=20, rate=0.25, site=site)
        want = np.where(keep, values[source] / 0.75, 0)
        assert relative_error(want, values[name])[0] <= bound("value", "float64"), name
        assert np.array_equal(values[name] == 0, ~keep), name
    added = values["embed.dropout"] + values["layers.0.attention_post_dropout"]
    assert np.array_equal(values["layers.0.attention_residual"], added)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_a_session_drops_what_the_reference_drops(name: str, backend: str) -> None:
    spec = SPECS[name]
    made = session(spec, backend)
    assert_same(made.loss_and_grads(batches(), dropout=KEY), reference(spec).loss_and_grads(batches(), KEY))
    assert_same(made.loss_and_grads(batches()), reference(spec).loss_and_grads(batches()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_a_training_step_drops_anything(backend: str) -> None:
    made, plain = session(SPEC, backend), session(replace(SPEC, dropout=0.0), backend)
    batch = batches()[0]
    assert made.eval_loss(batch) == plain.eval_loss(batch)
    assert np.array_equal(made.logits(batch.tokens), plain.logits(batch.tokens))
    assert made.trace(batch, grads=True).loss == plain.trace(batch, grads=True).loss
    made.init_optimizer(AdamW())
    with pytest.raises(BackendError, match=r"this model has dropout=0\.25, and the step was given no key"):
        made.train_step(batches(), 1e-3)
    want, grads = reference(SPEC).loss_and_grads(batches(), KEY)
    result = made.train_step(batches(), 1e-3, dropout=KEY)
    norm = sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    assert abs(result.loss - want) <= bound("loss", "float64") * want
    assert abs(result.grad_norm - norm) <= bound("global_norm", "float64") * norm
    plain.init_optimizer(AdamW())
    assert plain.train_step(batches(), 0.0, dropout=KEY).loss == plain.train_step(batches(), 0.0).loss


def test_a_torch_program_is_compiled_once_for_all_layers_and_steps() -> None:
    """Embed, tables, both layers, head and loss are five graphs; the keys of another step compile nothing."""
    import torch
    from torch._dynamo.utils import counters

    from duomesh.backends.torch.session import TorchSession

    made = session(SPEC, "torch")
    assert isinstance(made, TorchSession)
    torch._dynamo.reset()
    counters.clear()
    for _, module in made.model.steps:
        module.compile(fullgraph=True, dynamic=False, backend="eager")  # counts graphs without generating code
    for step in range(3):
        key = replace(KEY, step=step)
        assert_same(made.loss_and_grads(batches(), dropout=key), reference(SPEC).loss_and_grads(batches(), key))
        assert counters["stats"]["unique_graphs"] == 5
    assert sum(counters["graph_break"].values()) == 0


def test_the_step_of_jax_is_compiled_once_for_all_keys() -> None:
    from duomesh.backends.jax.session import JaxSession

    made = session(SPEC, "jax")
    assert isinstance(made, JaxSession)
    made.init_optimizer(AdamW())
    losses = {made.train_step(batches(), 0.0, dropout=replace(KEY, step=step)).loss for step in range(3)}
    assert len(losses) == 3 and made.functions.step(AdamW())._cache_size() == 1
