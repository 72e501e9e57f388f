"""The smallest programs with transactions print the committed messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from example_programs import Examples

from penstock.devbroker import DevBroker

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"


def test_the_program_ships_what_was_paid_in_order() -> None:
    done = subprocess.run([sys.executable, HELLO], capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["shipping b'order 1' for b'alice'", "shipping b'order 3' for b'alice'"]
    # Clients that end with the process say nothing of a broker that was stopped before.
    assert "Connection refused" not in done.stderr


def test_the_order_service_publishes_what_its_database_holds(examples: Examples, broker: DevBroker) -> None:
    lines = examples.python("transactions_orders.py", broker.bootstrap_servers).splitlines()

    assert lines == ["alice: order 1", "carol: order 2"]
