"""`python -m featcal.cli`, as torchrun starts it."""

import sys

from featcal.cli.main import main

sys.exit(main())
