"""`tinkex serve` whose connections to the database have the name of its node.

The nodes of a cluster on Ray share their settings, and a test ends the connections of one of them.
"""

from __future__ import annotations

import os
import sys

from tinkex.cli.main import main

if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--node-name") + 1]
    os.environ["TINKEX_DATABASE"] += f"&application_name=node-{name}"
    sys.exit(main(["serve", *sys.argv[1:]]))
