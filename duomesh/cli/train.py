"""`duomesh train CONFIG.toml [NAME=VALUE ...]`: trains as a TOML file says; the command line has the last word."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from rich.markup import escape

from duomesh.api import new_session, open_model
from duomesh.core.errors import ConfigError
from duomesh.core.plan.validate import check
from duomesh.core.session import Session
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.presets import preset
from duomesh.core.training.config import RunConfig, TrainConfig
from duomesh.core.training.console import Console, duration
from duomesh.core.training.model import Model, change_spec
from duomesh.core.training.resolve import Resolved, resolve, values_of
from duomesh.core.training.run import METRICS, Outcome, run_training

__all__ = ["Args", "parse", "run"]

_USAGE = """usage: duomesh train CONFIG.toml [--check] [NAME=VALUE | --NAME VALUE ...]

Every setting of the file can be given on the command line by its dotted name:
    duomesh train run.toml optimizer.lr=1e-3 data.paths=a.txt,b.txt
A name without a dot belongs to [train]: --backend jax is train.backend=jax.

--check prints every value with its source and stops.

A plan of several ranks (train.plan=tp=2,dp=2) starts them on this host. On many hosts, or under a scheduler, let
torchrun start the same command on each: torchrun --nnodes 4 --nproc-per-node 8 -m duomesh.cli.main train run.toml
"""


@dataclass(frozen=True)
class Args:
    """What the command line says. overrides: (dotted name, text) in order."""

    file: Path | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    is_check: bool = False
    is_help: bool = False


def parse(words: Sequence[str]) -> Args:
    """Splits the words of the command line; names and values are checked by `resolve`. Raises ConfigError."""
    out = Args()
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("-h", "--help"):
            return Args(is_help=True)
        if word == "--check":
            out = replace(out, is_check=True)
        elif word.startswith("--") or "=" in word:
            name, equals, text = word.removeprefix("--").partition("=")
            if not equals:
                if not left:
                    raise ConfigError(f"{word} needs a value, as in {word}=VALUE.")
                text = left.pop(0)
            if word.startswith("--") and "." not in name:
                name = f"train.{name}"
            out = replace(out, overrides=(*out.overrides, (name.replace("-", "_"), text)))
        elif out.file is None:
            out = replace(out, file=Path(word))
        else:
            raise ConfigError(f"{word!r} is a second file. Write settings as NAME=VALUE; --help says more.")
    if out.file is None:
        raise ConfigError("a configuration file is needed: duomesh train CONFIG.toml. --help says more.")
    return out


def _help() -> str:
    """The usage, then every setting with its default and the comment beside its field."""
    lines = [_USAGE]
    defaults = TrainConfig.__dataclass_fields__
    for section, field in defaults.items():
        kind: Any = field.default_factory
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE))
        lines.append(f"[{section}]")
        for setting in fields(kind):
            lines.append(f"  {setting.name:20} {_show(setting.default):10} {comments.get(setting.name, '')}".rstrip())
    return "\n".join(lines)


def _show(value: object) -> str:
    if value is None or value == ():
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _find_model(config: TrainConfig) -> Model:
    """The model of [model]; a preset's weights are drawn from train.seed."""
    if config.model.path is not None:
        source = open_model(Path(config.model.path).expanduser())
    else:
        spec = preset(str(config.model.preset))
        source = open_model(change_spec(spec, config.model), seed=config.train.seed)
    return Model(source.spec, source.params)


def _make_session(spec: ModelSpec, run: RunConfig) -> Session:
    plan = run.full_plan
    return new_session(spec, backend=run.backend, dtype=run.dtype, device=run.device, compile=run.compile, plan=plan)


def _check_tokenizer(resolved: Resolved) -> None:
    """Weights that were trained with a tokenizer are not silently fed bytes."""
    folder = resolved.config.model.path
    if folder is None or resolved.sources["data.tokenizer"] != "default":
        return
    if (Path(folder).expanduser() / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has a tokenizer of its own. Set data.tokenizer={folder} to use it, or data.tokenizer=bytes."
        )


def _print_settings(resolved: Resolved) -> None:
    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table("setting", "value", "source", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, value in values_of(resolved.config).items():
        source = resolved.sources[name]
        table.add_row(name, escape(_show(value)), source, style="dim" if source == "default" else None)
    RichConsole().print(table)


def _summary(outcome: Outcome, total: int) -> str:
    progress = outcome.progress
    skipped = f", {progress.num_skipped} of them skipped" if progress.num_skipped else ""
    lines = [
        f"{progress.step:,} of {total:,} steps{skipped}, {progress.consumed_tokens:,} tokens, "
        f"{duration(outcome.seconds)} in this run",
        f"checkpoint  {outcome.checkpoint or 'none'}",
        f"metrics     {outcome.output / METRICS}",
        f"report      {outcome.report}",
    ]
    return "\n".join(lines)


def run(args: Args) -> int:
    """0 when the run reached its last step; 128 + the signal when one ended it after saving."""
    if args.is_help:
        print(_help())
        return 0
    resolved = resolve(args.file, args.overrides)
    _check_tokenizer(resolved)
    if args.is_check:
        _print_settings(resolved)
        return 0
    outcome = _train(resolved, args)
    if outcome is None:
        return 0  # rank 0 has said it
    print(_summary(outcome, resolved.config.train.steps))
    return 128 + outcome.signal if outcome.signal else 0


def _train(resolved: Resolved, args: Args) -> Outcome | None:
    """On this process, or on the ranks of the plan; None on a rank other than 0."""
    run = resolved.config.train
    world_size = run.full_plan.world_size
    if world_size == 1:
        return run_training(resolved, _find_model, _make_session, Console())
    if run.backend != "torch":
        raise ConfigError(f"train.plan={run.plan} has {world_size} ranks; {run.backend} cannot run on them yet.")
    if resolved.config.model.preset is not None:  # no rank need start for a plan that does not fit
        check(_find_model(resolved.config).spec, run.full_plan, seq=resolved.config.data.seq_len)
    from duomesh.backends.torch.launch import launch

    made = launch(world_size, "duomesh.cli.train:train_on_rank", args, device=run.device)
    return cast(Outcome | None, made)


def train_on_rank(context: Any, args: Args) -> Outcome | None:
    """One rank's part of a run."""
    from duomesh.backends.torch.peers import JobPeers

    resolved = resolve(args.file, args.overrides)
    outcome = run_training(resolved, _find_model, _make_session, Console(), JobPeers())
    return outcome if context.rank == 0 else None
