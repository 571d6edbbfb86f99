"""The `dynafuse` command: `demo`, `options` and `--version`.

    >>> main(["--version"])  # doctest: +SKIP
    dynafuse 0.1.0

A DynafuseError ends the command with one line on stderr and exit status 2, as argparse does for a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import dynafuse
from dynafuse import config
from dynafuse.errors import DynafuseError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments.command)
    except DynafuseError as error:
        print(f"dynafuse: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynafuse", description="A cost-driven backend for torch.compile.")
    parser.add_argument("--version", action="version", version=f"dynafuse {dynafuse.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("demo", help="train a small transformer through dynafuse and check it against eager")
    commands.add_parser("options", help="print every option with its default and environment variable")
    return parser


def _run(command: str) -> int:
    if command == "options":
        print(config.describe())
        return 0
    return _demo()


def _demo() -> int:
    """The demo, after a check of the environment: a misspelt variable should not cost a minute of work first."""
    import dynafuse.partition.device  # noqa: F401  (declares the cost constants that the environment may name)
    from dynafuse.demo import main as demo_main

    config.resolve()
    return demo_main() or 0
