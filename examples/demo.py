"""`make demo`: one model trains on two ranks of torch, then in JAX on a 2x2 mesh, is exported, and that is proved.

Every step is a `duomesh` command and is printed before it runs; nothing here could not be typed by hand.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).parent
RUN = Path("demo-run")
EXPORT = RUN / "hf"
STEPS = 600


def duomesh(*words: str) -> None:
    """Prints and runs one command; a failure ends the demo with its exit code."""
    print(
        f"\n\033[1m$ duomesh {shlex.join(words)}\033[0m" if sys.stdout.isatty() else f"\n$ duomesh {shlex.join(words)}"
    )
    sys.stdout.flush()
    code = subprocess.run([sys.executable, "-m", "duomesh.cli.main", *words], check=False).returncode
    if code:
        sys.exit(code)


def losses() -> dict[int, tuple[float, str]]:
    """Training loss and backend by step, from the run's record."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["backend"]) for row in rows if "grad_norm" in row}


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    config, half = str(HERE / "demo.toml"), str(STEPS // 2)
    data = "data.paths=" + sysconfig.get_path("stdlib")
    duomesh("train", config, data, "--backend", "torch", "--plan", "tp=2", "--stop-step", half)
    duomesh("train", config, data, "--backend", "jax", "--plan", "dp=2,tp=2", "--resume", "must")
    checkpoint = str(RUN / "checkpoints" / f"step-{STEPS:08d}")
    duomesh("convert", checkpoint, str(EXPORT))
    duomesh("verify", str(EXPORT), "hf", "torch", "jax", "--grads", "--json", str(RUN / "verify.json"))
    duomesh("generate", str(EXPORT), "--prompt", "def __init__(self", "--max-new-tokens", "100", "--backend", "jax")

    curve = losses()
    report = json.loads((RUN / "verify.json").read_text())
    first, last = curve[1], curve[STEPS]
    print(f"\ntrained    {STEPS} steps, loss {first[0]:.3f} on {first[1]} -> {last[0]:.3f} on {last[1]}")
    for pair in report["pairs"]:
        print(
            f"verified   {pair['side']} against {pair['reference']}: logits within {pair['logits_max_rel']:.1e}, "
            f"gradients within {pair['grads_max_rel']:.1e}"
        )
    print(f"export     {EXPORT} (transformers loads it)")
    print(f"report     {RUN / 'report.html'}")
    print(f"time       {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
