"""Runs that move between the backends, and the same step on both, through the command that users run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from spec_cases import attention
from spec_cases import model as spec_of

import duomesh as dm
from duomesh.cli.main import main
from duomesh.core.bounds import bound
from duomesh.core.checkpoint import write_checkpoint
from duomesh.core.errors import BackendError
from duomesh.core.init import initial_params
from duomesh.core.ir.build import build_program
from duomesh.core.session import AdamW
from duomesh.core.spec.model import ModelSpec
from duomesh.core.verify.compare import gradient_floor, relative_error
from duomesh.core.verify.run import random_batch
from duomesh.sides import verify

TINY = ("tiny-llama3", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
STEPS, HALF = 40, 20


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some tens of kilobytes of text with something to learn: sums, written out."""
    folder = tmp_path_factory.mktemp("text")
    lines = [f"{a} plus {b} is {a + b}, and {b} times {a} is {a * b}.\n" for a in range(30) for b in range(20)]
    (folder / "sums.txt").write_text("".join(lines))
    return folder


def train(text: Path, output: Path, dtype: str, *words: str) -> None:
    settings = [
        f"data.paths={text}", "data.seq_len=32", "model.preset=tiny-llama3", f"train.steps={STEPS}",
        "train.global_batch_size=6", "train.micro_batch_size=3", "optimizer.lr=3e-3", "optimizer.warmup_steps=5",
        f"train.dtype={dtype}", "train.eval_batches=2", f"train.output={output}", "train.device=cpu",
    ]  # fmt: skip
    config = output.with_suffix(".toml")
    config.write_text("")
    assert main(["train", str(config), *settings, *words]) == 0


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    return [row["loss"] for row in steps]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_a_run_moves_between_backends(text: Path, tmp_path: Path, dtype: str, first: str, second: str) -> None:
    """20 steps on one backend and 20 on the other are the 40 steps of one, at every step."""
    train(text, tmp_path / "whole", dtype, "--backend", first)
    train(text, tmp_path / "moved", dtype, "--backend", first, "--stop-step", str(HALF))
    train(text, tmp_path / "moved", dtype, "--backend", second, "--resume", "must")
    whole, moved = losses(tmp_path / "whole"), losses(tmp_path / "moved")
    assert whole[:HALF] == moved[:HALF]
    assert whole[-1] < 0.9 * whole[0]
    for step, (a, b) in enumerate(zip(whole, moved, strict=True), 1):
        assert abs(a - b) <= bound("loss_curve", dtype) * abs(a), step


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_resuming_on_the_same_backend_is_exact(text: Path, tmp_path: Path, backend: str) -> None:
    """bf16 with an fp32 master: every loss after the resume is bit-equal to the uninterrupted run's."""
    train(text, tmp_path / "whole", "bfloat16", "--backend", backend)
    train(text, tmp_path / "cut", "bfloat16", "--backend", backend, "--stop-step", "13")
    train(text, tmp_path / "cut", "bfloat16", "--backend", backend, "--resume", "must")
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


@pytest.mark.parametrize("name", TINY)
def test_c157_both_backends_and_transformers_agree(name: str) -> None:
    """Every op, logits, loss and gradient in fp32 within the bounds; seq 64 is longer than the tiny window of 8."""
    report = verify(name, ["torch", "jax", "hf"], seq=64)
    assert [c.side for c in report.comparisons] == ["jax", "hf"]
    for comparison in report.comparisons:
        assert comparison.passed, comparison.first_difference
        assert len(comparison.rows) > 25
    pairs = json.loads(report.to_json())["pairs"]
    for pair in pairs:
        assert pair["logits_max_rel"] <= bound("logits", "float32", own_error=1.0)
        assert pair["grads_max_rel"] <= bound("gradient", "float32", own_error=1.0, across_frameworks=True)


# one difference each from D0, the plain decoder with grouped heads
DENSE = {
    "D0": spec_of(),
    "tied": spec_of(tie_embeddings=True),
    "qkv bias": spec_of(attention(q_bias=True, k_bias=True, v_bias=True)),
    "sliding window": spec_of(attention(window=4)),
}


@pytest.mark.parametrize("spec", DENSE.values(), ids=DENSE)
def test_c157_one_checkpoint_trains_the_same_on_both(spec: ModelSpec, tmp_path: Path) -> None:
    """fp32, from one canonical checkpoint: logits, gradients, and the losses of five AdamW steps. M0, the models with
    experts, are refused by both backends, as the next test shows."""
    program = build_program(spec)
    drawn = list(initial_params(program, 3, perturb=0.3))
    saved = write_checkpoint(tmp_path / "saved", spec, (("params", name, array) for name, array in drawn))
    batches = [random_batch(spec.vocab_size, batch=2, seq=12, seed=seed) for seed in range(5)]
    models = [dm.build(saved, backend=backend, device="cpu") for backend in ("torch", "jax")]
    (_, want), (_, got) = (made.loss_and_grads(batches[0]) for made in models)
    across = bound("gradient", "float32", own_error=1.0, across_frameworks=True)
    for name in want:
        assert relative_error(want[name], got[name], floor=gradient_floor(want))[0] <= across, name
    first, second = (made.logits(batches[0].tokens) for made in models)
    assert relative_error(first, second)[0] <= bound("logits", "float32", own_error=1.0)
    curves = []
    for made in models:
        made.session.init_optimizer(AdamW())
        curves.append([made.session.train_step([batch], 1e-2).loss for batch in batches])
    assert len({round(loss, 3) for loss in curves[0]}) == 5
    for a, b in zip(*curves, strict=True):
        assert abs(a - b) <= bound("loss_curve", "float32") * abs(a)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_c157_experts_are_refused(backend: str) -> None:
    with pytest.raises(BackendError, match=f"{backend} cannot run router, .* no experts"):
        dm.build("tiny-moe", backend=backend, device="cpu")


@pytest.mark.parametrize("name", TINY)
def test_same_seed_same_weights_on_both_backends(name: str) -> None:
    """Bit-equal initial weights, and a bf16 model holds them rounded."""
    on_torch, on_jax = (dm.build(name, backend=backend, seed=11, device="cpu") for backend in ("torch", "jax"))
    rounded = dict(dm.build(name, backend="jax", seed=11, dtype="bfloat16", device="cpu").params())
    for (n, a), (m, b) in zip(on_torch.params(), on_jax.params(), strict=True):
        assert n == m and a.tobytes() == b.tobytes()
        assert np.array_equal(a.astype(rounded[n].dtype), rounded[n])


def test_greedy_continuations_agree() -> None:
    prompts = [[1, 2, 3], list(range(60, 130))]
    models = [dm.build("tiny-qwen3", backend=backend, seed=5, device="cpu") for backend in ("torch", "jax")]
    for prompt in prompts:
        first, second = (model.generate(prompt, max_new_tokens=6) for model in models)
        assert first == second and len(first) == 6
    # each choice is the argmax of the logits after everything before it
    made = models[0].generate(prompts[0], max_new_tokens=6)
    again = models[0].logits(np.array([prompts[0] + made], np.int32))[0].argmax(-1)
    assert made == again[len(prompts[0]) - 1 : -1].tolist()
    assert models[0].generate(prompts[0], max_new_tokens=6, stop=[made[2]]) == made[:2]


def test_the_flax_module_is_the_same_model() -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model = dm.build("tiny-qwen2", backend="jax", seed=1, device="cpu")
    module = model.session.as_flax()  # type: ignore[attr-defined]
    ids = np.arange(20, dtype=np.int32).reshape(2, 10)
    assert relative_error(model.logits(ids), np.asarray(module(ids)))[0] <= bound("logits", "float32")

    def loss(flax_model: nnx.Module) -> jax.Array:
        log_probs = jax.nn.log_softmax(flax_model(ids)[:, :-1])  # type: ignore[operator]
        return -jnp.take_along_axis(log_probs, ids[:, 1:, None], -1).mean()

    labels = np.full_like(ids, dm.IGNORE)
    labels[:, :-1] = ids[:, 1:]
    want_loss, want = model.loss_and_grads(dm.Batch(ids, labels))
    got_loss, state = nnx.value_and_grad(loss)(module)
    assert abs(float(got_loss) - want_loss) <= bound("loss", "float32") * want_loss
    grads = {path[1]: param[...] for path, param in nnx.to_flat_state(state)}
    for name, grad in module.canonical(grads):
        error, _ = relative_error(want[name], grad, floor=gradient_floor(want))
        assert error <= bound("gradient", "float32", terms=20), name
