"""Plans on real ranks (gloo): values, gradients, norms and updates are those of one rank, and what the ranks issue is
what the sharded program lists."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from plan_cases import CONFIG, LR, VOCAB, plan_batches, plan_model, reference_steps
from plan_matrix import AXES, MATRIX, PlanCase, pairs_of
from plan_runs import Outcome, run_largest, run_plan, run_trace
from rank_pool import RankError, RankPool
from sharding_cases import COPIES, CP, DP, SP, assert_same_grads, mesh_of, params_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from duomesh.backends.torch.groups import Groups
from duomesh.backends.torch.lower import LoweredModel
from duomesh.backends.torch.session import TorchSession
from duomesh.core.batch import Batch
from duomesh.core.bounds import bound
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.sharding.program import shard_model
from duomesh.core.sharding.storage import Bucket
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.kernels.reference.model import ReferenceModel

CPU = torch.device("cpu")


@lru_cache
def reference(ties: bool, dropout: bool, micro_batches: int, over: str = "head") -> Any:
    return reference_steps(plan_model(ties=ties, dropout=dropout, over=over), micro_batches)


def test_the_matrix_shows_every_possible_pair() -> None:
    shown = set().union(*(pairs_of(case) for case in MATRIX))
    singles = {entry for pair in shown for entry in pair}
    assert singles == {(name, value) for name, values in AXES.items() for value in values}
    assert len(MATRIX) <= 24 and all(case.is_possible for case in MATRIX)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_a_plan_is_the_same_model(ranks: RankPool, case: PlanCase) -> None:
    """float64: loss 1e-12, gradients 1e-10, norm 1e-12, parameters after three updates 1e-9, on every rank; and the
    collectives are proved on every rank and step."""
    spec = plan_model(ties=case.ties, dropout=case.dropout)
    outcomes: list[Outcome] = ranks.run(case.world, run_plan, case.plan, spec, "float64")
    assert len(outcomes) == case.world
    loss, grads, history, params = reference(case.ties, case.dropout, case.micro_batches)
    for outcome in outcomes:
        assert outcome.differences == []
        assert bool(outcome.recorded) == (case.world > 1)
        assert abs(outcome.loss - loss) <= bound("loss", "float64") * abs(loss)
        assert outcome.steps == outcomes[0].steps  # every rank reports the same numbers, to the bit
        for (want_loss, want_norm), (got_loss, got_norm) in zip(history, outcome.steps, strict=True):
            assert abs(got_loss - want_loss) <= bound("loss", "float64") * abs(want_loss)
            assert abs(got_norm - want_norm) <= bound("global_norm", "float64") * want_norm
    first = outcomes[0]
    floor = gradient_floor(grads)
    for name, want in grads.items():
        assert relative_error(want, first.grads[name], floor=floor)[0] <= bound("gradient", "float64"), name
    for name, want in params.items():
        assert relative_error(want, first.params[name])[0] <= bound("updated_parameter", "float64"), name
        assert np.array_equal(first.state["master", name], first.params[name]), name
    assert all(np.array_equal(o.params[name], first.params[name]) for o in outcomes for name in params)


@pytest.mark.parametrize("plan", ["tp=4", "tp=2,dp=2,sequence_parallel,zero=1", "dp=4,zero=3"])
def test_a_plan_in_fp32(ranks: RankPool, plan: str) -> None:
    """Within four times the error that one rank has in fp32, or the caps for small models."""
    spec = plan_model()
    loss, grads, _, _ = reference(False, False, 1)
    (one,) = ranks.run(1, run_plan, "", spec, "float32")
    got = ranks.run(4, run_plan, plan, spec, "float32")[0]
    assert got.differences == []
    assert abs(got.loss - loss) <= bound("loss", "float32", own_error=abs(one.loss - loss) / loss) * loss
    floor = gradient_floor(grads)
    for name, want in grads.items():
        own = relative_error(want, one.grads[name], floor=floor)[0]
        error = relative_error(want, got.grads[name], floor=floor)[0]
        assert error <= bound("gradient", "float32", own_error=own), name


@pytest.mark.parametrize("plan", ["tp=2", "tp=4,sequence_parallel", "dp=2,tp=2", "dp=4,zero=3"])
@pytest.mark.parametrize("over", ["head", "all"])
def test_every_value_of_a_pass(ranks: RankPool, plan: str, over: str) -> None:
    """Joined over ranks, every op's output is that of one rank; what the types call equal is equal to the bit."""
    spec = plan_model(over=over)
    program = build_program(spec)
    want = ReferenceModel(program, params_of(program)).forward(plan_batches(1)[0])
    for got in ranks.run(4 if "4" in plan or "," in plan else 2, run_trace, plan, spec):
        assert list(got) == list(want)
        for name, value in want.items():
            assert relative_error(value, got[name])[0] <= bound("value", "float64"), name


def test_full_width_norms_under_tp(ranks: RankPool) -> None:
    spec = plan_model(over="all")
    loss, grads, _, _ = reference(False, False, 1, "all")
    outcome = ranks.run(4, run_plan, "tp=2,dp=2,sequence_parallel", spec, "float64")[0]
    assert outcome.differences == []
    assert abs(outcome.loss - loss) <= bound("loss", "float64") * loss
    assert_same_grads(outcome.grads, grads)


def test_kv_heads_in_copies_on_eight_ranks(ranks: RankPool) -> None:
    """Two kv heads over eight ranks: four copies of each, in one pack with the query heads."""
    spec = plan_model()
    loss, grads, _, _ = reference(False, False, 1)
    for outcome in ranks.run(8, run_plan, "tp=8,sequence_parallel", spec, "float64"):
        assert outcome.differences == []
        assert abs(outcome.loss - loss) <= bound("loss", "float64") * loss
        assert_same_grads(outcome.grads, grads)


def run_wrong(rank: int, world: int, plan: str, spec: Any) -> Outcome:
    """A rule broken on purpose: norm weights under sequence parallelism are not summed over tp."""
    right = Bucket.rest
    Bucket.rest = property(lambda bucket: ())  # type: ignore[method-assign,assignment]
    try:
        return run_plan(rank, world, plan, spec, "float64")
    finally:
        Bucket.rest = right  # type: ignore[method-assign]


def test_a_missing_sum_is_seen(ranks: RankPool) -> None:
    """The proof is no tautology: without one kind of sum gradients are wrong, and ranks drift apart."""
    spec = plan_model()
    _, grads, _, _ = reference(False, False, 1)
    with pytest.raises((AssertionError, RankError)):
        assert_same_grads(ranks.run(2, run_wrong, "tp=2,sequence_parallel", spec)[0].grads, grads)


@pytest.mark.parametrize("plan", ["tp=4", "tp=4,sequence_parallel", "tp=2,dp=2,zero=3"])
def test_no_rank_holds_whole_logits(ranks: RankPool, plan: str) -> None:
    """No tensor of a step is as large as its samples' logits, or than a bucket."""
    spec = plan_model()
    samples, seq = 4, 64
    for elements, op, bucket in ranks.run(4, run_largest, plan, spec, samples, seq):
        logits = samples * seq * VOCAB // (2 if "dp" in plan else 1)
        # scores of all heads of a rank are the largest activation of this small model
        scores = samples * seq * seq * 8 // 4
        assert elements < max(logits, bucket + 1, scores + 1), op


class LiveElements(TorchDispatchMode):
    """Keeps the largest number of elements that were alive at once of what forward and backward make, weights aside."""

    def __init__(self, session: TorchSession) -> None:
        super().__init__()
        self._stage = session.groups.stage
        self._weights = {parameter.untyped_storage()._cdata for parameter in session.model.parameters()}
        self._made: dict[int, StorageWeakRef] = {}
        self._size = torch.empty((), dtype=torch.float64).element_size()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._stage.name == "optimizer":
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._weights:
                storage = leaf.untyped_storage()
                self._made.setdefault(storage._cdata, StorageWeakRef(storage))
        del leaf
        self._made = {key: ref for key, ref in self._made.items() if not ref.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made.values()]
        self.most = max(self.most, sum(storage.nbytes() for storage in alive if storage is not None) // self._size)
        return out


def run_live(rank: int, world: int, plan: str, spec: Any) -> tuple[int, int, int]:
    """Most elements alive in a step, elements of all buckets, and of the largest."""
    program = build_program(spec)
    session = TorchSession(program, plan=Plan.parse(plan), compute_dtype="float64", device="cpu")
    session.load_params(params_of(program).items())
    session.init_optimizer(CONFIG)
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)  # few tokens: activations are small beside weights
    batch = Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))
    with LiveElements(session) as live:
        session.train_step([batch] * session.plan.resolved_micro_batches, LR)
    sizes = [bucket.size for bucket in session.storage.buckets]
    return live.most, sum(sizes), max(sizes)


@pytest.mark.parametrize("plan", ["dp=2,zero=2,micro_batches=2", "dp=2,zero=3,micro_batches=2"])
def test_a_rank_holds_its_ranges_of_gradients_and_few_more(ranks: RankPool, plan: str) -> None:
    """Ranges are added up behind backward: those of a later micro-batch do not wait for its end."""
    spec = replace(plan_model(repeats=12), hidden_size=128)
    for most, every, largest in ranks.run(2, run_live, plan, spec):
        assert most <= every // 2 + 8 * largest


def test_axes_of_size_one_leave_no_trace() -> None:
    """The source of a rank whose axes all have size 1 is that of one device: no movement, no copy, no autograd node."""
    program = build_program(plan_model())
    rules = [replace(DP, axis="dp_replicas"), DP, CP, SP, COPIES]
    meshes = (mesh_of([]), mesh_of([(rule, 1) for rule in rules]))
    plain, ones = (
        LoweredModel(shard_model(program, mesh, rules), Groups(mesh, [], CPU), torch.float32, CPU)
        for mesh, rules in meshes
    )
    for (_, one), (_, other) in zip(plain.steps, ones.steps, strict=True):
        assert one.source == other.source and not other.moves and not other.splits
        assert "reshard" not in one.source and "split" not in one.source
    assert [p.shape for p in plain.parameters()] == [p.shape for p in ones.parameters()]


def run_compiled(rank: int, world: int, plan: str, spec: Any) -> list[list[float]]:
    """Losses of two steps, eager and compiled."""
    out = []
    for compile in (False, True):
        session = TorchSession(build_program(spec), plan=Plan.parse(plan), device="cpu", compile=compile)
        session.load_params((n, a.astype(np.float32)) for n, a in params_of(session.program).items())
        session.init_optimizer(CONFIG)
        out.append([session.train_step(plan_batches(1), LR).loss for _ in range(2)])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2,sequence_parallel", "dp=2,zero=3"])
def test_compiled_ranks_learn_as_eager_ones(ranks: RankPool, plan: str) -> None:
    """Every program compiles as one graph, its collectives with it."""
    eager, compiled = ranks.run(2, run_compiled, plan, plan_model(), timeout_s=300)[0]
    assert eager[1] < eager[0]
    assert np.abs(np.subtract(eager, compiled)).max() <= bound("loss", "float32") * eager[0]
