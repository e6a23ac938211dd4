"""`python -m openmsa` is the `openmsa` command."""

import sys

from openmsa.cli import main

if __name__ == "__main__":
    sys.exit(main())
