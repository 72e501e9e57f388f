"""The example runs, and says what its reader is promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.devbroker import DevBroker

EXAMPLE = Path(__file__).parents[2] / "examples" / "transactions_orders.py"


def test_the_order_service_publishes_what_its_database_holds(broker: DevBroker) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), broker.bootstrap_servers],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["alice: order 1", "carol: order 2"]
