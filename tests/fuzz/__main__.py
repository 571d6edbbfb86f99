"""Start the fuzzer: ``python -m tests.fuzz --help``."""

from __future__ import annotations

import sys

from tests.fuzz.main import main

sys.exit(main())
