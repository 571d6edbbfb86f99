"""`python -m dynafuse` is the `dynafuse` command, as from a checkout that is not installed."""

import sys

from dynafuse.tools.cli import main

sys.exit(main())
