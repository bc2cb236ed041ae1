"""The neutral checkpoint: bit-equal, whole or not at all, and the newest whole one is found."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_session import tiny_spec

from duomesh.core.arrays import Array
from duomesh.core.boxes import Box, slices
from duomesh.core.checkpoint import (
    Checkpoint,
    TrainingState,
    checkpoint_path,
    find_latest,
    keep_last,
    write_checkpoint,
)
from duomesh.core.errors import BackendError, CheckpointError, DuomeshError, OutputError, SpecError
from duomesh.core.ir.build import build_program
from duomesh.core.session import STATE_GROUPS, AdamW, ComputeDType
from duomesh.core.tensorfile import TensorFile, TensorFileWriter

SPEC = tiny_spec(vocab_size=31, num_layers=2)
PARAMS = build_program(SPEC).params
State = list[tuple[str, str, Array]]


def training_state(dtype: ComputeDType = "float32", step: int = 40) -> TrainingState:
    return TrainingState(
        step=step,
        optimizer_step_count=step - 2,
        num_skipped=2,
        consumed_samples=8 * step,
        consumed_tokens=256 * step,
        data_fingerprint="f00",
        data_seed=3,
        model_seed=4,
        compute_dtype=dtype,
        optimizer=AdamW(max_grad_norm=None, eps=1e-9),
    )


def random_state(dtype: ComputeDType = "float32", seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    wide = np.float64 if dtype == "float64" else np.float32
    return [(g, n, rng.standard_normal(p.shape).astype(wide)) for g in STATE_GROUPS for n, p in PARAMS.items()]


def save(root: Path, step: int, **options: Any) -> Path:
    return write_checkpoint(
        checkpoint_path(root, step), SPEC, random_state(seed=step), training=training_state(step=step), **options
    )


def edit_manifest(path: Path, **changes: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("file_bytes", [1 << 30, 1000])
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: ComputeDType, file_bytes: int) -> None:
    state, config = random_state(dtype), {"optimizer": {"lr": 0.1, "betas": (0.9, 0.95)}}
    # any order is taken
    path = write_checkpoint(
        tmp_path / "c",
        SPEC,
        reversed(state),
        training=training_state(dtype),
        config=config,
        written_by="torch",
        file_bytes=file_bytes,
    )
    with Checkpoint(path) as read:
        assert (read.spec, read.training, read.written_by) == (SPEC, training_state(dtype), "torch")
        assert read.config == {"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
        got = list(read.optimizer_state())
        assert [(g, n) for g, n, _ in got] == [(g, n) for g, n, _ in state]
        for (group, name, want), (_, _, have) in zip(state, got, strict=True):
            assert have.dtype == want.dtype and have.tobytes() == want.tobytes(), (group, name)
        # weights are the master rounded to the run's dtype, and are stored nowhere
        kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
        master = {n: a.astype(kind) for g, n, a in state if g == "master"}
        params = dict(read.params())
        assert list(params) == list(PARAMS)
        assert all(params[n].dtype == master[n].dtype and params[n].tobytes() == master[n].tobytes() for n in PARAMS)
    files = sorted(file.name for file in path.iterdir())
    assert not any("params" in name for name in files)
    assert (len(files) > 4) == (file_bytes == 1000), files
    # they are ordinary safetensors files
    names = {n for file in files if file.startswith("master") for n in TensorFile(path / file).names}
    assert names == set(PARAMS)


def test_weights_alone_keep_their_dtypes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    kinds = [np.float32, ml_dtypes.bfloat16, np.float16]
    weights = {n: rng.standard_normal(p.shape).astype(kinds[i % 3]) for i, (n, p) in enumerate(PARAMS.items())}
    path = write_checkpoint(tmp_path / "c", SPEC, (("params", n, a) for n, a in weights.items()))
    read = Checkpoint(path)
    assert read.training is None and read.groups == ("params",)
    got = dict(read.params())
    assert all(got[n].dtype == a.dtype and got[n].tobytes() == a.tobytes() for n, a in weights.items())
    with pytest.raises(CheckpointError, match=r"without optimizer state.*model\.path"):
        next(read.optimizer_state())


@pytest.mark.parametrize("verify", [True, False])
def test_a_rectangle_is_read_from_all_slices_that_hold_it(tmp_path: Path, verify: bool) -> None:
    """A tensor in slices that have its own name in their files, as version 1 has it."""
    path = save(tmp_path, 40)
    whole = next(a for g, n, a in random_state(seed=40) if (g, n) == ("master", "head.weight"))  # [31, 6]
    manifest = json.loads((path / "manifest.json").read_text())
    entry = next(t for t in manifest["tensors"] if (t["group"], t["name"]) == ("master", "head.weight"))
    entry["shards"] = []
    for i, (row, column, cut) in enumerate(
        [(0, 0, whole[:10, :4]), (0, 4, whole[:10, 4:]), (10, 0, whole[10:, :4]), (10, 4, whole[10:, 4:])]
    ):
        from duomesh.core.checkpoint.write import checksum

        writer = TensorFileWriter(path / f"part-{i}.safetensors", 1000)
        writer.add("head.weight", cut)
        writer.close()
        entry["shards"].append(
            {"file": f"part-{i}.safetensors", "offset": [row, column], "shape": cut.shape, "checksum": checksum(cut)}
        )
    parts = [{"name": p.name, "num_bytes": p.stat().st_size} for p in sorted(path.glob("part-*"))]
    edit_manifest(path, version=1, tensors=manifest["tensors"], files=[*manifest["files"], *parts])
    read = Checkpoint(path, verify=verify)
    for box in [(0, 31)], [(3, 7)], [(9, 12)], [(10, 31)], [(5, 5)], [(0, 31), (3, 5)], [(9, 11), (4, 6)]:
        index = tuple(slice(*run) for run in box)
        assert read.read("master", "head.weight", box).tolist() == whole[index].tolist()
    with pytest.raises(CheckpointError, match="30:32"):
        read.read("master", "head.weight", [(30, 32)])


def test_a_changed_byte_is_found_and_named(tmp_path: Path) -> None:
    path = save(tmp_path, 40)
    file = path / "exp_avg-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"exp_avg-00001\.safetensors: exp_avg .* checksum"):
        list(Checkpoint(path).optimizer_state())
    assert len(list(Checkpoint(path, verify=False).optimizer_state())) == 3 * len(PARAMS)


def test_c107_missing_optimizer_state_is_an_error_never_a_reset(tmp_path: Path) -> None:
    def lacking() -> Iterator[tuple[str, str, Array]]:
        yield from ((g, n, a) for g, n, a in random_state() if (g, n) != ("exp_avg_sq", "embed.weight"))

    with pytest.raises(BackendError, match=r"exp_avg_sq embed\.weight"):
        write_checkpoint(tmp_path / "c", SPEC, lacking(), training=training_state())
    assert list(tmp_path.iterdir()) == []
    path = save(tmp_path, 40)
    tensors = json.loads((path / "manifest.json").read_text())["tensors"]
    edit_manifest(path, tensors=[t for t in tensors if (t["group"], t["name"]) != ("exp_avg_sq", "embed.weight")])
    with pytest.raises(CheckpointError, match=r"exp_avg_sq embed\.weight"):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"format": "other"}, CheckpointError, "does not describe a duomesh checkpoint"),
        ({"version": 3}, CheckpointError, "version 3; this release reads 1 and 2"),
        ({"spec": {}}, SpecError, "block_kinds"),
        ({"config": 3}, CheckpointError, "config"),
        ({"training": {"step": 1}}, CheckpointError, r"training lacks the field"),
        ({"tensors": [{"group": "master"}]}, CheckpointError, r"tensors\[0\] lacks"),
        ({"files": [{"name": "x", "num_bytes": 3}]}, CheckpointError, "x is missing"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, changes: dict[str, Any], error: type, match: str) -> None:
    path = save(tmp_path, 40)
    edit_manifest(path, **changes)
    with pytest.raises(error, match=match):
        Checkpoint(path)
    assert find_latest(tmp_path).latest is None


@pytest.mark.parametrize("change", ["none", "short", "twice", "outside"])
def test_slices_that_do_not_fill_a_tensor_are_named(tmp_path: Path, change: str) -> None:
    """Rows that no slice holds would be whatever the memory held."""
    path = save(tmp_path, 40)
    tensors = json.loads((path / "manifest.json").read_text())["tensors"]
    (shard,) = tensors[0]["shards"]
    rows = shard["shape"][0]
    tensors[0]["shards"] = {
        "none": [],
        "short": [{**shard, "shape": [rows - 1, *shard["shape"][1:]]}],
        "twice": [shard, shard],
        "outside": [{**shard, "offset": [1, *shard["offset"][1:]]}],
    }[change]
    edit_manifest(path, tensors=tensors)
    with pytest.raises(CheckpointError, match="do not fill its shape"):
        Checkpoint(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "duomesh-checkpoint", "version": 1}', "\udcff"])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Checkpoint(tmp_path)


# Which one counts


def test_c171_the_newest_complete_one_is_found_without_a_pointer(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent").latest is None
    assert find_latest(tmp_path).latest is None
    for step in (5, 100, 20):
        save(tmp_path, step)
    assert find_latest(tmp_path).latest == checkpoint_path(tmp_path, 100)
    assert find_latest(tmp_path).skipped == ()
    # an incomplete copy
    (checkpoint_path(tmp_path, 100) / "master-00001.safetensors").unlink()
    (tmp_path / "step-00000200").mkdir()
    found = find_latest(tmp_path)
    assert found.latest == checkpoint_path(tmp_path, 20)
    assert {path.name: why for path, why in found.skipped}.keys() == {"step-00000100", "step-00000200"}
    assert "master-00001.safetensors is missing" in dict(found.skipped)[checkpoint_path(tmp_path, 100)]


def test_c115_a_truncated_copy_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "exp_avg-00001.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-8])
    found = find_latest(tmp_path)
    assert found.latest == checkpoint_path(tmp_path, 1)
    assert f"exp_avg-00001.safetensors has {size - 8} bytes instead of {size}" in found.skipped[0][1]


def test_keep_last_counts_complete_ones_only(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    broken = checkpoint_path(tmp_path, 9)
    broken.mkdir()
    (tmp_path / "step-00000005.duomesh-tmp-x").mkdir()
    assert keep_last(tmp_path, 0) == [tmp_path / "step-00000005.duomesh-tmp-x"]
    keep_last(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004", "step-00000009"]


def test_an_existing_checkpoint_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, 40)
    with pytest.raises(OutputError, match="not empty"):
        save(tmp_path, 40)
    save(tmp_path, 40, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000040"]


_KILL = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from duomesh.core.checkpoint import Checkpoint, find_latest, keep_last
from duomesh.core.tensorfile import TensorFileWriter
import test_checkpoint as t

root = Path(sys.argv[1])
t.save(root, 1)

def child(point):
    count = 0
    def tick(*_):
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
    def hook(event, args):
        if event in ("open", "os.rename", "os.mkdir", "os.chmod") and str(root) in str(args[0]):
            tick()
    def ticking(f):
        return lambda *a: (tick(), f(*a))[1]
    os.fsync, TensorFileWriter.add = ticking(os.fsync), ticking(TensorFileWriter.add)
    sys.addaudithook(hook)
    t.save(root, 2, file_bytes=1000)
    print(count, flush=True)
    os._exit(0)

def kill_at(point):
    pid = os.fork()
    if pid == 0:
        child(point)
    status = os.waitpid(pid, 0)[1]
    found = find_latest(root)
    done = root / "step-00000002"
    assert found.latest == (done if done.exists() else root / "step-00000001"), (point, found)
    assert all("interrupted" in why for _, why in found.skipped), found
    list(Checkpoint(found.latest).optimizer_state())
    if done.exists() and status:  # killed after the rename: whole all the same
        shutil.rmtree(done)
    keep_last(root, 0)
    return status, len(found.skipped)

total = int(sys.argv[3])
if total == 0:
    print(kill_at(0), flush=True)
else:
    left_over = 0
    for point in sorted({1 + i * (total - 1) // 23 for i in range(24)}):
        status, skipped = kill_at(point)
        assert status == signal.SIGKILL, (point, status)
        left_over += skipped
    t.save(root, 2)  # the same step again
    print(left_over)
"""


def test_c115_killed_at_any_point_of_a_save_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    def saves(name: str, total: int) -> list[str]:
        command = [sys.executable, "-c", _KILL, str(tmp_path / name), str(Path(__file__).parent), str(total)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")

    total = int(saves("count", 0)[0])  # file operations of one save
    assert total > 100
    assert int(saves("kill", total)[0]) >= 20  # the kills did fall into the save
    assert sorted(p.name for p in (tmp_path / "kill").iterdir()) == ["step-00000001", "step-00000002"]


# Lack of space


def test_c117_lack_of_space_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    needed = 3 * 4 * sum(p.size for p in PARAMS.values())
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
    with pytest.raises(OutputError, match=rf"step-00000002: it needs {needed:,} bytes, and {needed - 1:,} are free"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
    save(tmp_path, 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_c117_a_save_that_fails_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 1)
    original, calls = TensorFileWriter.add, []

    def failing(self: TensorFileWriter, name: str, array: Array) -> None:
        calls.append(name)
        if len(calls) == 20:
            raise OSError(number, "injected")
        original(self, name, array)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFileWriter, "add", failing)
        match = "it needs .* bytes, and .* are free" if number == errno.ENOSPC else "injected"
        with pytest.raises(OutputError, match=rf"step-00000002.*{match}"):
            save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert len(list(Checkpoint(checkpoint_path(tmp_path, 1)).optimizer_state())) == 3 * len(PARAMS)
    save(tmp_path, 2)  # the same step again
    assert find_latest(tmp_path).latest == checkpoint_path(tmp_path, 2)


# Several ranks


class ThreadPeers:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, said: list[str], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(said)
        self._said, self._barrier = said, barrier

    def exchange(self, text: str) -> list[str]:
        self._barrier.wait()
        self._said[self.rank] = text
        self._barrier.wait()
        return list(self._said)


def on_ranks(world: int, function: Callable[[ThreadPeers], Any]) -> list[Any]:
    """function(peers) on every rank; results, or the errors that a user can act on, in order of rank."""
    said, barrier = [""] * world, threading.Barrier(world, timeout=20)

    def run(rank: int) -> Any:
        try:
            return function(ThreadPeers(rank, said, barrier))
        except DuomeshError as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def pieces_of(rank: int, shape: tuple[int, ...]) -> list[Box]:
    """Rank 0 has the first half of the rows, rank 1 of the rest the first half of the columns, rank 2 the others. Of a
    vector rank 1 has all of the rest."""
    half, *side = (size // 2 for size in shape)
    if not side:
        return [[((0, half),)], [((half, shape[0]),)], []][rank]
    columns = [(0, shape[1])], [(0, side[0])], [(side[0], shape[1])]
    return [((half, shape[0]) if rank else (0, half), run) for run in columns[rank]]


def save_on(peers: ThreadPeers, root: Path, step: int = 1, lacking: int | None = None, **options: Any) -> Path:
    boxes = {n: [] if peers.rank == lacking else pieces_of(peers.rank, p.shape) for n, p in PARAMS.items()}
    tensors = ((g, n, a[slices(box)]) for g, n, a in random_state(seed=step) for box in boxes[n])
    return write_checkpoint(
        checkpoint_path(root, step),
        SPEC,
        tensors,
        boxes=boxes,
        peers=peers,
        training=training_state(step=step),
        plan="tp=3",
        **options,
    )


@pytest.mark.parametrize("file_bytes", [1 << 30, 200])
def test_three_ranks_write_one_checkpoint(tmp_path: Path, file_bytes: int) -> None:
    assert (
        on_ranks(3, lambda peers: save_on(peers, tmp_path, file_bytes=file_bytes)) == [checkpoint_path(tmp_path, 1)] * 3
    )
    with Checkpoint(checkpoint_path(tmp_path, 1)) as read:
        assert read.plan == "tp=3"
        for (group, name, want), (_, _, got) in zip(random_state(seed=1), read.optimizer_state(), strict=True):
            assert got.dtype == want.dtype and got.tobytes() == want.tobytes(), (group, name)
    with Checkpoint(checkpoint_path(tmp_path, 1)) as read:
        # columns that rank 2 has, and a byte count that has nothing of the others
        wide = PARAMS["head.weight"].shape
        assert wide == (31, 6)
        read.read("master", "head.weight", [(15, 31), (3, 6)])
        assert [path.name[:16] for path in map(Path, read._files)] == ["master-rank00002"]
        header = next(iter(read._files.values()))._base
        assert read.num_bytes_read == header + 16 * 3 * 4


def test_what_a_rank_reads_whole_is_compared_with_its_checksum(tmp_path: Path) -> None:
    on_ranks(3, lambda peers: save_on(peers, tmp_path))
    path = checkpoint_path(tmp_path, 1)
    file = path / "exp_avg-rank00002-00001.safetensors"
    with TensorFile(file) as opened:
        (key,) = (name for name in opened.names if name.startswith("head.weight@"))
        place = opened._base + opened._entries[key].start
    data = bytearray(file.read_bytes())
    data[place] ^= 1  # row 15, column 3
    file.write_bytes(data)
    read = Checkpoint(path)
    for box in [(0, 31)], [(15, 31), (3, 6)], [(10, 31), (0, 6)]:
        with pytest.raises(CheckpointError, match=r"exp_avg head\.weight .* checksum"):
            read.read("exp_avg", "head.weight", box)
    read.read("exp_avg", "head.weight", [(0, 31), (0, 3)])


def test_c122_what_stops_one_rank_stops_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(3, lambda peers: save_on(peers, tmp_path))
    original = TensorFileWriter.add

    def failing(self: TensorFileWriter, name: str, array: Array) -> None:
        if "exp_avg-rank00002" in str(self._file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, name, array)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFileWriter, "add", failing)
        errors = on_ranks(3, lambda peers: save_on(peers, tmp_path, step=2))
    assert all(type(error) is OutputError and "step-00000002: it needs" in str(error) for error in errors)
    assert [str(error).startswith("rank 2: ") for error in errors] == [True, True, False]
    # rank 0 cannot begin
    errors = on_ranks(3, lambda peers: save_on(peers, tmp_path))
    assert all(type(error) is OutputError and "step-00000001 is not empty" in str(error) for error in errors)
    # rank 0 cannot publish
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "injected")))
        errors = on_ranks(3, lambda peers: save_on(peers, tmp_path, step=2))
    assert all(type(error) is OutputError and "injected" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert on_ranks(3, lambda peers: save_on(peers, tmp_path, step=2)) == [checkpoint_path(tmp_path, 2)] * 3


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_rank_that_gives_nothing_is_missed(tmp_path: Path, lacking: int) -> None:
    errors = on_ranks(3, lambda peers: save_on(peers, tmp_path, lacking=lacking))
    assert all("3 ranks gave" in str(error) and "do not make up its shape" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_see_another_file_system_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path.is_dir

    def elsewhere(path: Path) -> bool:
        return threading.current_thread().name != "blind" and there(path)

    def run(peers: ThreadPeers) -> Path:
        if peers.rank == 1:
            threading.current_thread().name = "blind"
        return save_on(peers, tmp_path)

    monkeypatch.setattr(Path, "is_dir", elsewhere)
    errors = on_ranks(3, run)
    assert all("All ranks must write to one file system" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []
