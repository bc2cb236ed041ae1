"""The pool of ranks that tests use: results in order, and errors that name the rank and what it was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool

from duomesh.core.activity import doing


def add_up(rank: int, world: int, offset: int) -> tuple[int, int, np.ndarray]:
    x = torch.arange(3.0) * 2**rank + offset
    dist.all_reduce(x)
    return os.getpid(), torch.get_num_threads(), x.numpy() * (rank + 1)


def raise_on(rank: int, world: int, culprit: int) -> None:
    doing("step 2")
    with doing("step 3, forward"):
        if rank == culprit:
            raise ValueError("boom")
        dist.barrier()


def kill(rank: int, world: int, culprit: int) -> None:
    doing("step 4, backward")
    if rank == culprit:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def oversleep(rank: int, world: int, culprit: int, meet: bool) -> None:
    doing("step 5")
    if rank == culprit:
        time.sleep(1000)
    if meet:
        doing("step 6")
        dist.barrier()


def skip_a_barrier(rank: int, world: int, culprit: int) -> None:
    doing("step 7")
    if rank != culprit:
        dist.barrier()


def die_while_idle(rank: int, world: int) -> None:
    if rank == 1:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def check_pool(ranks: RankPool, world: int) -> list[int]:
    """The processes of a case that works."""
    pids, threads, values = zip(*ranks.run(world, add_up, 1), strict=True)
    assert len(set(pids)) == world and set(threads) == {1}
    one = np.arange(3.0) * (2**world - 1) + world
    np.testing.assert_array_equal(values, [one * (rank + 1) for rank in range(world)])
    return list(pids)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_results_come_by_rank_from_processes_that_stay(ranks: RankPool, world: int) -> None:
    assert check_pool(ranks, world) == check_pool(ranks, world)
    assert os.getpid() not in check_pool(ranks, world)


@pytest.mark.slow
def test_sixteen_ranks(ranks: RankPool) -> None:
    check_pool(ranks, 16)


def test_a_case_is_quick(ranks: RankPool) -> None:
    """Starting processes anew, or importing torch in each, takes seconds."""
    check_pool(ranks, 4)
    begin = time.monotonic()
    for _ in range(5):
        check_pool(ranks, 4)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_an_exception_names_its_rank(ranks: RankPool, culprit: int) -> None:
    """The other ranks raise too, because their barrier breaks; the first one counts."""
    pids = check_pool(ranks, 4)
    with pytest.raises(RankError) as failure:
        ranks.run(4, raise_on, culprit)
    text = str(failure.value)
    assert text.startswith(f'rank {culprit} raised first, during "step 3, forward":\nTraceback')
    assert "in raise_on" in text and "ValueError: boom" in text
    assert check_pool(ranks, 4) == pids


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_rank_is_named(ranks: RankPool, culprit: int) -> None:
    pids = check_pool(ranks, 3)
    with pytest.raises(RankError, match=f'^rank {culprit} died \\(SIGKILL\\) during "step 4, backward"'):
        ranks.run(3, kill, culprit)
    assert not set(check_pool(ranks, 3)) & set(pids)


@pytest.mark.parametrize("meet", [False, True])
def test_a_hung_rank_is_named_with_its_stack(ranks: RankPool, meet: bool) -> None:
    """Those that wait for it in a collective are named too, and only they."""
    pids = check_pool(ranks, 3)
    with pytest.raises(RankError) as failure:
        ranks.run(3, oversleep, 1, meet, timeout_s=1)
    text = str(failure.value)
    assert 'rank 1 did not answer within 1 s, during "step 5"' in text and "in oversleep" in text
    assert ('rank 0 did not answer within 1 s, during "step 6"' in text) == meet
    assert ("in barrier" in text) == ("rank 2 did not answer" in text) == meet
    assert not set(check_pool(ranks, 3)) & set(pids)


def test_a_rank_that_returns_early_is_named(ranks: RankPool) -> None:
    """The others' collective breaks at once, not at the time-out."""
    with pytest.raises(RankError) as failure:
        ranks.run(3, skip_a_barrier, 2)
    text = str(failure.value)
    assert 'raised first, during "step 7"' in text and text.endswith("\n\nreturned: rank 2")
    check_pool(ranks, 3)


def test_a_rank_that_dies_between_cases_is_named(ranks: RankPool) -> None:
    ranks.run(2, die_while_idle)
    time.sleep(0.5)
    with pytest.raises(RankError, match=r"^rank 1 died \(SIGKILL\)"):
        check_pool(ranks, 2)
    check_pool(ranks, 2)


def test_what_cannot_be_sent_is_an_error_of_the_test(ranks: RankPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        ranks.run(2, lambda rank, world: rank)
    check_pool(ranks, 2)


@pytest.mark.slow
def test_two_test_processes_have_pools_of_their_own(tmp_path: Path) -> None:
    """Two workers of pytest-xdist at a time, 4 ranks each."""
    here = Path(__file__).resolve()
    (tmp_path / "conftest.py").write_text((here.parent / "conftest.py").read_text())
    (tmp_path / "test_inner.py").write_text(
        "import pytest\nfrom test_rank_pool import check_pool\n\n\n"
        "@pytest.mark.parametrize('case', range(6))\n"
        "def test_one(ranks, case, worker_id, record_property):\n"
        "    check_pool(ranks, 4)\n    print('ran on', worker_id)\n"
    )
    words = ["-m", "pytest", "-n", "2", "--dist", "load", "-rP", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(here.parent)},
    )
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr
    assert "ran on gw0" in done.stdout and "ran on gw1" in done.stdout
