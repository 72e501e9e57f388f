"""The seam below the fleet: `App` and the engines run without it, and say so where they are asked for it."""

from __future__ import annotations

import subprocess
import sys

_WITHOUT = """
import sys

sys.modules["penstock.fleet"] = None  # as where it is not installed

from penstock import App, Coordinator
from penstock.errors import ConfigurationError

Coordinator(bootstrap_servers="127.0.0.1:1")
for option in ("report", "commands"):
    app = App("sms", bootstrap_servers="127.0.0.1:1", **{option: True})
    app.handler("orders")(print)
    try:
        app.start()
    except ConfigurationError as error:
        print(error)
"""


def test_an_app_without_the_fleet_says_what_an_option_needs() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], stdout=subprocess.PIPE, text=True, check=True)

    of_report, of_commands = done.stdout.splitlines()
    assert of_report.startswith("report needs the package penstock.fleet")
    assert of_commands.startswith("commands needs the package penstock.fleet")
