"""`python -m kvledger` is the command `kvledger`."""

import sys

from kvledger.cli import main

sys.exit(main())
