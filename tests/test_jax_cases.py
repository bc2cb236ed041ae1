"""Hard cases of JAX: checkpoints of meshes, ambient meshes, batch shapes, donation, stacked layers, padding. Those of
where arrays lie are in `test_jax_placement`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
import pytest
from plan_cases import CONFIG, LR, VOCAB, plan_batches, plan_model
from sharding_cases import EXPERT_MODELS, NORM, WIDE, Array, params_of
from spec_cases import attention, model
from test_checkpoint import training_state

from duomesh.backends.jax.session import JaxSession
from duomesh.backends.jax.store import Store
from duomesh.backends.torch.session import TorchSession
from duomesh.converters.hf import export_hf
from duomesh.converters.hf.reader import HfCheckpoint
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.boxes import Box, Deferred, cut, slices, tiles
from duomesh.core.checkpoint import Checkpoint, write_checkpoint
from duomesh.core.errors import BackendError, DuomeshWarning
from duomesh.core.generate import greedy
from duomesh.core.ir.build import build_program
from duomesh.core.ir.storage import Segment
from duomesh.core.plan.plan import Plan
from duomesh.core.plan.shard import shard
from duomesh.core.session import STATE_GROUPS, JaxMode, Session
from duomesh.core.sharding import stacks as stacks_module
from duomesh.core.sharding.stacks import Stacks
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.kernels.reference.model import ReferenceModel

pytestmark = pytest.mark.usefixtures("quick_compilation")
FOUR = "dp=2,tp=2,zero=1"
MESHES: list[tuple[str, JaxMode]] = [("", "manual"), (FOUR, "manual"), (FOUR, "explicit")]
meshes = pytest.mark.parametrize(("plan", "mode"), MESHES, ids=["one device", "manual", "explicit"])


def small(**fields: Any) -> ModelSpec:
    """Two equal layers, two kv heads, a vocabulary that no mesh divides; fields of the attention."""
    return model(
        replace(attention(**{"num_heads": 8, "num_kv_heads": 2, **fields}), mlp=replace(WIDE, ffn_size=24)),
        vocab_size=VOCAB,
        hidden_size=16,
    )


def session_of(spec: ModelSpec, plan: str = "", mode: JaxMode = "manual", dtype: Any = "float32", **more: Any) -> Any:
    session = JaxSession(
        build_program(spec), plan=Plan.parse(plan), compute_dtype=dtype, device="cpu", mode=mode, **more
    )
    session.load_params((name, array.astype(dtype)) for name, array in params_of(session.program).items())
    return session


def trained(*args: Any, steps: int = 1, **more: Any) -> Any:
    session = session_of(*args, **more)
    session.init_optimizer(CONFIG)
    for _ in range(steps):
        session.train_step(plan_batches(1), LR)
    return session


def digest(array: Array) -> str:
    return hashlib.blake2b(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


def state_of(session: Session) -> dict[str, str]:
    return {f"{group} {name}": digest(array) for group, name, array in session.optimizer_state()}


def write(session: Session, target: Path) -> Path:
    return write_checkpoint(
        target,
        session.program.spec,
        session.owned_state(),
        boxes=session.owned_boxes(),
        training=replace(training_state(), optimizer_step_count=session.optimizer_step_count()),
        plan=str(session.plan),
    )


# C147: stored meshes are hints

_WITHOUT_FRAMEWORKS = """
import sys
class Missing:
    def find_spec(name, *args):
        if name.partition(".")[0] in ("jax", "torch"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing)
import json
from duomesh.cli.main import main
from duomesh.core.checkpoint import Checkpoint
source, target = sys.argv[1:]
with Checkpoint(source) as found:
    tensors = {f"{group} {name}": tensor.shape for group, name, tensor in found.deferred_state()}
    print(json.dumps([found.plan, found.training.optimizer_step_count, tensors]))
assert main(["explain", source, "--plan", found.plan]) == 0
assert main(["convert", source, target]) == 0
"""
_ON_TWO_DEVICES = """
import sys
sys.path.insert(0, sys.argv[2])
import json
import jax
jax.config.update("jax_num_cpu_devices", 2)
from test_jax_cases import loaded, state_of
assert len(jax.devices()) == 2
print(json.dumps([state_of(loaded(sys.argv[1], plan)) for plan in ("tp=2,sequence_parallel", "")]))
"""


def loaded(path: str | Path, plan: str, mode: JaxMode = "manual") -> Any:
    with Checkpoint(path) as found:
        assert found.training is not None
        session = JaxSession(build_program(found.spec), plan=Plan.parse(plan), device="cpu", mode=mode)
        session.load_optimizer_state(
            found.training.optimizer, found.training.optimizer_step_count, found.deferred_state()
        )
    return session


def run_python(code: str, *words: object, **environment: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, **environment},
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_c147_a_stored_mesh_is_a_hint(tmp_path: Path) -> None:
    """Saved by 2 x 4 devices with copies of kv heads and a padded vocabulary: listed and exported to Hugging Face where
    no framework can be imported, and opened on two devices and on one of a process that has two, all bit-equal."""
    session = trained(small(q_bias=True, k_bias=True, v_bias=True), "dp=2,tp=4,zero=1")
    assert (session.plan.dp, session.plan.tp, session.mesh.devices.size) == (2, 4, 8)
    path, want = write(session, tmp_path / "saved"), state_of(session)
    plan, count, tensors = json.loads(run_python(_WITHOUT_FRAMEWORKS, path, tmp_path / "hf").splitlines()[0])
    params = session.program.params
    assert (plan, count) == (str(session.plan), 1)
    assert tensors == {f"{group} {name}": list(params[name].shape) for group in STATE_GROUPS for name in params}
    made = run_python(_ON_TWO_DEVICES, path, Path(__file__).parent, XLA_FLAGS="")
    assert json.loads(made) == [want, want]
    with HfCheckpoint(tmp_path / "hf") as exported:
        values = dict(exported.params())
    weights = dict(session.params())
    assert {name: digest(array) for name, array in values.items()} == {n: digest(a) for n, a in weights.items()}


OWNED = ["", "tp=4,dp=2", "tp=4,dp=2,zero=1", "tp=8,sequence_parallel", "dp=8,zero=3", "dp=4,tp=2,zero=2,zero_shard=2"]


@pytest.mark.parametrize("mode", ["manual", "explicit"])
@pytest.mark.parametrize("plan", OWNED)
def test_c147_every_element_is_saved_once(plan: str, mode: JaxMode) -> None:
    """Boxes tile each parameter, padding and copies left out, and a piece is what stands there of the whole."""
    session = session_of(plan_model(), plan, mode)
    session.init_optimizer(CONFIG)
    boxes, params = session.owned_boxes(), session.program.params
    assert list(boxes) == list(params)
    assert all(tiles(found, params[name].shape) for name, found in boxes.items())
    whole = {(group, name): array for group, name, array in session.optimizer_state()}
    pieces = [(group, name, box) for group in STATE_GROUPS for name in params for box in boxes[name]]
    for (group, name, box), (got_group, got_name, piece) in zip(pieces, session.owned_state(), strict=True):
        assert (group, name) == (got_group, got_name)
        assert np.array_equal(cut(whole[group, name], box), piece)
    wanted = {name: array.astype(np.float32) for name, array in params_of(session.program).items()}
    assert all(np.array_equal(whole["master", name], array) for name, array in wanted.items())


# C148: ambient meshes


def ambient(kind: str) -> Any:
    """Another mesh than the session's, with a name of its axes among its own."""
    axes = (getattr(jax.sharding.AxisType, kind),) * 2
    return jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("tp", "other"), axis_types=axes))


def everything(path: Path, plan: str, mode: JaxMode, target: Path) -> tuple[Any, list[Any]]:
    """Loads, steps, saves, evaluates and decodes: shardings after loading, and what was made."""
    session = loaded(path, plan, mode)
    shardings = jax.tree.map(lambda x: x.sharding, session._state)
    batch = plan_batches(1)[0]
    made: list[Any] = [session.train_step([batch], LR)]
    write(session, target)
    made += [state_of(session), session.eval_loss(batch)]
    if session.mesh is None:
        made += [list(greedy(session, [1, 2], max_new_tokens=2))]
    session.check_invariants(batch)
    return shardings, made


@meshes
def test_c148_an_ambient_mesh_changes_nothing(plan: str, mode: JaxMode, tmp_path: Path) -> None:
    path = write(trained(small(), steps=0), tmp_path / "first")
    want = everything(path, plan, mode, tmp_path / "alone")
    for kind in ("Auto", "Explicit"):
        with ambient(kind):
            before = jax.sharding.get_abstract_mesh()
            got = everything(path, plan, mode, tmp_path / kind)
            assert jax.sharding.get_abstract_mesh() == before
        assert got == want
        files = [sorted(folder.glob("*.safetensors")) for folder in (tmp_path / "alone", tmp_path / kind)]
        assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


# C151: batch shapes


def batch_of(length: int, seed: int = 0, samples: int = 2, **more: Any) -> Batch:
    ids = np.random.default_rng(seed).integers(0, VOCAB, (samples, length + 1)).astype(np.int32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), **more)


LENGTHS = [int(length) for length in np.random.default_rng(1).integers(17, 65, 100)]


def test_c151_two_buckets_are_two_compilations() -> None:
    """100 batches of 17 to 64 tokens."""
    session = session_of(small(), length_buckets=(64, 32))
    session.init_optimizer(CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, length in enumerate(LENGTHS):
            session.train_step([batch_of(length, i)], LR)
    assert len(set(LENGTHS)) > 30
    assert session.functions.step(CONFIG)._cache_size() == 2
    assert session.length_buckets == (32, 64)


def packed(length: int) -> Batch:
    """Two documents in each sample, with positions of their own, and weights."""
    rows = np.arange(length)
    segments = np.stack([rows >= 7, rows >= 13]).astype(np.int32)
    positions = np.stack([np.where(row, rows - first, rows) for row, first in zip(segments, (7, 13), strict=True)])
    mask = np.random.default_rng(3).uniform(0.5, 2.0, (2, length)).astype(np.float32)
    return batch_of(length, loss_mask=mask, positions=positions.astype(np.int32), segment_ids=segments)


@pytest.mark.parametrize("plan", ["", "dp=2,tp=2,sequence_parallel"])
def test_c151_padding_changes_nothing(plan: str) -> None:
    """Loss, gradients, evaluation and logits are those of the reference on batches that nobody has padded; here, two
    micro-batches of unequal lengths."""
    session = session_of(small(window=9), plan, dtype="float64", length_buckets=(24, 32))
    data = [packed(21), batch_of(18)]
    reference = ReferenceModel(session.program, params_of(session.program))
    loss, grads = reference.loss_and_grads(data)
    got, made = session.loss_and_grads(data)
    assert abs(got - loss) <= bound("loss", "float64") * loss
    for name, grad in grads.items():
        error, _ = relative_error(grad, made[name], floor=gradient_floor(grads))
        assert error <= bound("gradient", "float64"), name
    for batch in data:
        total, weight = session.eval_loss(batch)
        want = reference.forward(batch)["loss.loss_sum"]
        assert abs(total - want) <= bound("loss", "float64") * want
        assert weight == batch.weights.sum(dtype=np.float64)
    logits = session.logits(data[1].tokens)
    want_logits = reference.forward(data[1])["head.logits"]
    assert relative_error(want_logits, logits)[0] <= bound("logits", "float64")
    session.init_optimizer(CONFIG)
    result = session.train_step(data, LR)
    assert abs(result.loss - loss) <= bound("loss", "float64") * loss
    assert result.num_targets == sum(batch.weights.sum(dtype=np.float64) for batch in data)


def test_c151_lengths_that_do_not_fit() -> None:
    session = session_of(small(), length_buckets=(32, 64))
    for call in (session.eval_loss, lambda batch: session.logits(batch.tokens)):
        with pytest.raises(BackendError, match=r"has 65 tokens .* length_buckets is 64"):
            call(batch_of(65))
    for lengths in ((0, 8), (8, 8)):
        with pytest.raises(BackendError, match=r"positive, and each given once"):
            JaxSession(build_program(small()), device="cpu", length_buckets=lengths)


def test_c151_many_shapes_are_reported_once() -> None:
    """After the third distinct shape of a pass, with how many compilations there were and what they took."""
    session, start = session_of(small()), perf_counter()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        session.logits(batch_of(21).tokens)
        for length in (17, 18, 17, 18):
            session.eval_loss(batch_of(length))
        assert not heard
        session.eval_loss(batch_of(19))
        [warning] = heard
        elapsed = perf_counter() - start
        session.eval_loss(batch_of(20))
        session.logits(batch_of(22).tokens)
        session.logits(batch_of(23).tokens)
    assert len(heard) == 1 and warning.category is DuomeshWarning
    text = str(warning.message)
    assert "eval_loss has met 3 shapes of batches, the last [2, 19]" in text and "length_buckets" in text
    assert "4 compilations so far" in text
    assert session._compilations.count == 7
    seconds = float(text.partition(" so far took ")[2].split()[0])
    assert 0 < seconds < elapsed


def test_c151_generation_compiles_a_few_times() -> None:
    """From 60 tokens to 140: for 64, 128 and 256, whatever buckets there are not, and then nobody is warned."""
    prompt = list(range(30)) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = session_of(small())
        made = list(greedy(session, prompt, max_new_tokens=80))
        assert session.functions.logits._cache_size() == 3
        session = session_of(small(), length_buckets=(72,))
        assert list(greedy(session, prompt, max_new_tokens=12)) == made[:12]
        assert session.functions.logits._cache_size() == 1


# C152: donation


def live_bytes() -> int:
    """Of distinct buffers: what an array is looked at through is an array, too."""
    held: dict[int, int] = {}
    for array in jax.live_arrays():
        for part in array.addressable_shards if not array.is_deleted() else ():
            with suppress(RuntimeError):  # one that looked at a buffer which was donated since
                held[part.data.unsafe_buffer_pointer()] = part.data.nbytes
    return sum(held.values())


def without_end(batch: Batch) -> Batch:
    """A batch whose loss is infinite."""
    mask = np.array(batch.weights)
    mask[0, -1] = np.inf
    return replace(batch, loss_mask=mask)


@meshes
def test_c152_a_step_donates_its_state(plan: str, mode: JaxMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer that cannot be used, and what lives when a step has run is one state and the batch: after a save, and
    after a step that was skipped, which changes no bit."""
    before = live_bytes()
    session = trained(small(), plan, mode, steps=0)
    get, lived = jax.device_get, []

    def watched(tree: Any) -> Any:
        lived.append(live_bytes() - before)
        return get(tree)

    monkeypatch.setattr(jax, "device_get", watched)
    state = sum(array.nbytes for array in jax.tree.leaves(session._state))
    batch = plan_batches(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            old = session._state.master["head.weight"]
            session.train_step([batch], LR)
            assert old.is_deleted()
            list(session.owned_state())
        kept = state_of(session)
        result = session.train_step([without_end(batch)], LR)
        assert result.is_skipped and state_of(session) == kept
        assert session.optimizer_step_count() == 3
        assert not session.train_step([batch], LR).is_skipped
    assert len(lived) == 5 and max(lived) < 1.2 * state
    assert session.functions.step(CONFIG)._cache_size() == 1


@meshes
def test_c152_a_step_that_is_stopped_leaves_no_deleted_arrays(plan: str, mode: JaxMode) -> None:
    """Stopped on its way out, after the state was overwritten: refused by name until something is loaded. Stopped
    before: nothing has happened."""
    session = trained(small(), plan, mode)
    call, kept, batch = session._call, state_of(session), plan_batches(1)[0]

    def stopped(*args: Any, **more: Any) -> None:
        if is_late:
            call(*args, **more)
        raise KeyboardInterrupt

    session._call = stopped
    for is_late in (False, True):
        with pytest.raises(KeyboardInterrupt):
            session.train_step([batch], LR)
        if not is_late:
            assert state_of(session) == kept
    session._call = call
    for use in (lambda: session.train_step([batch], LR), lambda: list(session.params()), lambda: state_of(session)):
        with pytest.raises(BackendError, match="a step was stopped while it overwrote"):
            use()
    session.load_params((name, array.astype("float32")) for name, array in params_of(session.program).items())
    session.init_optimizer(CONFIG)
    session.train_step([batch], LR)
    assert state_of(session) == kept


def test_state_is_read_while_its_stream_is_open() -> None:
    """Tensors of a file that is closed after the last one."""
    session, is_open = trained(small(), "dp=2,tp=2,zero=1"), [True]
    state = [*session.optimizer_state()]

    def deferred(array: Array) -> Deferred:
        def read(box: Box) -> Array:
            assert is_open[0]
            return array[slices(box)]

        return Deferred(array.shape, read)

    def stream() -> Iterator[tuple[str, str, Deferred]]:
        yield from ((group, name, deferred(array)) for group, name, array in state)
        is_open[0] = False

    want = state_of(session)
    other = session_of(small(), "tp=4")
    other.load_optimizer_state(CONFIG, 1, stream())
    assert state_of(other) == want


def test_micro_batches_with_and_without_segments_compile_once() -> None:
    session = session_of(small())
    plain, cut = plan_batches(2)
    cut = replace(cut, segment_ids=np.arange(cut.tokens.size, dtype=np.int32).reshape(cut.tokens.shape) // 5)
    session.loss_and_grads([plain, cut])
    assert session.functions.grads._cache_size() == 1


@meshes
def test_c152_a_save_that_has_begun_reads_what_it_was_given(plan: str, mode: JaxMode) -> None:
    """Steps in between change nothing of it, and nothing is read that a step has overwritten."""
    session = trained(small(), plan, mode)
    weights = {name: digest(array) for name, array in session.params()}
    want = [(group, name, digest(array)) for group, name, array in session.owned_state()]
    saves = [session.owned_state(), session.owned_state()]
    began = [next(saves[0])]
    params = session.params()
    for _ in range(2):
        session.train_step(plan_batches(1), LR)
    assert [(group, name, digest(array)) for group, name, array in [*began, *saves[0]]] == want
    assert [(group, name, digest(array)) for group, name, array in saves[1]] == want
    assert {name: digest(array) for name, array in params} == weights
    assert [(group, name, digest(array)) for group, name, array in session.owned_state()] != want
    assert session.functions.step(CONFIG)._cache_size() == 1


# C155: stacked layers


def numbered(spec: ModelSpec) -> dict[str, Array]:
    """Every array of layer i is i + random / 100, and 9 + random / 100 outside of layers."""
    rng, out = np.random.default_rng(4), {}
    for name, param in build_program(spec).params.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 9
        out[name] = (layer + rng.standard_normal(param.shape) / 100).astype(np.float32)
    return out


def hf_bytes(directory: Path, spec: ModelSpec, params: Iterator[tuple[str, Array]]) -> dict[str, str]:
    """A trip to Hugging Face and back."""
    export_hf(directory, spec, params)
    with HfCheckpoint(directory) as back:
        return {name: digest(array) for name, array in back.params()}


def unstacked(layers: Sequence[int]) -> tuple[Segment, ...]:
    return tuple(Segment(i, (kind,), 1) for i, kind in enumerate(layers))


def test_c155_stacking_is_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers in one array and one by one: the same bytes in, out, and by way of Hugging Face; the same logits."""
    [block, _] = small().blocks
    spec = model(*[block] * 4, vocab_size=VOCAB, hidden_size=16)
    given = numbered(spec)
    want = {name: digest(array) for name, array in given.items()}
    sessions = []
    for form in ("stacked", "unstacked"):
        if form == "unstacked":
            monkeypatch.setattr(stacks_module, "segments", unstacked)
        session = JaxSession(build_program(spec), device="cpu")
        session.load_params(given.items())
        assert {name: digest(array) for name, array in session.params()} == want
        assert hf_bytes(tmp_path / form, spec, session.params()) == want
        sessions.append(session)
    stacked, apart = sessions
    name = "segments.0.0.attention.q.weight"
    assert [session.stacks.stacks[name].lead for session in sessions] == [(4,), ()]
    assert stacked._params is not None and stacked._params[name][2].min() > 1  # layer 2 is the third
    apart.load_params(stacked.params())
    stacked.load_params(apart.params())
    assert {name: digest(array) for name, array in stacked.params()} == want
    tokens = batch_of(12).tokens
    error, _ = relative_error(stacked.logits(tokens), apart.logits(tokens))
    assert error <= bound("logits", "float32")


def test_c155_a_pattern_of_dense_layers_and_experts_is_stored_in_order() -> None:
    """D M D M. The backends refuse to run experts, so only what is stored is compared."""
    dense, _, mixed = EXPERT_MODELS["shared"].blocks
    dense = replace(dense, moe=None)
    spec = model(dense, mixed, dense, mixed, vocab_size=VOCAB)
    stacks = Stacks(shard(build_program(spec), Plan()).sharded, 0)
    assert [segment.pattern for segment in stacks.segments] == [(0, 1)]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    store = Store(stacks, dict.fromkeys(stacks.stacks, sharding))
    given = numbered(spec)
    stored = store.put(given.items(), np.dtype(np.float32))
    experts = stored["segments.0.1.moe.up.weight"]
    assert experts.shape[0] == 2 and [round(float(rows.mean())) for rows in experts] == [1, 3]
    back = dict(store.take(stored))
    assert {name: digest(array) for name, array in back.items()} == {n: digest(a) for n, a in given.items()}


# C156: padding without packing

# what attention does with its mask: torch's own causal one, a mask, scores written out
ATTENTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 4},
    "capped": {"softcap": 2.0},
    "capped window": {"window": 4, "softcap": 2.0},
    "norms over heads": {"qk_norm": NORM},
}


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("fields", ATTENTIONS.values(), ids=ATTENTIONS)
def test_c156_padding_is_never_attended(fields: dict[str, Any], backend: str) -> None:
    """10 tokens and 22 of padding, no segments: no bit of logits or gradients depends on what the padding is, and the
    logits are those of the 10 alone."""
    program = build_program(small(**fields))
    make: Callable[..., Any] = TorchSession if backend == "torch" else JaxSession
    session = make(program, compute_dtype="float64", device="cpu")
    session.load_params(params_of(program).items())
    batch, real = batch_of(32), 10
    labels = batch.labels.copy()
    labels[:, real - 1 :] = IGNORE
    made = []
    for padding in (batch.tokens[:, real:], np.zeros((2, 22), np.int32), np.full((2, 22), VOCAB - 1, np.int32)):
        tokens = np.concatenate([batch.tokens[:, :real], padding], axis=1)
        loss, grads = session.loss_and_grads([Batch(tokens, labels)])
        made.append((loss, grads, session.logits(tokens)[:, :real]))
    (loss, grads, logits), *others = made
    for other_loss, other_grads, other_logits in others:
        assert other_loss == loss and np.array_equal(other_logits, logits)
        assert all(np.array_equal(other_grads[name], grad) for name, grad in grads.items())
    alone = session.logits(np.ascontiguousarray(batch.tokens[:, :real]))
    assert relative_error(alone, logits)[0] <= bound("logits", "float64")
