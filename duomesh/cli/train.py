"""`duomesh train CONFIG.toml [NAME=VALUE ...]`: trains as a TOML file says; the command line has the last word."""

from __future__ import annotations

import inspect
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from rich.markup import escape

from duomesh.api import new_session, open_model, simulate_devices
from duomesh.core.activity import doing
from duomesh.core.errors import BackendError, ConfigError, DuomeshError, DuomeshWarning
from duomesh.core.peers import Peers, together
from duomesh.core.session import Session
from duomesh.core.spec.model import ModelSpec
from duomesh.core.spec.presets import preset
from duomesh.core.training.begin import begin
from duomesh.core.training.config import RunConfig, TrainConfig
from duomesh.core.training.console import Console, duration
from duomesh.core.training.model import Model, change_spec
from duomesh.core.training.resolve import Resolved, resolve, values_of
from duomesh.core.training.resume import find_start
from duomesh.core.training.run import METRICS, Outcome, report_failure, run_training

__all__ = ["Args", "parse", "run"]

_USAGE = """usage: duomesh train CONFIG.toml [--check] [NAME=VALUE | --NAME VALUE ...]

Every setting of the file can be given on the command line by its dotted name:
    duomesh train run.toml optimizer.lr=1e-3 data.paths=a.txt,b.txt
A name without a dot belongs to [train]: --backend jax is train.backend=jax.

--check prints every value with its source and stops.

A plan of several ranks (train.plan=tp=2,dp=2) starts them on this host. On many hosts, or under a scheduler, let
torchrun start the same command on each: torchrun --nnodes 4 --nproc-per-node 8 -m duomesh.cli.main train run.toml

JAX drives all devices of a host from one process; a CPU simulates as many as the plan needs. Several processes, one on
each host, are started by you, each with the same settings and its place among them:
    duomesh train run.toml --backend jax --plan tp=4,dp=4 --coordinator HOST:PORT --num-processes 2 --process-id 0
HOST:PORT is of the process 0. --coordinator auto asks the scheduler (Slurm, MPI, Kubernetes, Cloud TPU) for all three.
"""

# Where a process is among others: no settings of a run, since each process has its own.
_PLACE = ("coordinator", "num_processes", "process_id")


@dataclass(frozen=True)
class Args:
    """What the command line says. overrides: (dotted name, text) in order. place: of this process, by `_PLACE`."""

    file: Path | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    place: Mapping[str, str] = field(default_factory=dict)
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
            name = name.replace("-", "_")
            if word.startswith("--") and name in _PLACE:
                out = replace(out, place={**out.place, name: text})
                continue
            if word.startswith("--") and "." not in name:
                name = f"train.{name}"
            out = replace(out, overrides=(*out.overrides, (name, text)))
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
    for section, entry in defaults.items():
        kind: Any = entry.default_factory
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
    return Model(source.spec, source.tensors)


def _make_session(spec: ModelSpec, run: RunConfig) -> Session:
    plan = run.full_plan
    return new_session(
        spec,
        backend=run.backend,
        dtype=run.dtype,
        device=run.device,
        compile=run.compile,
        plan=plan,
        remat=run.remat,
    )


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


def _summary(outcome: Outcome) -> str:
    progress = outcome.progress
    skipped = f", {progress.num_skipped} of them skipped" if progress.num_skipped else ""
    lines = [
        f"{progress.step:,} of {outcome.total_steps:,} steps{skipped}, {progress.consumed_tokens:,} tokens, "
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
    if args.is_check:
        _print_settings(_given(args))
        return 0
    outcome = _train_on_processes(args) if args.place else _train(args)
    if outcome is None:
        return 0  # rank 0 has said it
    print(_summary(outcome))
    return 128 + outcome.signal if outcome.signal else 0


def _given(args: Args) -> Resolved:
    resolved = resolve(args.file, args.overrides)
    _check_tokenizer(resolved)
    return resolved


def _settle(args: Args) -> Resolved:
    """The settings. A backend that is named nowhere is that of the checkpoint: what is to be started depends on it."""
    with doing("checking the settings"):
        resolved = _given(args)
        if resolved.sources["train.backend"] != "default":
            return resolved
        found = find_start(resolved).resolved
    train = replace(resolved.config.train, backend=found.config.train.backend)
    sources = {**resolved.sources, "train.backend": found.sources["train.backend"]}
    return Resolved(replace(resolved.config, train=train), sources)


def _withdraw(error: DuomeshError) -> None:
    """Other ranks, if this process is one of several, need not wait for it."""
    with suppress(ImportError):
        from duomesh.backends.torch.launch import withdraw

        withdraw(error)


def _train(args: Args) -> Outcome | None:
    """On this process, or on the ranks of the plan; None on a rank other than 0."""
    try:
        resolved = _settle(args)
    except DuomeshError as error:
        _withdraw(error)
        raise
    run = resolved.config.train
    world_size = run.full_plan.world_size
    if run.backend == "jax":
        simulate_devices(world_size)
        return run_training(resolved, _find_model, _make_session, Console())
    from duomesh.backends.torch.launch import Limits, is_launched, launch

    function, limits = "duomesh.cli.train:train_on_rank", Limits(stall_s=run.stall_s)
    if is_launched():
        return cast(Outcome | None, launch(world_size, function, resolved, device=run.device, limits=limits))
    if world_size == 1:
        return run_training(resolved, _find_model, _make_session, Console())
    began = time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuomeshWarning)  # rank 0 says it again
        beginning = begin(resolved, _find_model)  # no rank need start for what cannot run
    try:
        return cast(Outcome | None, launch(world_size, function, resolved, device=run.device, limits=limits))
    except DuomeshError as error:
        report_failure(beginning, error, began)
        raise


def train_on_rank(context: Any, resolved: Resolved) -> Outcome | None:
    """One rank's part of a run on torch."""
    from duomesh.backends.torch.peers import JobPeers

    return _train_among(JobPeers(), resolved)


def _train_among(peers: Peers, resolved: Resolved) -> Outcome | None:
    """This rank's part of a run; rank 0 alone speaks, and has an outcome."""
    console = Console()
    with warnings.catch_warnings():
        if peers.rank == 0:
            warnings.simplefilter("always", DuomeshWarning)
            warnings.showwarning = lambda message, *_, **__: console.note(f"warning: {message}")
        else:
            warnings.simplefilter("ignore", DuomeshWarning)
        outcome = run_training(resolved, _find_model, _make_session, console, peers)
    return None if peers.rank else outcome


def _train_on_processes(args: Args) -> Outcome | None:
    """This process's part of a run on several JAX processes. What is wrong with its settings, all of them learn."""
    try:
        from duomesh.backends.jax.processes import Processes, joined
    except ModuleNotFoundError as error:
        raise BackendError(f"--coordinator needs the package {error.name!r}: pip install 'duomesh[jax]'.") from error
    place = Processes(*_place(args.place))
    found = _settle_or_fail(args)
    devices = found.config.train.full_plan.world_size if isinstance(found, Resolved) else 1

    def settings(num_processes: int) -> Resolved:
        if isinstance(found, DuomeshError):
            raise found
        if found.config.train.backend != "jax":
            raise ConfigError("--coordinator joins processes of JAX; set --backend jax, or start torch with torchrun.")
        if devices % num_processes:
            raise ConfigError(f"a plan of {devices} devices cannot be shared by {num_processes} processes equally.")
        return found

    with joined(place, devices) as peers:
        return _train_among(peers, together(peers, lambda: settings(peers.world_size)))


def _settle_or_fail(args: Args) -> Resolved | DuomeshError:
    try:
        return _settle(args)
    except DuomeshError as error:
        return error


def _place(words: Mapping[str, str]) -> tuple[str, int | None, int | None]:
    """Coordinator, number of processes, index. Raises ConfigError."""
    wrong = [name for name in _PLACE[1:] if name in words and not words[name].isdecimal()]
    if "coordinator" not in words or wrong:
        name = f"--{(wrong or ['coordinator'])[0].replace('_', '-')}"
        raise ConfigError(f"{name} needs a {'number' if wrong else 'value'}; see duomesh train --help.")
    count, index = (int(words[name]) if name in words else None for name in _PLACE[1:])
    return words["coordinator"], count, index
