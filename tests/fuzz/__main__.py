"""Start the fuzzer: ``python -m tests.fuzz --help``.

Everything else is imported as ``fuzz``, the name by which pytest knows this package, so that no module is there twice.
"""

from __future__ import annotations

import sys

from fuzz.main import main

sys.exit(main())
