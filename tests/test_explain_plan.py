"""`duomesh explain MODEL --plan`: hand-checked numbers, JSON, speed on a large model, mistakes."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from duomesh.cli.main import main


def explain(
    capsys: pytest.CaptureFixture[str], model: str, plan: str, *words: str
) -> dict[str, list[dict[str, object]]]:
    assert main(["explain", model, "--plan", plan, "--json", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"mesh", "ops", "collectives", "parameters", "totals", "per_rank"}
    return data  # type: ignore[no-any-return]


def test_llama3_8b_on_two_by_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Derived on paper: hidden 4096, 32 layers, sequence 8192, one sample a rank, bf16.

    A gathered stream is 8192 x 4096 x 2 bytes = 64 MiB. Each of 32 layers gathers it twice and scatters it twice
    forward, and the duals backward; the embedding scatters it once and the head gathers it once.
    """
    data = explain(capsys, "llama3-8b", "tp=2,dp=2,sequence_parallel,precision=bfloat16", "--seq", "8192")
    assert data["mesh"] == {"dp": 2, "tp": 2}
    totals: dict[str, dict[str, int]] = data["totals"]  # type: ignore[assignment]
    stream = 8192 * 4096 * 2
    for kind in ("all-gather", "reduce-scatter"):
        for phase in ("forward", "backward"):
            assert totals[f"tp {kind} {phase}"] == {"count": 65, "bytes": 65 * stream}, (kind, phase)
    assert totals["tp all-gather recompute"] == {"count": 65, "bytes": 65 * stream}
    # gradients in fp32: what a rank holds of the parameters, once over dp; those of norms over tp in the same sum
    per_rank: dict[str, int] = data["per_rank"]  # type: ignore[assignment]
    norms = (2 * 32 + 1) * 4096
    split = (8_030_261_248 - norms) // 2
    assert per_rank == {
        "parameters": 2 * (split + norms),
        "gradients": 4 * (split + norms),
        "optimizer state": 12 * (split + norms),
    }
    assert totals["dp all-reduce sync"] == {"count": 34, "bytes": 4 * split}
    assert totals["dp+tp all-reduce sync"] == {"count": 33, "bytes": 4 * norms}
    states = {op["op"]: op["states"] for op in data["ops"] if op["program"] == "block0"}
    assert states["attention.o"] == {"dp": "S(batch)", "tp": "P"}
    assert states["attention_residual"] == {"dp": "S(batch)", "tp": "S(seq)"}


def test_a_llama_block_with_sequence_parallelism_and_zero_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of docs/sharding.md, derived there on paper from Megatron's papers: hidden 4096, ffn 14336, 32 query and
    8 kv heads of 128, sequence 8192, one sample a rank."""
    data = explain(capsys, "llama3-8b", "tp=2,dp=2,sequence_parallel,zero=1,precision=bfloat16", "--seq", "8192")
    made = [
        (c["phase"], c["kind"], c["axis"], str(c["op"]).removeprefix("block0."), c["bytes"], c["count"])
        for c in data["collectives"]
        if str(c["op"]).startswith("block0.")
    ]
    stream = 8192 * 4096 * 2
    matrices = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) // 2  # elements of a layer on one of two tp ranks
    norms = 2 * 4096
    assert made == [
        ("forward", "all-gather", "tp", "attention_norm", stream, 32),
        ("forward", "reduce-scatter", "tp", "attention.o", stream, 32),
        ("forward", "all-gather", "tp", "mlp_norm", stream, 32),
        ("forward", "reduce-scatter", "tp", "mlp.down", stream, 32),
        ("backward", "all-gather", "tp", "mlp.down", stream, 32),
        ("recompute", "all-gather", "tp", "mlp_norm", stream, 32),
        ("backward", "reduce-scatter", "tp", "mlp_norm", stream, 32),
        ("backward", "all-gather", "tp", "attention.o", stream, 32),
        ("recompute", "all-gather", "tp", "attention_norm", stream, 32),
        ("backward", "reduce-scatter", "tp", "attention_norm", stream, 32),
        # gradients in fp32, then weights in bf16; the norms' gradients also over tp, each rank its half of them
        ("sync", "reduce-scatter", "dp", "bucket1", 4 * matrices, 32),
        ("sync", "reduce-scatter", "dp", "bucket0", 4 * norms, 32),
        ("sync", "all-reduce", "tp", "bucket0", 4 * norms // 2, 32),
        ("optimizer", "all-gather", "dp", "bucket0", 2 * norms, 32),
        ("optimizer", "all-gather", "dp", "bucket1", 2 * matrices, 32),
    ]
    per_rank: dict[str, int] = data["per_rank"]  # type: ignore[assignment]
    held = 32 * (matrices + norms) + 4096 + 128_256 * 4096  # embedding and head, half of each
    assert per_rank == {"parameters": 2 * held, "gradients": 4 * held, "optimizer state": 12 * held // 2}


def test_micro_batches_repeat_passes_but_not_the_sum_of_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    one = explain(capsys, "tiny-llama3", "tp=2,dp=2")
    four = explain(capsys, "tiny-llama3", "tp=2,dp=2,micro_batches=4")
    pairs = list(zip(one["collectives"], four["collectives"], strict=True))
    assert pairs
    for a, b in pairs:
        assert b["count"] == a["count"] * (1 if a["phase"] in ("sync", "norm") else 4)  # type: ignore[operator]


def test_405b_on_1024_ranks_takes_under_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    data = explain(capsys, "llama3.1-405b", "tp=8,dp=128,sequence_parallel,precision=bfloat16")
    assert time.monotonic() - began < 5
    assert data["mesh"] == {"dp": 128, "tp": 8}


def test_copies_of_kv_heads_have_an_axis(capsys: pytest.CaptureFixture[str]) -> None:
    """llama3-8b has 8 kv heads: tp=16 cuts them over 8 ranks and keeps two copies."""
    data = explain(capsys, "llama3-8b", "tp=16")
    assert data["mesh"] == {"tp": 8, "tp_copies": 2}
    layouts = {p["name"]: (p["compute"], p["reduction_axes"]) for p in data["parameters"]}
    assert layouts["layers.0.attention.q.weight"] == ({"tp": "S(kv_heads)", "tp_copies": "S(q_per_kv)"}, [])
    assert layouts["layers.0.attention.k.weight"] == ({"tp": "S(kv_heads)", "tp_copies": "R"}, ["tp_copies"])


@pytest.mark.parametrize(
    ("zero", "shares"),
    [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))],
)
def test_what_zero_shares(zero: int, shares: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, gradients, optimizer state: over how many ranks each is cut, but for the padding of buckets."""
    data = explain(capsys, "tiny-llama3", f"dp=4,zero={zero}" if zero else "dp=4")
    per_rank: dict[str, int] = data["per_rank"]  # type: ignore[assignment]
    whole = explain(capsys, "tiny-llama3", "dp=4")["per_rank"]
    for (name, size), parts in zip(list(per_rank.items())[:3], shares, strict=True):
        assert 0 <= size * parts - whole[name] < whole[name] / 100, name  # type: ignore[call-overload]
    assert ("parameters gathered at once" in per_rank) == (zero == 3)
    for p in data["parameters"]:
        flat = {"dp": "Flat(bucket0)"}
        assert (p["storage"] == flat, p["optimizer"] == flat) == (zero == 3, zero > 0)
        assert p["compute"] == {"dp": "R"} and p["reduction_axes"] == ["dp"]


def test_hybrid_shards_have_two_data_axes(capsys: pytest.CaptureFixture[str]) -> None:
    """State is shared within groups of two; between groups each rank's half of the gradients is summed."""
    data = explain(capsys, "tiny-llama3", "dp=8,zero=1,zero_shard=2")
    assert data["mesh"] == {"dp_replicas": 4, "dp": 2}
    sync = [(c["kind"], c["axis"], c["bytes"]) for c in data["collectives"] if c["phase"] == "sync"]
    assert sync[0][:2] == ("reduce-scatter", "dp") and sync[1] == ("all-reduce", "dp_replicas", sync[0][2] // 2)  # type: ignore[operator]


def test_experts_live_on_atoms(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans with ep are not built yet in the command; etp of tp is what a plan without ep means."""
    data = explain(capsys, "tiny-moe", "tp=2,dp=2,zero=1")
    assert data["mesh"] == {"dp.edp": 2, "tp.etp": 2}
    layouts = {p["name"]: p["compute"] for p in data["parameters"]}
    assert layouts["layers.0.moe.down.weight"] == {"dp.edp": "R", "tp.etp": "S(expert_ffn)"}


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tiny-qwen3", "--plan", "tp=2,sequence_parallel"]) == 0
    out = capsys.readouterr().out
    shown = ("mesh tp=2", "block0  x3", "attention.q_norm", "reduce-scatter block0.mlp.down", "summed over tp")
    for words in (
        *shown,
        "all-gather, again in backward / reduce-scatter",
        "token_loss                -> maximum on tp",
    ):
        assert words in out, words
    assert main(["explain", "tiny-qwen3", "--plan", "tp=1"]) == 0
    assert "1 ranks" in capsys.readouterr().out


def compiled(capsys: pytest.CaptureFixture[str], plan: str, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by kind and axis."""
    command = ["explain", "tiny-qwen3", "--plan", plan, "--seq", "16", "--compiled", "--device", "cpu", "--json"]
    assert main([*command, *words]) == 0
    return {(row["kind"], row["axis"]): row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,dp=2", "tp=2,dp=2,sequence_parallel,zero=1,micro_batches=2"])
def test_what_is_issued_is_what_is_listed(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp32, but for gathers of one value, which XLA makes once on a CPU where no scan is between them."""
    rows = compiled(capsys, plan)
    assert rows and ("all-reduce", "tp") in rows
    for (kind, _), row in rows.items():
        if kind == "all-gather":
            assert 0 < row["issued_count"] <= row["listed_count"], row
        else:
            assert row["issued_count"] == row["listed_count"] > 0, row
            assert row["issued_bytes"] == row["listed_bytes"] and not row["note"], row


def test_what_xla_issues_of_types_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "tiny-qwen3", "--plan", "tp=2,dp=2", "--seq", "16", "--compiled", "--mode", "explicit"]
    assert main([*words, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("collectives of a step") and re.search(r"^  all-reduce +tp ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["--plan", "tp=2", "--mode", "explicit"], ["give --compiled with them"]),
        (["--plan", "tp=2", "--device", "cpu"], ["give --compiled with them"]),
        (["--mode", "explicit"], ["give --compiled with them"]),
        (["--plan", "tp=2", "--compiled", "--picture", "x.svg"], ["leave out --json and --compiled, or --picture"]),
        (["--compiled"], ["--compiled shows layouts and needs --plan"]),
        (["--plan", "tp=two"], ["duomesh explain: plan: tp is 'two'"]),
        (["--plan", "tp=3,pp=2"], ["num_heads=32", "num_kv_heads=8", "ffn_size=14336", "pp is not built yet"]),
        (["--plan", "tpp=2"], ["tpp", "tp"]),
        (["--json"], ["needs --plan"]),
    ],
    ids=str,
)
def test_mistakes(words: list[str], sentences: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama3-8b", *words]) == 2
    error = capsys.readouterr().err
    assert all(sentence in error for sentence in sentences)
