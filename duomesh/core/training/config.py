"""What a training run is told: a tree of frozen dataclasses, each section a table of the TOML file.

    [model] [data] [optimizer] [train]

A `TrainConfig` is checked when it is constructed, and reports everything that is wrong with it at once.
Where the values come from (file, command line, checkpoint) is `resolve.py`; what they mean at resume, `resume.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from duomesh.core.data.corpus import Split
from duomesh.core.data.tokenizer import BYTES
from duomesh.core.errors import ConfigError, PlanError
from duomesh.core.plan.plan import Plan
from duomesh.core.session import AdamW, ComputeDType

__all__ = [
    "CombinedConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "micro_batches_per_step",
]


class CombinedConfigError(ConfigError):
    """Everything that is wrong with a configuration, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        listed = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(self.problems[0] if count == 1 else f"the configuration has {count} problems:{listed}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. A preset with some numbers changed, or a directory whose weights are the start of the run."""

    preset: str | None = None  # such as "tiny-llama3"
    path: str | None = None  # a Hugging Face directory or a checkpoint of ours: model and weights
    vocab_size: int | None = None  # this and the following change the preset
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    tie_embeddings: bool | None = None
    init_std: float | None = None
    dropout: float | None = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how it becomes samples."""

    paths: tuple[str, ...] = ()  # text files and folders
    patterns: tuple[str, ...] = ("**/*",)  # globs that choose files within folders
    tokenizer: str = BYTES  # "bytes" or a Hugging Face tokenizer directory
    append_eos: bool = True  # close each file with the end token
    seq_len: int = 256  # tokens a sample
    shuffle: bool = True  # False keeps the order of the text
    seed: int = 1234  # of the shuffle
    validation_paths: tuple[str, ...] = ()  # text for validation; if given, nothing is held out
    validation_fraction: float = 0.05  # share of the text that is held out
    validation_split: Split = "tail"  # the end of the text, or whole "documents" chosen by hash


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the learning rate, whose schedule ends at train.steps."""

    lr: float = 3e-4
    min_lr: float = 0.0  # reached at the last step; not used by "constant"
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    max_grad_norm: float = 1.0  # 0 for no clipping

    @property
    def adamw(self) -> AdamW:
        beta1, beta2 = self.betas
        return AdamW(
            beta1=beta1,
            beta2=beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm or None,
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, how large a step, on what, and what is written where."""

    steps: int = 1000  # length of the run and of the learning-rate schedule
    stop_step: int | None = None  # end the run here, as if interrupted; the schedule still ends at `steps`
    global_batch_size: int = 8  # samples a step
    micro_batch_size: int = 8  # samples in memory at once; the rest is accumulated
    dtype: ComputeDType = "float32"  # bfloat16 keeps an fp32 master
    seed: int = 1234  # of the initial weights
    eval_every: int = 0  # steps between evaluations; 0 for one at the end
    eval_batches: int = 16  # global batches of samples an evaluation; 0 for none at all, -1 for the whole set
    checkpoint_every: int = 0  # steps between checkpoints; 0 for one at the end
    keep: int = 2  # newest checkpoints that are kept; 0 for all
    check_invariants_every: int = 0  # steps between comparisons of what ranks must hold alike; 0 for none
    stall_s: float = 40.0  # seconds in one section of a step after which a torch rank counts as hanging
    max_skipped: int = 5  # steps skipped in a row before the run stops
    log_every: int = 10  # steps between printed lines where there is no terminal
    output: str = "run"  # folder of checkpoints, metrics and report
    resume: Literal["never", "if_present", "must"] = "never"
    backend: Literal["torch", "jax"] = "torch"
    plan: str = ""  # layout on several ranks or devices, such as "tp=2,dp=2,zero=1"
    device: str | None = None  # such as "cpu" or "cuda"; the best there is if not given
    compile: bool = False
    remat: bool = False  # JAX: compute each layer again in backward, instead of keeping what it made

    @property
    def full_plan(self) -> Plan:
        """The plan with what the other settings say of a step. Raises PlanError or ConfigError."""
        plan = Plan.parse(self.plan)
        return replace(
            plan,
            micro_batches=micro_batches_per_step(self.global_batch_size, self.micro_batch_size, plan.dp),
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            precision=self.dtype,
        )

    @property
    def evaluated_samples(self) -> int | None:
        """The most samples that an evaluation takes, whatever the plan and the micro-batch; None for the whole set."""
        return None if self.eval_batches == -1 else self.eval_batches * self.global_batch_size

    @property
    def samples_of_a_pass(self) -> int:
        """Samples of a micro-batch over all data ranks."""
        return self.micro_batch_size * Plan.parse(self.plan).dp


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole configuration. Raises CombinedConfigError with everything that is wrong with it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        problems = [*_model(self.model), *_data(self.data), *_optimizer(self.optimizer), *_run(self.train)]
        if self.optimizer.warmup_steps > self.train.steps:
            problems.append(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} is more than train.steps={self.train.steps}; "
                "shorten the warm-up or train longer."
            )
        if problems:
            raise CombinedConfigError(problems)


def micro_batches_per_step(global_batch_size: int, micro_batch_size: int, data_ranks: int = 1) -> int:
    """Micro-batches that each data rank runs in a step.

    Raises:
        ConfigError: the global batch is no multiple of micro batch x data ranks. It is never rounded.
    """
    unit = micro_batch_size * data_ranks
    if global_batch_size % unit == 0:
        return global_batch_size // unit
    below = global_batch_size // unit * unit
    nearest = f"{below} or {below + unit}" if below else str(unit)
    raise ConfigError(
        f"train.global_batch_size={global_batch_size} is not a multiple of train.micro_batch_size={micro_batch_size} "
        f"x {data_ranks} data ranks = {unit}. The nearest global batch sizes are {nearest}."
    )


def _ranges(section: str, config: object, wanted: dict[str, str]) -> Iterator[str]:
    """Problems of numbers that must be "positive" or "not negative"."""
    for name, kind in wanted.items():
        value = getattr(config, name)
        if value is not None and (value < 0 or (kind == "positive" and value == 0)):
            yield f"{section}.{name} is {value}; it must be {kind}."


def _model(model: ModelConfig) -> Iterator[str]:
    if model.preset is not None and model.path is not None:
        yield "model.preset and model.path are both given; keep the one that is meant."
    changes = {name: value for name, value in vars(model).items() if name not in ("preset", "path")}
    changed = [name for name, value in changes.items() if value is not None]
    if model.path is not None and changed:
        yield f"model.{changed[0]} cannot change the model of model.path, whose weights have their shapes."
    sizes = [name for name in changes if name != "tie_embeddings"]
    yield from _ranges("model", model, dict.fromkeys(sizes, "positive"))


def _data(data: DataConfig) -> Iterator[str]:
    if not data.paths:
        yield "data.paths is empty; name the text files or folders to train on."
    yield from _ranges("data", data, {"seq_len": "positive"})
    if not 0 <= data.validation_fraction < 1:
        yield f"data.validation_fraction is {data.validation_fraction}; it must be at least 0 and less than 1."


def _optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    wanted = {
        "lr": "positive",
        "min_lr": "not negative",
        "warmup_steps": "not negative",
        "eps": "positive",
        "weight_decay": "not negative",
        "max_grad_norm": "not negative",
    }
    yield from _ranges("optimizer", optimizer, wanted)
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas is {list(optimizer.betas)}; it must be two numbers, at least 0 and less than 1."
    if optimizer.schedule == "cosine" and optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is more than optimizer.lr={optimizer.lr}; lower it."


def _run(run: RunConfig) -> Iterator[str]:
    positive = ("steps", "stop_step", "global_batch_size", "micro_batch_size", "stall_s", "max_skipped", "log_every")
    counts = ("eval_every", "checkpoint_every", "keep", "check_invariants_every")
    yield from _ranges("train", run, dict.fromkeys(positive, "positive") | dict.fromkeys(counts, "not negative"))
    if run.eval_batches < -1:
        yield f"train.eval_batches is {run.eval_batches}; it must be a count, 0 for none or -1 for the whole set."
    if run.stop_step is not None and run.stop_step > run.steps:
        yield f"train.stop_step={run.stop_step} is after the last step, train.steps={run.steps}."
    try:
        plan = Plan.parse(run.plan, source="train.plan")
    except PlanError as error:
        yield from str(error).split("\n")
        return
    for name in ("micro_batches", "micro_batch_size", "global_batch_size", "precision"):
        if getattr(plan, name) != getattr(Plan(), name):
            yield f"train.plan sets {name}; the settings of [train] decide it, leave it out of the plan."
    if run.global_batch_size > 0 and run.micro_batch_size > 0:
        try:
            micro_batches_per_step(run.global_batch_size, run.micro_batch_size, plan.dp)
        except ConfigError as error:
            yield str(error)
