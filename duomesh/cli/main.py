"""The `duomesh` command. One file a command; each loads only what it needs.

A command's module has a frozen dataclass `Args`, whose docstrings are the help, and `run(args) -> exit code`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from duomesh.core.errors import DuomeshError, DuomeshWarning

__all__ = ["main"]

COMMANDS = {
    "train": "train a model from a TOML file",
    "generate": "continue a prompt",
    "verify": "compare the same model on two or more sides, op by op",
    "convert": "convert between checkpoint formats",
    "explain": "print what a model computes",
    "env": "print what is installed and which backends work",
}


def _usage() -> str:
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "usage: duomesh COMMAND ...\n\n" + "\n".join(lines) + "\n\nduomesh COMMAND --help says more."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit code 0: done; 1: a check failed; 2: the user must change something."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from duomesh import __version__

        print(f"duomesh {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"duomesh: there is no command {name!r}.\n\n{_usage()}", file=sys.stderr)
        return 2
    return _guarded(name, rest)


def _guarded(name: str, words: list[str]) -> int:
    """The command's exit code; whatever a user can cause becomes one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", DuomeshWarning)
            warnings.showwarning = _show_warning
            return _run(name, words)
    except BrokenPipeError:
        # who reads our output has seen enough; nothing may be flushed into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except DuomeshError as error:
        if error.is_told:
            return 2
        sentence = str(error)
    except MemoryError:
        sentence = "there is not enough memory for this model or batch."
    except OSError as error:
        sentence = f"{error.filename or 'output'}: {error.strerror or error}."
    print(f"duomesh {name}: {sentence}", file=sys.stderr)
    return 2


def _run(name: str, words: list[str]) -> int:
    import tyro

    module = importlib.import_module(f"duomesh.cli.{name}")
    parse = getattr(module, "parse", None)
    # a command whose words are not plain options parses them itself
    args = parse(words) if parse else tyro.cli(module.Args, args=words, prog=f"duomesh {name}")
    code = int(module.run(args))
    sys.stdout.flush()  # a full disk or a closed pipe must show here, not at exit
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if issubclass(category, DuomeshWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


if __name__ == "__main__":
    sys.exit(main())
