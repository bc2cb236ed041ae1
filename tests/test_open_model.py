"""Opening a model where many ranks run it: each reads or draws its own slices, from whatever holds the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
from hf_dirs import write_safetensors
from rank_pool import RankPool
from sharding_cases import Array
from test_plan_checkpoint import LARGE, MIB, digest, kernel_bytes

import duomesh as dm
from duomesh.backends.torch.session import TorchSession
from duomesh.converters.hf.writer import export_hf
from duomesh.core import random
from duomesh.core.boxes import Sliceable, box_shape, cut, whole
from duomesh.core.checkpoint import write_checkpoint
from duomesh.core.errors import TensorFileError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.plan.plan import Plan
from duomesh.core.sharding.pieces import spans
from duomesh.core.spec.model import ModelSpec

SEED, PERTURB = 3, 0.3
KINDS = ("neutral", "hf", "hf with a tied head", "preset")
PLANS = ("tp=4", "tp=2,dp=2,zero=1,sequence_parallel", "dp=4,zero=3")


def spec_of(kind: str) -> ModelSpec:
    return replace(LARGE, tie_embeddings="tied" in kind)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | ModelSpec]:
    """What `open_model` is given for each kind; the weights are the same, in several files."""
    folder = tmp_path_factory.mktemp("models")

    def params(kind: str) -> Iterator[tuple[str, Array]]:
        return initial_params(build_program(spec_of(kind)), SEED, perturb=PERTURB)

    write_checkpoint(folder / "neutral", LARGE, (("params", *one) for one in params("neutral")), file_bytes=4 * MIB)
    export_hf(folder / "hf", LARGE, params("hf"), max_shard_bytes=4 * MIB)
    tied = folder / "hf with a tied head"
    export_hf(tied, spec_of(tied.name), params(tied.name))
    write_safetensors(tied / "head.safetensors", {"lm_head.weight": dict(params(tied.name))["embed.weight"]})
    assert all(len(list((folder / name).glob("*.safetensors"))) > 1 for name in KINDS[:3])
    return {**{name: folder / name for name in KINDS[:3]}, "preset": LARGE}


@dataclass(frozen=True)
class Loaded:
    """What a rank did to load weights, in bytes.

    params: digests. read: from files, by the kernel's count, or drawn. owned: its slices, without padding. embed: that
    of the embedding.
    """

    params: dict[str, str]
    read: int
    owned: int
    embed: int


def load(rank: int, world: int, given: Path | ModelSpec, spec: ModelSpec, plan: str) -> Loaded:
    session = dm.new_session(spec, backend="torch", device="cpu", plan=Plan.parse(plan))
    assert isinstance(session, TorchSession)
    load_once(session, given)  # modules are imported on the way
    read = load_once(session, given)
    owned = {
        span.name: 4 * sum(prod(box_shape(piece.box)) for piece in span.pieces)
        for span in spans(session.storage, session.groups.coordinate)
    }
    params = {name: digest(array) for name, array in session.params()}
    return Loaded(params, read, sum(owned.values()), owned.get("embed.weight", 0))


def load_once(session: TorchSession, given: Path | ModelSpec) -> int:
    """Bytes that were read from files or drawn."""
    made, draw_bits = [0], random._bits_of_runs

    def counted(seed: int, name: str, starts: Array, length: int) -> Array:
        made.append(4 * len(starts) * length)
        return draw_bits(seed, name, starts, length)

    def tensors() -> Iterator[tuple[str, Sliceable]]:
        before = kernel_bytes()
        yield from dm.open_model(given, seed=SEED, perturb=PERTURB).tensors()
        made.append(kernel_bytes() - before)  # now, since ranks that talk read too

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_bits_of_runs", counted)
        session.load_params(tensors())
    return sum(made)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_or_draws_its_slices_and_no_more_than_1_mib(
    ranks: RankPool, models: dict[str, Path | ModelSpec], kind: str, plan: str
) -> None:
    """Configuration, index, manifest and headers included. A tied head that is stored too is compared, by slices."""
    spec = spec_of(kind)
    program = build_program(spec)
    want = {name: digest(array) for name, array in initial_params(program, SEED, perturb=PERTURB)}
    for made in ranks.run(4, load, models[kind], spec, plan):
        assert made.params == want
        assert made.owned <= program.num_params + MIB  # a quarter, of four bytes each
        compared = made.embed if "tied" in kind else 0
        assert made.owned + compared <= made.read <= made.owned + compared + MIB


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_used_before_the_next_one(models: dict[str, Path | ModelSpec], kind: str) -> None:
    """The same bits by slices and whole, while the iterator is at it; a file that is closed is not read."""
    source = dm.open_model(models[kind], seed=SEED, perturb=PERTURB)
    for (name, tensor), (other, array) in zip(source.tensors(), source.params(), strict=True):
        box = tuple((size // 3, size - size // 4) for size in tensor.shape)
        part = cut(tensor, box)
        assert name == other and part.dtype == array.dtype
        assert part.tobytes() == array[tuple(slice(*side) for side in box)].tobytes(), name
    if kind.startswith("hf"):
        late = dict(source.tensors())
        with pytest.raises(TensorFileError, match=r"closed before model\.norm\.weight was read"):
            whole(late["head.norm.weight"])
