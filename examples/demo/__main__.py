"""The entry of the demo's child processes: `python examples/demo airline ...` or `... totals ...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # a folder that is run is on the path itself, and not as a package

from demo import airline, totals  # noqa: E402 - by the path above

_PARTS = {"airline": airline.main, "totals": totals.main}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("run the demo with `penstock demo` or `make demo`; this starts its parts")
    sys.exit(_PARTS[sys.argv[1]](sys.argv[2:]))
