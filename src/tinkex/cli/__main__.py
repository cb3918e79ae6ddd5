"""`python -m tinkex.cli`."""

import sys

from tinkex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
