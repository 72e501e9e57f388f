"""The seam below the fleet: `App` and the engines run without it, and say so where they are asked for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys

sys.modules["penstock.fleet"] = None  # as where it is not installed

from penstock import App, Coordinator
from penstock.errors import ConfigurationError

app = App("sms", bootstrap_servers="127.0.0.1:1", {option}=True)
app.handler("orders")(print)
Coordinator(bootstrap_servers="127.0.0.1:1")
try:
    app.start()
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize("option", ["report", "commands"])
def test_an_app_without_the_fleet_says_what_an_option_needs(option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(option=option)], capture_output=True, text=True, check=False
    )

    assert done.stdout.startswith(f"{option} needs the package penstock.fleet"), done.stderr


def test_what_reports_and_hears_commands_loads_no_web_server() -> None:
    code = (
        "import sys, penstock.fleet.reports.reporter, penstock.fleet.commands.listener;"
        "print(sorted({'starlette', 'uvicorn', 'typer'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
