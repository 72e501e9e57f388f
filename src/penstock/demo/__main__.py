"""The entry of the demo's child processes: `python -m penstock.demo airline ...` or `... totals ...`."""

from __future__ import annotations

import sys

from penstock.demo.checks import totals
from penstock.demo.senders import airline

_PARTS = {"airline": airline.main, "totals": totals.main}

if __name__ == "__main__":
    sys.exit(_PARTS[sys.argv[1]](sys.argv[2:]))
