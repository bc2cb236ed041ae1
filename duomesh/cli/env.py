"""`duomesh env`: what is installed and which backends work here."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

__all__ = ["Args", "run"]

_PACKAGES = (
    "duomesh", "numpy", "ml_dtypes", "safetensors", "torch", "triton", "jax", "jaxlib", "flax", "optax",
    "transformers", "tokenizers", "flash-attn", "transformer-engine",
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Print versions, backends and devices."""


def _torch() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "not installed: pip install 'duomesh[torch]'"
    if not torch.cuda.is_available():
        return "works on cpu (torch finds no GPU)"
    return "works on " + ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _jax() -> str:
    try:
        import jax
    except ModuleNotFoundError:
        return "not installed: pip install 'duomesh[jax]'"
    return "works on " + ", ".join(f"{d.device_kind} ({d.platform})" for d in jax.devices())


def run(args: Args) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("python", platform.python_version())
    for name in _PACKAGES:
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "-")
    table.add_section()
    # the name of an extra, duomesh[jax], would be taken for markup
    table.add_row("backend torch", escape(_torch()))
    table.add_row("backend jax", escape(_jax()))
    Console().print(table)
    return 0
