"""Running `penstock` in this process, as its users run it in theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.cli import main


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

    code: object
    out: str
    err: str


Command = Callable[..., Outcome]


def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `penstock ARGUMENTS...` on a wide terminal, and knows of no broker.

    The machine may be busy: brokers get more time to answer than an operator's patience is.
    """
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setenv("PENSTOCK_CONNECT_TIMEOUT", "60")

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return Outcome(left.value.code, printed.out, printed.err)

    return call
