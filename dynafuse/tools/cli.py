"""The `dynafuse` command: `demo`, `calibrate`, `doctor`, `cache`, `options` and `--version`.

    >>> main(["--version"])  # doctest: +SKIP
    dynafuse 0.1.0

A DynafuseError ends the command with one line on stderr and exit status 2, as argparse does for a wrong argument.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import dynafuse
from dynafuse import config
from dynafuse.cache.commands import COMMANDS, WITH_FILE, run
from dynafuse.cache.disk import KERNELS, Disk
from dynafuse.cost.calibration import cache_folder
from dynafuse.errors import DynafuseError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except DynafuseError as error:
        print(f"dynafuse: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dynafuse", description="A cost-driven backend for torch.compile.")
    parser.add_argument("--version", action="version", version=f"dynafuse {dynafuse.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], doc: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=doc, description=doc)
        command.set_defaults(run=run)
        return command

    demo = add("demo", _demo, "train a small transformer through dynafuse and check it against eager")
    demo.add_argument("--html", metavar="FILE", help="write the plan as a page for a browser")
    calibrate = add("calibrate", _calibrate, "measure the cost model's constants on the GPU at hand and store them")
    calibrate.add_argument("--seconds", type=float, help="no new measurement begins after so many")
    doctor = add("doctor", _doctor, "print what dynafuse finds on this machine, and what to do about what is missing")
    doctor.add_argument("--json", action="store_true", help="as data")
    cache = add("cache", _cache, "look at the kernel cache, empty it, check it, or move it to another machine")
    _add_cache_commands(cache)
    add("options", _options, "print every option with its default and environment variable")
    return parser


def _add_cache_commands(cache: argparse.ArgumentParser) -> None:
    actions = cache.add_subparsers(dest="action", required=True, metavar="action")
    for name, doc in COMMANDS.items():
        action = actions.add_parser(name, help=doc, description=doc)
        action.set_defaults(file=None)
        if name in WITH_FILE:
            action.add_argument("file", type=Path, metavar="FILE")


def _cache(arguments: argparse.Namespace) -> int:
    # Cost constants are declared by the cost model, which would bring torch; the cache has nothing to do with them.
    environment = {name: text for name, text in os.environ.items() if not name.startswith(config.COST_PREFIX)}
    limit = config.resolve(environ=environment).cache_size_mb
    return run(arguments.action, Disk(cache_folder() / KERNELS, limit << 20), arguments.file)


def _options(arguments: argparse.Namespace) -> int:
    print(config.describe())
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    """Run the demo after a check of the environment: a misspelt variable should not cost a minute of work first."""
    import dynafuse.cost.device  # noqa: F401  (declares the cost constants that the environment may name)
    from dynafuse.tools.demo import main as demo_main

    config.resolve()
    if arguments.html is not None and not Path(arguments.html).absolute().parent.is_dir():
        raise DynafuseError(f"--html {arguments.html}: there is no such folder")
    return demo_main(arguments.html) or 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from dynafuse.tools import calibrate

    config.resolve()
    return calibrate.main(calibrate.SECONDS if arguments.seconds is None else arguments.seconds)


def _doctor(arguments: argparse.Namespace) -> int:
    """Run the doctor, which reads the environment by itself: a misspelt variable is one of its findings."""
    from dynafuse.tools import doctor

    return doctor.main(as_json=arguments.json)
