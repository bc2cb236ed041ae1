"""Checkpoints of plans on real ranks: bit-equal under any other plan, piece by piece, and whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_session import FakeSession, tiny_spec
from plan_cases import CONFIG, LR, SEQ, plan_model
from rank_pool import RankError, RankPool
from sharding_cases import ALL, Array, sharded
from spec_cases import attention, model
from test_checkpoint import SPEC, ThreadPeers, on_ranks, random_state, training_state

from duomesh.backends.torch.arrays import to_array
from duomesh.backends.torch.debug import LargestTensor
from duomesh.backends.torch.peers import JobPeers
from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import IGNORE, Batch
from duomesh.core.bounds import bound
from duomesh.core.boxes import Box, Deferred, box_shape, tiles
from duomesh.core.checkpoint import Checkpoint, Found, checkpoint_path, find_latest, keep_last, write_checkpoint
from duomesh.core.errors import CheckpointError, DataError, OutputError
from duomesh.core.init import deferred_initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.session import STATE_GROUPS
from duomesh.core.sharding.local import local_param, stored_indices
from duomesh.core.sharding.pieces import spans
from duomesh.core.sharding.storage import Storage
from duomesh.core.spec.model import MlpSpec, ModelSpec
from duomesh.core.tensorfile import TensorFileWriter
from duomesh.core.training import resume as resume_module
from duomesh.core.training.config import RunConfig
from duomesh.core.training.console import Console
from duomesh.core.training.metrics import read_rows
from duomesh.core.training.model import Model
from duomesh.core.training.resolve import resolve
from duomesh.core.training.resume import find_start
from duomesh.core.training.run import Outcome, run_training
from duomesh.core.verify.compare import relative_error

SAVED = "tp=4,dp=2,zero=1"
# saved under, resumed under, ties
MOVES = [
    (SAVED, "dp=8,zero=3", False),
    (SAVED, "tp=2,sequence_parallel", False),
    (SAVED, "dp=4,zero=2,zero_shard=2", False),
    (SAVED, "", False),
    (SAVED, "dp=8,zero=3", True),
    (SAVED, "", True),
    ("", SAVED, True),
    ("dp=4,zero=3,zero_shard=2", "tp=4,dp=2", False),
    ("tp=8,sequence_parallel", "dp=2,zero=1", False),
]
STEPS = 3
# state that is much more than 1 MiB: 3 * 4 bytes * 3.4 million
LARGE = model(
    replace(attention(num_heads=8, num_kv_heads=2), mlp=MlpSpec(ffn_size=512, activation="silu", is_gated=True)),
    vocab_size=4099,
    hidden_size=256,
)
MIB = 1 << 20


# Which rectangles a rank owns


@pytest.mark.parametrize("case", ALL, ids="-".join)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranks_own_each_element_and_save_it_once(case: tuple[str, str], zero: int) -> None:
    """In every layout of the sharding tests, against the shard cut out of the whole, padded and flattened."""
    made = sharded(*case)
    storage, extents = Storage(made, zero), made.extents(batch=1, seq=1)
    whole = {n: np.random.default_rng(1).standard_normal(p.shape) for n, p in made.model.params.items()}
    saved: dict[str, list[Box]] = {name: [] for name in whole}
    for place in made.mesh.coordinates():
        coordinate = dict(zip(made.mesh.names, place, strict=True))
        for span in spans(storage, coordinate):
            param, layout = made.model.params[span.name], made.params[span.name, span.bucket.stage]
            part = whole[span.name][np.ix_(*stored_indices(param, layout, extents, coordinate))]
            shard = np.zeros(local_param(param, layout, extents).shape)
            shard[: len(part)] = part
            bucket = np.zeros(span.bucket.size)
            start = next(member.start for member in span.bucket.members if member.name == span.name)
            bucket[start : start + shard.size] = shard.reshape(-1)
            shared = [coordinate[axis] for axis in span.bucket.shared]
            index = np.ravel_multi_index(shared, [made.mesh.size(a) for a in span.bucket.shared]) if shared else 0
            mine = bucket.reshape(span.bucket.parts, -1)[index]
            assert np.array_equal(span.fill(whole[span.name]), mine[span.start : span.stop]), span
            if span.is_first:
                saved[span.name] += [piece.box for piece in span.pieces]
    assert all(tiles(boxes, whole[name].shape) for name, boxes in saved.items())


# Saving under one plan, resuming under another


@dataclass(frozen=True)
class Ran:
    """What a rank has after it saved or loaded, and after two more steps.

    state: digests, those of compute weights under "params". read: bytes, by our count and by the kernel's. files: those
    that are open. owned: bytes of its share of the state. largest: elements of the largest array or tensor that was
    made while it saved or loaded. padding: whether it is zero.
    """

    state: dict[tuple[str, str], str]
    count: int
    steps: list[tuple[float, float]]
    params: dict[str, Array]
    read: tuple[int, int] = (0, 0)
    files: tuple[str, ...] = ()
    owned: int = 0
    largest: int = 0
    padding: bool = False


def digest(array: Array) -> str:
    return hashlib.blake2b(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


def batch_of(spec: ModelSpec) -> Batch:
    """8 samples, so that 8 ranks can share them, with unequal numbers of targets."""
    ids = np.random.default_rng(2).integers(0, spec.vocab_size, (8, SEQ + 1)).astype(np.int32)
    labels = ids[:, 1:].copy()
    for sample in range(8):
        labels[sample, : 2 * sample] = IGNORE
    return Batch(np.ascontiguousarray(ids[:, :-1]), labels)


def new_session(plan: str, spec: ModelSpec, dtype: str) -> TorchSession:
    return TorchSession(
        build_program(spec),
        plan=Plan.parse(plan),
        compute_dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
    )


def trained(plan: str, spec: ModelSpec, dtype: str) -> TorchSession:
    session = new_session(plan, spec, dtype)
    session.init_optimizer(CONFIG, deferred_initial_params(session.program, 3, perturb=0.3))
    for _ in range(STEPS):
        session.train_step([batch_of(spec)], LR)
    return session


def go_on(session: TorchSession) -> tuple[list[tuple[float, float]], dict[str, Array]]:
    if session.program.spec == LARGE:
        return [], {}
    results = [session.train_step([batch_of(session.program.spec)], LR) for _ in range(2)]
    return [(result.loss, result.grad_norm) for result in results], dict(session.params())


def digests(session: TorchSession) -> dict[tuple[str, str], str]:
    if session.program.spec == LARGE:
        return {}  # gathering it takes longer than all the rest
    weights = {("params", name): digest(array) for name, array in session.params()}
    return {(group, name): digest(array) for group, name, array in session.optimizer_state()} | weights


def write(session: TorchSession, target: Path, peers: JobPeers) -> None:
    write_checkpoint(
        target,
        session.program.spec,
        session.owned_state(),
        boxes=session.owned_boxes(),
        peers=peers,
        training=replace(training_state(session.compute_dtype), optimizer_step_count=session.optimizer_step_count()),
        plan=str(session.plan),
    )


def save(rank: int, world: int, plan: str, spec: ModelSpec, dtype: str, target: Path) -> Ran:
    session, peers = trained(plan, spec, dtype), JobPeers()
    add, sizes = TensorFileWriter.add, [0]

    def watched(self: TensorFileWriter, name: str, array: Array) -> None:
        sizes.append((array if array.base is None else array.base).size)
        add(self, name, array)

    with pytest.MonkeyPatch.context() as patch, LargestTensor() as tensors:
        patch.setattr(TensorFileWriter, "add", watched)
        write(session, target, peers)
    state, count = digests(session), session.optimizer_step_count()
    return Ran(state, count, *go_on(session), largest=max(*sizes, tensors.elements))


def resume(rank: int, world: int, plan: str, spec: ModelSpec, dtype: str, source: Path) -> Ran:
    session = new_session(plan, spec, dtype)
    sizes = [0]

    def watched(tensor: Deferred) -> Deferred:
        def read(box: Box) -> Array:
            sizes.append(prod(box_shape(box)))
            return tensor.read(box)

        return Deferred(tensor.shape, read)

    with LargestTensor() as tensors:
        before = kernel_bytes()
        checkpoint = Checkpoint(source)
        state = ((group, name, watched(tensor)) for group, name, tensor in checkpoint.deferred_state())
        assert checkpoint.training is not None
        session.load_optimizer_state(CONFIG, checkpoint.training.optimizer_step_count, state)
        read = (checkpoint.num_bytes_read, kernel_bytes() - before)
    files = tuple(sorted(Path(path).name for path in open_files() if str(source) in path))
    buckets = sum(bucket.size // bucket.parts for bucket in session.storage.buckets)
    owned = buckets * len(STATE_GROUPS) * (8 if dtype == "float64" else 4)
    state_now, count, padding = digests(session), session.optimizer_step_count(), padding_is_zero(session)
    return Ran(state_now, count, *go_on(session), read, files, owned, max(*sizes, tensors.elements), padding)


def kernel_bytes() -> int:
    """What this process has read through system calls, by the kernel's count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def open_files() -> list[str]:
    return [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]


def padding_is_zero(session: TorchSession) -> bool:
    """Elements of a rank's ranges that are of no parameter's rows, in masters and moments."""
    if session.plan.world_size == 1:
        return True
    coordinate = session.groups.coordinate
    is_real = {bucket.name: np.zeros(bucket.size // bucket.parts, bool) for bucket in session.storage.buckets}
    for span in spans(session.storage, coordinate):
        for piece in span.pieces:
            piece.of(is_real[span.bucket.name][span.start : span.stop])[...] = True
    state = session._state.optimizer.state()
    return not any(to_array(mine)[~is_real[bucket.name]].any() for _, bucket, mine in state)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains and saves under a plan, once."""
    made: dict[Any, tuple[Path, list[Ran]]] = {}

    def get(plan: str, spec: ModelSpec, dtype: str = "float64") -> tuple[Path, list[Ran]]:
        key = (plan, dtype, spec)
        if key not in made:
            path = tmp_path_factory.mktemp("saved") / "checkpoint"
            made[key] = path, ranks.run(Plan.parse(plan).world_size, save, plan, spec, dtype, path)
        return made[key]

    return get


@pytest.mark.parametrize(("origin", "plan", "ties"), MOVES)
def test_c107_state_is_bit_equal_under_any_other_plan(
    ranks: RankPool, saved: Any, origin: str, plan: str, ties: bool
) -> None:
    """Masters, moments and step count to the bit; two further steps within the bounds of float64. The vocabulary of 37
    is padded to 40, 38 or not at all (C033)."""
    spec = plan_model(ties=ties)
    path, before = saved(origin, spec)
    for after in ranks.run(Plan.parse(plan).world_size, resume, plan, spec, "float64", path):
        assert after.state == before[0].state == stored(path, origin)
        assert after.count == before[0].count == STEPS
        assert after.padding
        for (want_loss, want_norm), (loss, norm) in zip(before[0].steps, after.steps, strict=True):
            assert abs(loss - want_loss) <= bound("loss", "float64") * want_loss
            assert abs(norm - want_norm) <= bound("global_norm", "float64") * want_norm
        for name, want in before[0].params.items():
            assert relative_error(want, after.params[name])[0] <= bound("updated_parameter", "float64"), name


def stored(path: Path, plan: str) -> dict[tuple[str, str], str]:
    """Digests of a checkpoint, read whole."""
    with Checkpoint(path) as checkpoint:
        assert checkpoint.plan == plan
        state = {(group, name): digest(array) for group, name, array in checkpoint.optimizer_state()}
        return state | {("params", name): digest(array) for name, array in checkpoint.params()}


def test_narrow_weights_are_rounded_from_masters(ranks: RankPool, saved: Any) -> None:
    spec = plan_model()
    path, before = saved(SAVED, spec, "bfloat16")
    for after in ranks.run(4, resume, "dp=4,zero=1", spec, "bfloat16", path):
        assert after.state == before[0].state == stored(path, SAVED)


@pytest.mark.parametrize(
    ("origin", "plan"),
    [(SAVED, "dp=8,zero=3"), (SAVED, "tp=4"), (SAVED, "tp=2,sequence_parallel"), ("dp=2,zero=3", "tp=4")],
)
def test_a_rank_reads_its_slices_and_no_more_than_1_mib(ranks: RankPool, saved: Any, origin: str, plan: str) -> None:
    """Bytes by the kernel's own count, manifest and headers included. No rank ever has a whole parameter. From rows to
    columns and from columns to rows."""
    path, before = saved(origin, LARGE, "float32")
    program = build_program(LARGE)
    total, full = 12 * program.num_params, max(param.size for param in program.params.values())
    assert total > 32 * MIB
    opened: set[str] = set()
    for after in ranks.run(Plan.parse(plan).world_size, resume, plan, LARGE, "float32", path):
        counted, read = after.read
        assert counted <= read <= after.owned + MIB
        assert after.owned <= total // Plan.parse(plan).world_size + MIB
        assert 0 < after.largest < full
        opened |= set(after.files)
    assert all(0 < ran.largest < full for ran in before)
    assert opened == {file.name for file in path.glob("*.safetensors")}


def test_files_that_hold_nothing_of_a_rank_stay_closed(ranks: RankPool, saved: Any) -> None:
    """Under the plan that it was saved by: its own, and those of the first rank that has a norm, or a kv head, too."""
    path, _ = saved(SAVED, LARGE, "float32")
    for rank, after in enumerate(ranks.run(8, resume, SAVED, LARGE, "float32", path)):
        owners = {int(name.split("-rank")[1][:5]) for name in after.files}
        assert rank in owners and owners <= {rank, rank // 4 * 4, rank // 2 * 2}


def test_what_reads_whole_tensors_reads_such_a_checkpoint(
    ranks: RankPool, saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The converter, generation and verification."""
    from duomesh.cli.main import main

    path, _ = saved(SAVED, LARGE, "float32")
    with Checkpoint(path) as checkpoint:
        want = {name: digest(array) for name, array in checkpoint.params()}
    assert main(["convert", str(path), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "neutral"]) == 0
    with Checkpoint(tmp_path / "back") as checkpoint:
        assert {name: digest(array) for name, array in checkpoint.params()} == want
    assert main(["generate", str(path), "--prompt", "ab", "--max-new-tokens", "2", "--tokenizer", "bytes"]) == 0
    assert main(["verify", str(path), "torch", "hf", "--seq", "8"]) == 0
    capsys.readouterr()


# Failures


def save_and_fail(rank: int, world: int, root: Path, how: str) -> str:
    """Two saves, of which the second fails on one rank."""
    session, peers = trained("tp=2", plan_model(), "float32"), JobPeers()
    write(session, checkpoint_path(root, 1), peers)
    add, exchange, rename = TensorFileWriter.add, JobPeers.exchange, Path.rename
    calls: list[str] = []

    def adding(self: TensorFileWriter, name: str, array: Array) -> None:
        calls.append(name)
        if rank == 1 and len(calls) == 20 and how in ("killed while it writes", "no space"):
            if how == "no space":
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, name, array)

    def exchanging(self: JobPeers, text: str) -> list[str]:
        if rank == 1 and calls and how == "killed when it has written":
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, text)

    def renaming(self: Path, target: Path) -> Path:
        if how == "killed before it publishes":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFileWriter, "add", adding)
        patch.setattr(JobPeers, "exchange", exchanging)
        patch.setattr(Path, "rename", renaming)
        try:
            write(session, checkpoint_path(root, 2), peers)
        except OutputError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("how", "culprit"),
    [("killed while it writes", 1), ("killed when it has written", 1), ("killed before it publishes", 0)],
)
def test_c115_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(
    ranks: RankPool, tmp_path: Path, how: str, culprit: int
) -> None:
    with pytest.raises(RankError, match=rf"rank {culprit} died \(SIGKILL\)"):
        ranks.run(2, save_and_fail, tmp_path, how)
    found = find_latest(tmp_path)
    assert found.latest == checkpoint_path(tmp_path, 1)
    # rank 0 cleans up, if it outlives the other
    assert {why for _, why in found.skipped} <= {"a save that was interrupted"} and (culprit or found.skipped)
    assert stored(checkpoint_path(tmp_path, 1), "tp=2")
    assert keep_last(tmp_path, 2) == [path for path, _ in found.skipped]


def test_c117_lack_of_space_on_one_rank_stops_all(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(2, save_and_fail, tmp_path, "no space")
    assert said[0] == f"rank 1: {said[1]}" and "step-00000002: it needs" in said[1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# Whole runs


def train(rank: int, world: int, folder: Path, settings: dict[str, str], signalled: int | None) -> tuple[Outcome, str]:
    """A run on every rank, and what it printed. signalled: the step in which rank 1 is told to stop."""
    spec = replace(plan_model(), vocab_size=259)
    program = build_program(spec)

    class Session(TorchSession):
        def train_step(self, *given: Any, **named: Any) -> Any:
            if rank == world - 1 and self.optimizer_step_count() + 1 == signalled:
                signal.raise_signal(signal.SIGTERM)
            return super().train_step(*given, **named)

    def make(made: ModelSpec, run: RunConfig) -> TorchSession:
        return Session(build_program(made), plan=run.full_plan, compute_dtype=run.dtype, device="cpu")

    defaults = {
        "model.preset": "tiny",
        "data.paths": str(folder / "text.txt"),
        "data.seq_len": "16",
        "optimizer.lr": "0.01",
        "train.steps": "6",
        "train.global_batch_size": "8",
        "train.micro_batch_size": "2",
        "train.dtype": "float64",
        "train.checkpoint_every": "2",
        "train.output": str(folder / "run"),
    }
    stream = io.StringIO()
    outcome = run_training(
        resolve(None, list({**defaults, **settings}.items())),
        lambda config: Model(spec, lambda: deferred_initial_params(program, config.train.seed)),
        make,
        Console(stream),
        JobPeers(),
    )
    return replace(outcome, seconds=0.0), stream.getvalue()


def test_a_run_goes_on_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    """Drawn by pieces, trained, stopped by a signal that one rank gets, and resumed: as one device that never stops."""
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes())
    ((whole, _),) = ranks.run(1, train, tmp_path, {"train.output": str(tmp_path / "whole")}, None)
    first = ranks.run(4, train, tmp_path, {"train.plan": "tp=2,dp=2,zero=1,sequence_parallel"}, 3)
    rest = ranks.run(4, train, tmp_path, {"train.plan": "dp=4,zero=3", "train.resume": "must"}, None)
    for made, step, number in ((first, 3, signal.SIGTERM), (rest, 6, None)):
        assert all(outcome == made[0][0] for outcome, _ in made)
        assert made[0][0].progress.step == step and made[0][0].signal == number
        assert "documents" in made[0][1].replace("document,", "documents,") and not any(text for _, text in made[1:])
    assert "resumed after step 3" in rest[0][1]
    rows, want = (read_rows(path / "metrics.jsonl") for path in (tmp_path / "run", whole.output))
    losses, wanted = ([row["loss"] for row in found if row["kind"] == "step"] for found in (rows, want))
    assert len(losses) == len(wanted) == 6
    for got, loss in zip(losses, wanted, strict=True):
        assert abs(got - loss) <= bound("loss", "float64") * loss
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    with Checkpoint(rest[0][0].checkpoint) as got, Checkpoint(whole.checkpoint) as one:
        assert got.plan.startswith("dp=4,zero=3") and one.plan.startswith("micro")
        for (name, value), (_, wanted_value) in zip(got.params(), one.params(), strict=True):
            assert relative_error(wanted_value, value)[0] <= bound("updated_parameter", "float64"), name


# What ranks agree on


def exchange(rank: int, world: int) -> list[list[str]]:
    peers = JobPeers()
    assert (peers.rank, peers.world_size) == (rank, world)
    texts = [["", "", ""], ["a", "", "Grüße\n" * 3], ["same"] * 3]
    return [peers.exchange(said[rank]) for said in texts]


def test_every_rank_hears_every_rank(ranks: RankPool) -> None:
    assert ranks.run(3, exchange) == [[["", "", ""], ["a", "", "Grüße\n" * 3], ["same"] * 3]] * 3


def test_c115_all_ranks_take_the_checkpoint_that_rank_0_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may look while a checkpoint is being published or removed."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        write_checkpoint(checkpoint_path(root, step), SPEC, random_state(), training=training_state(step=step))
    settings = [("data.paths", "x"), ("train.output", str(tmp_path)), ("train.resume", "must")]
    seen = {0: checkpoint_path(root, 1), 1: checkpoint_path(root, 2), 2: None}
    rank_of = threading.local()
    monkeypatch.setattr(resume_module, "find_latest", lambda root: Found(seen[rank_of.rank], ()))

    def start(peers: ThreadPeers) -> Any:
        rank_of.rank = peers.rank
        return find_start(resolve(None, settings), peers).checkpoint.path

    assert on_ranks(3, start) == [checkpoint_path(root, 1)] * 3
    # one of them cannot read it
    monkeypatch.setattr(resume_module, "Checkpoint", lambda path: Checkpoint(seen[rank_of.rank] or tmp_path))
    errors = on_ranks(3, start)
    assert all(type(error) is CheckpointError and "no complete checkpoint" in str(error) for error in errors)


@pytest.mark.parametrize("odd", ["text", "folder"])
def test_what_one_rank_cannot_do_stops_all(tmp_path: Path, odd: str) -> None:
    (tmp_path / "a").write_text("abc" * 500)
    (tmp_path / "b").write_text(("abd" if odd == "text" else "abc") * 500)
    settings = {"model.preset": "tiny", "data.seq_len": "16", "train.output": str(tmp_path / "run")}
    if odd == "folder":
        (tmp_path / "run").write_text("")  # rank 0 alone makes it

    def run(peers: ThreadPeers) -> Any:
        paths = [("data.paths", str(tmp_path / ("b" if peers.rank == 1 else "a")))]
        spec = tiny_spec()
        return run_training(
            resolve(None, [*settings.items(), *paths]),
            lambda config: Model(spec),
            lambda made, config: FakeSession(made),
            Console(io.StringIO()),
            peers,
        )

    errors = on_ranks(3, run)
    kind, said = {"text": (DataError, "rank 1 has read another text"), "folder": (OutputError, "cannot write")}[odd]
    assert all(type(error) is kind and said in str(error) for error in errors)
