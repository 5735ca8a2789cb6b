"""`python -m hybrid_kv` is the command line."""

import sys

from hybrid_kv.cli import main

sys.exit(main())
