"""Both lowerings against the numpy reference model: every op output, the loss, every gradient, three optimizer steps.

The reference walks the same programs but shares no op, no autodiff and no optimizer with a backend; it is itself
compared with a second oracle that does not know the IR (`test_oracle.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from spec_cases import CASES, attention, model

from duomesh.api import new_session
from duomesh.core.arrays import DTYPES
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.errors import BackendError, DataError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.ir.cost import longest_sum
from duomesh.core.session import AdamW, Session, Trace
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.kernels.reference.model import ReferenceModel

Array = npt.NDArray[Any]
BACKENDS = ("torch", "jax")
CONFIG = AdamW(weight_decay=0.3, max_grad_norm=0.5)


def make_batch(spec: ModelSpec, seed: int, *, segments: bool = False) -> Batch:
    """3 samples of 11 tokens, with unequal numbers of targets and weights; the last id of the vocabulary occurs.

    With segments, the second one's positions are not consecutive: attention sees only differences of positions, and
    those of a default would be the same as those of a mere restart.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, spec.vocab_size, (3, 12)).astype(np.int32)
    ids[1, 4] = spec.vocab_size - 1
    labels = ids[:, 1:].copy()
    labels[0, : 3 + seed % 4] = IGNORE
    mask = rng.uniform(0.5, 2.0, labels.shape).astype(np.float32)
    segment_ids = np.repeat([[0] * 4 + [1] * 7], 3, 0).astype(np.int32) if segments else None
    positions = np.repeat([[*range(4), *range(0, 21, 3)]], 3, 0).astype(np.int32) if segments else None
    return Batch(np.ascontiguousarray(ids[:, :-1]), labels, mask, positions, segment_ids)


def parameters(spec: ModelSpec) -> dict[str, Array]:
    return dict(initial_params(build_program(spec), seed=3, perturb=0.3))


@lru_cache
def reference(spec: ModelSpec, *, segments: bool = False) -> tuple[dict[str, Array], float, dict[str, Array]]:
    """Values of one batch; loss and gradients of a step of two."""
    params = {name: array.astype(np.float64) for name, array in parameters(spec).items()}
    oracle = ReferenceModel(build_program(spec), params)
    batches = [make_batch(spec, 0, segments=segments), make_batch(spec, 1, segments=segments)]
    return oracle.forward(batches[0]), *oracle.loss_and_grads(batches)


def session(spec: ModelSpec, backend: str, dtype: Any = "float64") -> Session:
    made = new_session(spec, backend=backend, dtype=dtype, device="cpu")
    made.load_params(parameters(spec).items())
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_every_value_and_gradient_in_float64(name: str, backend: str) -> None:
    spec = CASES[name]
    values, _, _ = reference(spec)
    made = session(spec, backend)
    batch = make_batch(spec, 0)
    trace = made.trace(batch, grads=True)
    ops = [prefix + out for prefix, program in made.program.steps for op in program.ops for out in op.outputs]
    assert list(trace.values) == ops
    for value, got in trace.values.items():
        assert relative_error(values[value], got)[0] <= bound("value", "float64"), value
    oracle = ReferenceModel(made.program, {n: p.astype(np.float64) for n, p in parameters(spec).items()})
    loss, grads = oracle.loss_and_grads([batch])
    assert abs(trace.loss - loss) <= bound("loss", "float64") * abs(loss)
    assert list(trace.grads) == list(made.program.params)
    for parameter, want in grads.items():
        error, index = relative_error(want, trace.grads[parameter], floor=gradient_floor(grads))
        assert error <= bound("gradient", "float64"), (parameter, index)


def numpy_adamw(
    params: dict[str, Array], gradients: Callable[[dict[str, Array]], dict[str, Array]], lrs: list[float]
) -> Iterator[tuple[dict[str, Array], float]]:
    """(parameters, gradient norm) after each step; arXiv:1711.05101, algorithm 2, with clipping."""
    first = {n: np.zeros_like(p) for n, p in params.items()}
    second = {n: np.zeros_like(p) for n, p in params.items()}
    for t, lr in enumerate(lrs, 1):
        grads = gradients(params)
        norm = float(np.sqrt(sum(float((g * g).sum()) for g in grads.values())))
        clip = min(1.0, CONFIG.max_grad_norm / norm) if CONFIG.max_grad_norm else 1.0
        for n, g in grads.items():
            first[n] = CONFIG.beta1 * first[n] + (1 - CONFIG.beta1) * clip * g
            second[n] = CONFIG.beta2 * second[n] + (1 - CONFIG.beta2) * (clip * g) ** 2
            m, v = first[n] / (1 - CONFIG.beta1**t), second[n] / (1 - CONFIG.beta2**t)
            decay = CONFIG.weight_decay if g.ndim > 1 else 0.0
            params[n] = params[n] - lr * (m / (np.sqrt(v) + CONFIG.eps) + decay * params[n])
        yield dict(params), norm


STEP_CASES = ("qkv_bias_tied", "some_biases", "window", "layer_norm", "two_rotary_tables", "embedding_scale")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STEP_CASES)
def test_three_optimizer_steps_in_float64(name: str, backend: str) -> None:
    """Two micro-batches a step with different numbers of targets, clipping in force, decay on matrices only."""
    spec = CASES[name]
    made = session(spec, backend)
    made.init_optimizer(CONFIG)
    batches = [make_batch(spec, 0), make_batch(spec, 1)]
    start = {n: p.astype(np.float64) for n, p in parameters(spec).items()}

    def gradients(params: dict[str, Array]) -> dict[str, Array]:
        return ReferenceModel(made.program, params).loss_and_grads(batches)[1]

    lrs = [1e-2, 3e-2, 2e-2]
    want: dict[str, Array] = {}
    for lr, (want, norm) in zip(lrs, numpy_adamw(start, gradients, lrs), strict=True):  # noqa: B007 (used below)
        result = made.train_step(batches, lr)
        assert not result.is_skipped
        assert abs(result.grad_norm - norm) <= bound("global_norm", "float64") * norm
    got = dict(made.params())
    for parameter, value in want.items():
        assert relative_error(value, got[parameter])[0] <= bound("updated_parameter", "float64"), parameter


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_below_the_limit_are_not_scaled(backend: str) -> None:
    spec = CASES["gqa"]
    _, _, grads = reference(spec)
    norm = float(np.sqrt(sum(float((g * g).sum()) for g in grads.values())))
    made = session(spec, backend)
    made.init_optimizer(AdamW(beta1=0.5, max_grad_norm=2 * norm))
    made.train_step([make_batch(spec, 0), make_batch(spec, 1)], 1e-3)
    for group, name, array in made.optimizer_state():
        if group == "exp_avg":
            assert relative_error(grads[name] / 2, array)[0] <= bound("gradient", "float64"), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("segments", [False, True], ids=["plain", "packed"])
def test_accumulated_loss_and_gradients(backend: str, segments: bool) -> None:
    """C067: each target has the same weight in a step, however it is cut into micro-batches."""
    spec = CASES["window"]
    _, loss, grads = reference(spec, segments=segments)
    made = session(spec, backend)
    got_loss, got = made.loss_and_grads([make_batch(spec, i, segments=segments) for i in (0, 1)])
    assert abs(got_loss - loss) <= bound("loss", "float64") * abs(loss)
    for parameter, want in grads.items():
        assert relative_error(want, got[parameter], floor=gradient_floor(grads))[0] <= bound("gradient", "float64")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gqa", "qkv_bias_tied", "qk_norm", "softcaps"])
def test_fp32_is_within_its_own_rounding(name: str, backend: str) -> None:
    """One-device fp32 against the float64 reference, values and gradients, within 8 u sqrt(K)."""
    spec = CASES[name]
    made = session(spec, backend, "float32")
    batch = make_batch(spec, 0)
    trace = made.trace(batch, grads=True)
    values, _, _ = reference(spec)
    terms = longest_sum(made.program, batch=3, seq=11)
    for key, value in trace.values.items():
        quantity = "logits" if key.startswith("head.") else "value"
        limit = bound(quantity, "float32", terms=terms)
        assert relative_error(values[key], value)[0] <= limit, key
    oracle = ReferenceModel(made.program, {n: p.astype(np.float64) for n, p in parameters(spec).items()})
    _, grads = oracle.loss_and_grads([batch])
    for key, want in grads.items():
        error, _ = relative_error(want, trace.grads[key], floor=gradient_floor(grads))
        assert error <= bound("gradient", "float32", terms=terms), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_c093_bf16_gradients_accumulate_in_fp32(backend: str) -> None:
    """Micro-batches that weigh 256 and 1: a sum in bf16 would lose the second, and every sum would be a bf16 number."""
    spec = model(attention(), attention())
    made = session(spec, backend, "bfloat16")
    one = make_batch(spec, 0)

    def weighted(weight: float) -> Batch:
        return Batch(one.tokens, one.labels, np.full(one.labels.shape, weight, np.float32))

    _, ones = made.loss_and_grads([weighted(1.0)])
    _, sums = made.loss_and_grads([weighted(256.0), weighted(1.0)])
    for name, grad in sums.items():
        assert grad.dtype == np.float32, name
    name = "head.weight"
    largest = np.unravel_index(np.abs(ones[name].astype(np.float64)).argmax(), ones[name].shape)
    assert sums[name][largest] != sums[name].astype(DTYPES["bfloat16"]).astype(np.float32)[largest]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c093_a_training_step_accumulates_in_fp32(backend: str) -> None:
    """The first moment shows the sum that the update was made from: in bf16, every one of its values would be bf16."""
    made = session(CASES["gqa"], backend, "bfloat16")
    compute = {name: array.dtype for name, array in made.params()}
    made.init_optimizer(AdamW(beta1=0.5, max_grad_norm=None))  # half a gradient has its digits
    made.train_step([make_batch(CASES["gqa"], 0), make_batch(CASES["gqa"], 1)], 1e-3)
    for group, name, array in made.optimizer_state():
        if group == "exp_avg":
            assert (array != array.astype(compute[name]).astype(np.float32)).any(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_keeps_an_fp32_master(backend: str) -> None:
    """Updates far below one bf16 step add up in the master; compute weights are the master rounded."""
    spec = CASES["gqa"]
    made = session(spec, backend, "bfloat16")
    made.init_optimizer(AdamW(weight_decay=0.0))
    before = {n: p.astype(np.float32) for n, p in made.params()}
    for _ in range(3):
        made.train_step([make_batch(spec, 0)], 1e-6)
    masters = {name: array for group, name, array in made.optimizer_state() if group == "master"}
    for name, compute in made.params():
        assert masters[name].dtype == np.float32
        assert (masters[name] != before[name]).any(), name
        assert np.array_equal(masters[name].astype(compute.dtype), compute), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_state_survives_a_move_bit_for_bit(backend: str, dtype: str) -> None:
    """Saving and loading optimizer state, on either backend, changes no bit."""
    spec = CASES["qkv_bias_tied"]
    made = session(spec, backend, dtype)
    made.init_optimizer(CONFIG)
    for _ in range(2):
        made.train_step([make_batch(spec, 0)], 1e-3)
    state = list(made.optimizer_state())
    params = dict(made.params())
    for other in BACKENDS:
        target = new_session(spec, backend=other, dtype=dtype, device="cpu")  # type: ignore[arg-type]
        target.load_optimizer_state(CONFIG, made.optimizer_step_count(), iter(state))
        assert target.optimizer_step_count() == 2
        for (group, name, array), (group2, name2, array2) in zip(state, target.optimizer_state(), strict=True):
            assert (group, name) == (group2, name2)
            assert array.dtype == array2.dtype and array.tobytes() == array2.tobytes(), (other, group, name)
        for name, array in target.params():
            assert array.tobytes() == params[name].tobytes(), (other, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_goes_on_after_a_move(backend: str) -> None:
    """Two steps, a move, a third step: as three steps in one place. From torch to torch it is bit-equal."""
    spec = CASES["qkv_bias_tied"]
    stays = session(spec, "torch")
    stays.init_optimizer(CONFIG)
    for seed in (0, 1):
        stays.train_step([make_batch(spec, seed)], 1e-2)
    moves = new_session(spec, backend=backend, dtype="float64", device="cpu")
    moves.load_optimizer_state(CONFIG, stays.optimizer_step_count(), stays.optimizer_state())
    for made in (stays, moves):
        made.train_step([make_batch(spec, 2)], 1e-2)
    for (name, want), (_, got) in zip(stays.params(), moves.params(), strict=True):
        limit = 0.0 if backend == "torch" else bound("updated_parameter", "float64")
        assert relative_error(want, got)[0] <= limit, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_survive_a_round_trip_bit_for_bit(backend: str) -> None:
    spec = CASES["some_biases"]
    made = session(spec, backend, "float32")
    for (name, array), (name2, array2) in zip(parameters(spec).items(), made.params(), strict=True):
        assert name == name2 and array.tobytes() == array2.tobytes(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_targets_or_with_a_nan_changes_nothing(backend: str) -> None:
    spec = CASES["gqa"]
    made = session(spec, backend, "float32")
    made.init_optimizer(CONFIG)
    made.train_step([make_batch(spec, 0)], 1e-3)
    before = [(g, n, a.tobytes()) for g, n, a in made.optimizer_state()]
    batch = make_batch(spec, 0)
    empty = Batch(batch.tokens, np.full_like(batch.labels, IGNORE))
    assert made.train_step([empty], 1e-3).is_skipped
    bad = Batch(batch.tokens, batch.labels, np.where(batch.labels == 5, np.nan, 1.0).astype(np.float32) * np.nan)
    result = made.train_step([bad], 1e-3)
    assert result.is_skipped
    assert [(g, n, a.tobytes()) for g, n, a in made.optimizer_state()] == before
    assert made.optimizer_step_count() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_targets_the_loss_and_gradients_are_zero(backend: str) -> None:
    """A zero denominator gives a zero term, never NaN; no batch at all is a mistake."""
    made = session(CASES["gqa"], backend, "float32")
    batch = make_batch(CASES["gqa"], 0)
    empty = Batch(batch.tokens, np.full_like(batch.labels, IGNORE))
    loss, grads = made.loss_and_grads([empty])
    assert loss == 0.0 and not any(grad.any() for grad in grads.values())
    trace = made.trace(empty, grads=True)
    assert trace.loss == 0.0 and not any(grad.any() for grad in trace.grads.values())
    with pytest.raises(DataError, match="at least one batch"):
        made.loss_and_grads([])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_optimizer_has_its_own_settings(backend: str) -> None:
    """Decay, betas and clipping of an earlier `init_optimizer` must not stay in force."""
    spec, batch = CASES["gqa"], [make_batch(CASES["gqa"], 0)]
    other = AdamW(beta1=0.5, beta2=0.6, eps=1e-4, weight_decay=0.9, max_grad_norm=None)
    fresh, used = session(spec, backend), session(spec, backend)
    used.init_optimizer(CONFIG)
    used.train_step(batch, 1e-2)
    used.load_params(parameters(spec).items())
    for one in (fresh, used):
        one.init_optimizer(other)
        one.train_step(batch, 1e-2)
    for (name, a), (_, b) in zip(fresh.params(), used.params(), strict=True):
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_masters_keep_the_weights_that_they_are_given_in_full(backend: str) -> None:
    """A bf16 run starts from fp32 weights, not from their bf16 roundings."""
    made = new_session(CASES["gqa"], backend=backend, dtype="bfloat16", device="cpu")
    made.init_optimizer(CONFIG, parameters(CASES["gqa"]).items())
    masters = {name: array for group, name, array in made.optimizer_state() if group == "master"}
    for name, array in made.params():
        assert masters[name].tobytes() == parameters(CASES["gqa"])[name].tobytes()
        assert np.array_equal(array, masters[name].astype(array.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_does_not_round_bf16_gradients_again(backend: str) -> None:
    """exp_avg after one step is (1 - beta1) times the clipped gradient, scaled in fp32."""
    spec, batch = CASES["gqa"], make_batch(CASES["gqa"], 0)
    made = session(spec, backend, "bfloat16")
    made.init_optimizer(AdamW(max_grad_norm=0.1))
    _, grads = made.loss_and_grads([batch])
    result = made.train_step([batch], 1e-3)
    assert result.grad_norm > 0.1
    moments = {name: array for group, name, array in made.optimizer_state() if group == "exp_avg"}
    for name, moment in moments.items():
        want = grads[name].astype(np.float64) * (0.1 / result.grad_norm) * (1 - 0.9)
        assert relative_error(want, moment)[0] <= bound("value", "float32"), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_mistakes_are_named(backend: str) -> None:
    spec = CASES["gqa"]
    made = new_session(spec, backend=backend, device="cpu")
    params = parameters(spec)
    with pytest.raises(BackendError, match=r"1 tensors are missing: params head\.weight"):
        made.load_params((n, p) for n, p in params.items() if n != "head.weight")
    with pytest.raises(BackendError, match=r"layers.0.mlp.up.weight has shape \(20, 28\); this model needs \(28, 20\)"):
        made.load_params((n, p.T if n == "layers.0.mlp.up.weight" else p) for n, p in params.items())
    with pytest.raises(BackendError, match="'nonsense' is not part of this model"):
        made.load_params([("nonsense", np.zeros(3, np.float32))])
    with pytest.raises(BackendError, match="init_optimizer"):
        made.train_step([make_batch(spec, 0)], 1e-3)
    made.load_params(params.items())
    batch = make_batch(spec, 0)
    with pytest.raises(DataError, match="token id 37 is outside the model's vocabulary of 37 rows"):
        made.eval_loss(Batch(np.full_like(batch.tokens, 37), batch.labels))


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_and_logits_agree_with_the_trace(backend: str) -> None:
    spec = CASES["gqa"]
    made = session(spec, backend)
    batch = make_batch(spec, 0)
    trace: Trace = made.trace(batch, grads=False)
    assert not trace.grads
    total, weight = made.eval_loss(batch)
    assert abs(total / weight - trace.loss) <= bound("loss", "float64") * trace.loss
    assert relative_error(trace.values["head.logits"], made.logits(batch.tokens))[0] <= bound("logits", "float64")


def test_generated_source_names_every_op_and_layers_of_a_kind_share_it() -> None:
    from duomesh.backends.torch.session import TorchSession

    made = TorchSession(build_program(CASES["window"]), device="cpu")
    first, second, third = made.model.layers
    assert type(first) is not type(second) is not type(third)
    for op in made.program.blocks[0].ops:
        assert f"ops.{op.kind}(" in first.source
        assert all(name.replace(".", "_") in first.source for name in op.outputs)
    plain = TorchSession(build_program(CASES["gqa"]), device="cpu")
    assert type(plain.model.layers[0]) is type(plain.model.layers[1])


def test_casting_a_torch_model_leaves_its_rotary_constants_alone() -> None:
    """C088: `module.bfloat16()` must not round frequencies."""
    from duomesh.backends.torch.session import TorchSession

    made = TorchSession(build_program(CASES["gqa"]), device="cpu")
    before = made.model.tables.constant("rope0.inv_freq").clone()
    after = made.model.bfloat16().tables.constant("rope0.inv_freq")
    assert str(after.dtype) == "torch.float32" and bool((before == after).all())


def test_deep_jax_models_trace_no_more_ops_than_shallow_ones() -> None:
    """Equal layers are scanned: the traced program does not grow with depth."""
    import jax

    from duomesh.backends.jax.session import JaxSession

    def size(layers: int) -> int:
        spec = model(*[attention(), attention(window=4)] * (layers // 2))
        made = JaxSession(build_program(spec), device="cpu")
        shapes = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in made.stacks.stacks.items()}
        ids = np.zeros((1, 5), np.int32)
        inputs = {"tokens": ids, "positions": ids, "segment_ids": None}
        return str(jax.make_jaxpr(made.model.__call__)(shapes, inputs)).count("dot_general")

    assert size(4) == size(32)


def test_each_block_kind_compiles_once_without_a_graph_break() -> None:
    """Six layers of two kinds, embed, tables, head and loss are six graphs, and a second step compiles nothing."""
    import torch
    from torch._dynamo.utils import counters

    from duomesh.backends.torch.session import TorchSession

    spec = model(*[attention(), attention(window=4)] * 3)
    made = TorchSession(build_program(spec), device="cpu")
    made.load_params(parameters(spec).items())
    made.init_optimizer(CONFIG)
    torch._dynamo.reset()
    counters.clear()
    for _, module in made.model.steps:
        module.compile(fullgraph=True, dynamic=False, backend="eager")  # counts graphs without generating code
    losses = [made.train_step([make_batch(spec, 0)], 1e-3).loss]
    assert counters["stats"]["unique_graphs"] == 6
    losses.append(made.train_step([make_batch(spec, 1)], 1e-3).loss)
    assert counters["stats"]["unique_graphs"] == 6
    assert sum(counters["graph_break"].values()) == 0
    eager = session(spec, "torch", "float32")
    eager.init_optimizer(CONFIG)
    assert losses == [eager.train_step([make_batch(spec, i)], 1e-3).loss for i in (0, 1)]


def test_a_jax_step_compiles_once() -> None:
    from duomesh.backends.jax.session import JaxSession

    spec = CASES["gqa"]
    made = JaxSession(build_program(spec), device="cpu")
    made.load_params(parameters(spec).items())
    made.init_optimizer(CONFIG)
    for i, lr in enumerate([1e-3, 2e-3, 0.0]):
        made.train_step([make_batch(spec, i)], lr)
    assert made.functions.step(CONFIG)._cache_size() == 1  # type: ignore[attr-defined]
    state = list(made.optimizer_state())
    made.load_optimizer_state(CONFIG, 3, state)
    for i in (0, 1):
        made.train_step([make_batch(spec, i)], 1e-3)
    assert made.functions.step(CONFIG)._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c089_a_longer_batch_before_leaves_no_trace(backend: str) -> None:
    """Lengths 7, 11 and 7 in one bf16 session equal fresh ones bit for bit: tables are made for each batch."""
    spec = CASES["llama3_scaling"]
    used = session(spec, backend, "bfloat16")
    for length in (7, 11, 7):
        ids = make_batch(spec, 0).tokens[:, :length]
        fresh = session(spec, backend, "bfloat16")
        assert used.logits(ids).tobytes() == fresh.logits(ids).tobytes(), length
