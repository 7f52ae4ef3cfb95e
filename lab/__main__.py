"""`python -m lab env|run|test|exec|injector`: see lab/README.md."""

import sys

from lab.cli import main

sys.exit(main())
