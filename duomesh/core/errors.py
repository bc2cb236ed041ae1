"""The errors that a user can cause. Each message says what was given, what is needed and what to do.

The command line prints the message of any `DuomeshError` as one sentence and exits with code 2.
Broken invariants of our own are `assert`s, never one of these.
"""

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "DuomeshError",
    "DuomeshWarning",
    "OutputError",
    "PlanError",
    "SpecError",
    "TensorFileError",
    "TrainingError",
]


class DuomeshError(Exception):
    """Base of every error that the user can act on.

    is_told: whether another rank has said it, and this one need not say it again.
    """

    is_told = False


class DuomeshWarning(UserWarning):
    """Something was read in a way that the user should know of: a default that was taken, a tensor that was ignored."""


class SpecError(DuomeshError):
    """A model description is inconsistent or cannot be represented."""


class ConfigError(DuomeshError):
    """A run configuration or a command-line value is wrong."""


class BackendError(DuomeshError):
    """A backend is missing, or cannot do what was asked of it."""


class ConversionError(DuomeshError):
    """A foreign checkpoint cannot be represented exactly."""


class TensorFileError(DuomeshError):
    """A safetensors file or its index is missing, truncated, malformed or inconsistent."""


class CheckpointError(DuomeshError):
    """A neutral checkpoint is missing, incomplete or does not fit the run."""


class DataError(DuomeshError):
    """Training text or tokens are missing or unusable."""


class PlanError(DuomeshError):
    """A parallel plan cannot be carried out: sizes that do not divide, axes that do not fit together."""


class OutputError(DuomeshError):
    """An output cannot be written where the user asked."""


class TrainingError(DuomeshError):
    """A run cannot go on: its loss or gradients are not finite."""
