"""`python -m ptrainx.cli`: the same as the `ptrainx` command."""

import sys

from ptrainx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
