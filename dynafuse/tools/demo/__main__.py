"""One phase of the demo in this process: ``python -m dynafuse.tools.demo native|interpreted [FILE]``."""

from __future__ import annotations

import sys

from rich.console import Console

from dynafuse.tools.demo.phases import PHASES

if __name__ == "__main__":
    sys.exit(0 if PHASES[sys.argv[1]](Console(), *sys.argv[2:]) else 1)
