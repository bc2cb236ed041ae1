"""A whole run: settings -> start, text, model, session -> loop -> report.

Which directories can be read and which backends exist is not known here: a caller passes functions for both.
On several ranks all go through it alike; rank 0 alone speaks, keeps the record and writes the report.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from duomesh.core.activity import doing
from duomesh.core.data.corpus import Corpus, find_files, read_corpus
from duomesh.core.data.sampler import Sampler
from duomesh.core.data.tokenizer import Tokenizer, check_rows, load_tokenizer
from duomesh.core.errors import DataError, DuomeshError, OutputError
from duomesh.core.ir.build import build_program
from duomesh.core.peers import ALONE, Peers, together
from duomesh.core.plan.plan import Plan
from duomesh.core.session import Session
from duomesh.core.spec.model import ModelSpec
from duomesh.core.training.begin import Beginning, FindModel, begin
from duomesh.core.training.config import RunConfig, TrainConfig
from duomesh.core.training.console import Console
from duomesh.core.training.interrupt import Interrupt
from duomesh.core.training.loop import Progress, TrainingData, train
from duomesh.core.training.metrics import Metrics, Row, RunRow, read_rows
from duomesh.core.training.model import Model
from duomesh.core.training.report import installed_versions, write_report
from duomesh.core.training.resolve import Resolved
from duomesh.core.training.resume import Start, check_data

__all__ = [
    "METRICS",
    "REPORT",
    "MakeSession",
    "Outcome",
    "report_failure",
    "run_training",
]

METRICS, REPORT, LOCK = "metrics.jsonl", "report.html", ".lock"

_TEXT_BYTES_PER_S = 250e3  # of a slow tokenizer
# Limits on two things that have nothing to be measured by: a scan of folders; a session, with every process group
_FINDING_S, _MAKING_S = 300.0, 300.0

MakeSession = Callable[[ModelSpec, RunConfig], Session]


@dataclass(frozen=True)
class Outcome:
    """What a run came to. total_steps: as configured. signal: the one that ended it early, if any."""

    progress: Progress
    total_steps: int
    seconds: float
    output: Path
    checkpoint: Path | None
    report: Path
    signal: int | None


def run_training(
    resolved: Resolved, find_model: FindModel, make_session: MakeSession, console: Console, peers: Peers = ALONE
) -> Outcome:
    """Trains as configured, from scratch or from the newest checkpoint of `train.output`.

    Args:
        find_model: the model and weights that a configuration means.
        make_session: a session for a model; its own weights are replaced. Of several ranks each makes its own.
        console: where notes and progress are shown, by rank 0.
        peers: the ranks that train, each with the same settings and on a file system that all see.

    Returns:
        The outcome, the same on every rank but for seconds.

    Raises:
        DuomeshError: anything that the user can act on; checkpoints that were written before stay.
    """
    console = Console(StringIO()) if peers.rank else console
    beginning = begin(resolved, find_model, peers)
    start, model = beginning.start, beginning.model
    output = Path(start.resolved.config.train.output)
    for note in start.notes:
        console.note(note)
    with doing("reading the text"):
        data = together(peers, lambda: _load_data(start, model.spec, console))
        _check_same_text(peers, data.fingerprint)
    with ExitStack() as lock:

        def take_folder() -> None:
            if peers.rank == 0:
                _make_folder(output)
                lock.enter_context(_only_run(output))

        with doing("making the output folder"):
            together(peers, take_folder)
        return _run(start, model, data, make_session, console, peers)


@contextmanager
def _only_run(output: Path) -> Iterator[None]:
    """Two runs in one folder would mix their records and remove each other's checkpoints.

    The lock is the kernel's and goes with the process, however it ends.
    """
    with (output / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(
                f"another run is writing to {output}. Wait for it, or choose another train.output."
            ) from None
        yield


def _run(
    start: Start, model: Model, data: TrainingData, make_session: MakeSession, console: Console, peers: Peers
) -> Outcome:
    config = start.resolved.config
    output = Path(config.train.output)
    with doing("making the session", stall_s=_MAKING_S):
        session = make_session(model.spec, config.train)
    with doing("loading"):
        progress = _load_session(session, start, model)
    with doing("opening the record"):
        metrics = together(peers, lambda: None if peers.rank else Metrics(output / METRICS, progress.step))
    began = time.perf_counter()

    def log(row: Row) -> None:
        if metrics is not None:
            metrics.write(row)
            console.row(row)

    def report(failure: str = "") -> None:
        if metrics is not None:
            write_report(output / REPORT, read_rows(output / METRICS), start.resolved, session.program, failure)

    try:
        with Interrupt() as interrupt, console.running(progress.step, config.train):
            log(_run_row(progress, config))
            progress = train(session, data, config, progress, log, interrupt, peers)
    except Exception as error:
        # a run that failed is the one whose curve is looked at first; its own error is the one that counts
        is_ours = isinstance(error, DuomeshError)
        with suppress(OutputError):
            report(str(error) if is_ours else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise
    with doing("writing the report"):
        together(peers, report)
    saved = [row["path"] for row in read_rows(output / METRICS) if row.get("kind") == "checkpoint"]
    return Outcome(
        progress=progress,
        total_steps=config.train.steps,
        seconds=time.perf_counter() - began,
        output=output,
        checkpoint=Path(saved[-1]) if saved else None,
        report=output / REPORT,
        signal=interrupt.signal,
    )


def report_failure(beginning: Beginning, error: DuomeshError, since: float) -> None:
    """Writes the report of a run that has failed, for ranks that cannot do it any more.

    Nothing is written if the run had no record yet: what is in the folder is then another run's.

    Args:
        since: when the run began, in seconds since 1970.
    """
    resolved = beginning.start.resolved
    output = Path(resolved.config.train.output)
    rows = read_rows(output / METRICS)
    if any(row.get("kind") == "run" and row.get("time", 0.0) >= since for row in rows):
        with suppress(OutputError), _only_run(output):
            write_report(output / REPORT, rows, resolved, build_program(beginning.model.spec), str(error))


def _run_row(progress: Progress, config: TrainConfig) -> RunRow:
    return RunRow(
        step=progress.step,
        time=time.time(),
        backend=config.train.backend,
        dtype=config.train.dtype,
        plan=str(Plan.parse(config.train.plan)),
        versions=installed_versions(),
    )


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}. Choose another train.output.") from None


def _load_data(start: Start, spec: ModelSpec, console: Console) -> TrainingData:
    config = start.resolved.config
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_rows(tokenizer, spec.vocab_size)
    corpus = _read(config, tokenizer)
    console.note(_describe(corpus, tokenizer))
    for note in check_data(start, corpus.fingerprint):
        console.note(note)
    data = config.data
    samples = Sampler(corpus.train, data.seq_len, seed=data.seed, shuffle=data.shuffle)
    places = config.train.steps * config.train.global_batch_size
    console.note(
        f"{samples.num_samples:,} samples of {data.seq_len} tokens; {config.train.steps:,} steps are "
        f"{places / samples.num_samples:.2f} epochs"
    )
    return TrainingData(samples, _validation(start, corpus, console), corpus.fingerprint)


def _read(config: TrainConfig, tokenizer: Tokenizer) -> Corpus:
    data = config.data
    doing("finding the text", stall_s=_FINDING_S)
    files = find_files([*data.paths, *data.validation_paths], data.patterns)
    doing("reading the text", more_s=sum(file.stat().st_size for file in files) / _TEXT_BYTES_PER_S)
    return read_corpus(
        data.paths,
        tokenizer,
        patterns=data.patterns,
        append_eos=data.append_eos,
        validation_paths=data.validation_paths,
        validation_fraction=data.validation_fraction,
        validation_split=data.validation_split,
    )


def _check_same_text(peers: Peers, fingerprint: str) -> None:
    """Raises DataError if ranks, on several hosts, have read different texts under one name."""
    found = peers.exchange(fingerprint)
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        raise DataError(f"rank {other} has read another text than rank 0. Give every host the same files.")


def _describe(corpus: Corpus, tokenizer: Tokenizer) -> str:
    skipped = ", ".join(f"{count} {reason}" for reason, count in corpus.skipped.items())
    documents = "1 document" if corpus.num_documents == 1 else f"{corpus.num_documents:,} documents"
    return (
        f"{documents}, {len(corpus.train):,} tokens ({tokenizer.name}); "
        f"{len(corpus.validation):,} tokens for validation" + (f"; files skipped: {skipped}" if skipped else "")
    )


def _validation(start: Start, corpus: Corpus, console: Console) -> Sampler | None:
    """Validation samples in the text's order; None if there are too few tokens for one.

    Raises:
        DataError: there are too few, and evaluation was asked for.
    """
    config, sources = start.resolved.config, start.resolved.sources
    if config.train.eval_batches == 0:
        return None
    try:
        return Sampler(corpus.validation, config.data.seq_len, shuffle=False)
    except DataError:
        message = (
            f"validation has {len(corpus.validation)} tokens, but one sample of data.seq_len={config.data.seq_len} "
            f"needs {config.data.seq_len + 1}"
        )
        asked = [name for name in ("train.eval_every", "train.eval_batches") if sources[name] != "default"]
        if asked:
            raise DataError(
                f"{message}, and {asked[0]} asks for evaluation. Raise data.validation_fraction, name "
                "data.validation_paths, or set train.eval_batches=0."
            ) from None
        console.note(f"no evaluation: {message}")
        return None


def _load_session(session: Session, start: Start, model: Model) -> Progress:
    config, checkpoint = start.resolved.config, start.checkpoint
    if checkpoint is None or checkpoint.training is None:
        session.init_optimizer(config.optimizer.adamw, None if model.weights is None else model.weights())
        return Progress()
    state = checkpoint.training
    with checkpoint:
        session.load_optimizer_state(config.optimizer.adamw, state.optimizer_step_count, checkpoint.deferred_state())
    return Progress(state.step, state.num_skipped, state.consumed_samples, state.consumed_tokens)
