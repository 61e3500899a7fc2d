"""`python -m featcal`, also as torchrun starts it."""

import sys

from featcal.cli.start import main

sys.exit(main())
