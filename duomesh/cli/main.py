"""The `duomesh` command. One file a command; each loads only what it needs.

A command's module has a frozen dataclass `Args`, whose docstrings are the help, and `run(args) -> exit code`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from duomesh.core.errors import DuomeshError

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
    import tyro

    module = importlib.import_module(f"duomesh.cli.{name}")
    parse = getattr(module, "parse", None)
    try:
        # a command whose words are not plain options parses them itself
        args = parse(rest) if parse else tyro.cli(module.Args, args=rest, prog=f"duomesh {name}")
        return int(module.run(args))
    except DuomeshError as error:
        print(f"duomesh {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
