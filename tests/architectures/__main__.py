"""Start the sweep: ``python -m tests.architectures --help``."""

from __future__ import annotations

import sys

from tests.architectures.main import main

sys.exit(main())
