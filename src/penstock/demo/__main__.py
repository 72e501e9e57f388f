"""The entry of the demo's child processes: `python -m penstock.demo airline ...` or `... totals ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.demo.checks import totals
from penstock.demo.senders import airline

_PARTS = {"airline": airline.main, "totals": totals.main}


def main(arguments: Sequence[str]) -> int:
    """Run the named part."""
    return _PARTS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
