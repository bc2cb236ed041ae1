"""`duomesh explain MODEL --plan`: hand-checked numbers, JSON, speed on a large model, mistakes."""

from __future__ import annotations

import json
import time

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
    # gradients in fp32: what a rank holds of the parameters, once over dp
    per_rank: dict[str, int] = data["per_rank"]  # type: ignore[assignment]
    assert totals["dp all-reduce sync"]["bytes"] == per_rank["gradients"]
    norms = (2 * 32 + 1) * 4096
    split = (8_030_261_248 - norms) // 2
    assert per_rank == {
        "parameters": 2 * (split + norms),
        "gradients": 4 * (split + norms),
        "optimizer state": 12 * (split + norms),
    }
    assert totals["tp all-reduce sync"] == {"count": 65, "bytes": 4 * norms}
    states = {op["op"]: op["states"] for op in data["ops"] if op["program"] == "block0"}
    assert states["attention.o"] == {"dp": "S(batch)", "tp": "P"}
    assert states["attention_residual"] == {"dp": "S(batch)", "tp": "S(seq)"}


def test_micro_batches_repeat_passes_but_not_the_sum_of_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    one = explain(capsys, "tiny-llama3", "tp=2,dp=2")
    four = explain(capsys, "tiny-llama3", "tp=2,dp=2,micro_batches=4")
    pairs = list(zip(one["collectives"], four["collectives"], strict=True))
    assert pairs
    for a, b in pairs:
        assert b["count"] == a["count"] * (1 if a["phase"] == "sync" else 4)  # type: ignore[operator]


def test_405b_on_1024_ranks_takes_under_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    data = explain(capsys, "llama3.1-405b", "tp=8,dp=128,sequence_parallel,precision=bfloat16")
    assert time.monotonic() - began < 5
    assert data["mesh"] == {"dp": 128, "tp": 8}


def test_copies_of_kv_heads_have_an_axis(capsys: pytest.CaptureFixture[str]) -> None:
    """llama3-8b has 8 kv heads: tp=16 cuts them over 8 ranks and keeps two copies."""
    data = explain(capsys, "llama3-8b", "tp=16")
    assert data["mesh"] == {"tp": 8, "tp_copies": 2}
    layouts = {p["name"]: (p["layout"], p["reduction_axes"]) for p in data["parameters"]}
    assert layouts["layers.0.attention.q.weight"] == ({"tp": "S(kv_heads)", "tp_copies": "S(q_per_kv)"}, [])
    assert layouts["layers.0.attention.k.weight"] == ({"tp": "S(kv_heads)", "tp_copies": "R"}, ["tp_copies"])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tiny-qwen3", "--plan", "tp=2,sequence_parallel"]) == 0
    out = capsys.readouterr().out
    for words in ("mesh tp=2", "block0  x3", "attention.q_norm", "reduce-scatter block0.mlp.down", "summed over tp"):
        assert words in out, words
    assert main(["explain", "tiny-qwen3", "--plan", "tp=1"]) == 0
    assert "1 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["--plan", "tp=3,pp=2"], ["num_heads=32", "num_kv_heads=8", "ffn_size=14336", "pp is not built yet"]),
        (["--plan", "tpp=2"], ["tpp", "tp"]),
        (["--plan", "dp=2,zero=1"], ["zero=1", "not listed yet"]),
        (["--json"], ["needs --plan"]),
    ],
    ids=str,
)
def test_mistakes(words: list[str], sentences: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama3-8b", *words]) == 2
    error = capsys.readouterr().err
    assert all(sentence in error for sentence in sentences)
