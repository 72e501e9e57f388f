"""Runs examples as a user does: as processes that find the broker by an environment variable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

#: Seconds that a program may take on a busy machine.
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Program:
    """A running program, with the output so far of both streams."""

    process: subprocess.Popen[bytes]
    output: Path

    def lines(self) -> list[str]:
        """Return its output."""
        return self.output.read_text().splitlines()

    def wait_for(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait until the condition holds for its lines; fail at once if it has ended before."""

        def met() -> bool:
            ended = self.process.poll() is not None
            if condition(self.lines()):
                return True
            assert not ended, "\n".join(self.lines())
            return False

        try:
            wait_until(met, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n" + "\n".join(self.lines()[-40:])) from None

    def stop(self) -> int:
        """Send it SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


class Examples:
    """Runs the programs of `examples` against a broker.

    Args:
        bootstrap_servers: address of the broker.
        folder: the folder of their outputs.
    """

    def __init__(self, bootstrap_servers: str, folder: Path) -> None:
        self._environment = {
            **os.environ,
            "PENSTOCK_BOOTSTRAP_SERVERS": bootstrap_servers,
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "250",
        }
        self._folder = folder
        self._started = 0

    def python(self, *arguments: str) -> str:
        """Run a Python program to its end and return its output; it must succeed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=EXAMPLES,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def feed(self, topic: str) -> str:
        """Write the messages of an example, with the program that its docstring names."""
        return self.python("feed.py", topic)

    def penstock(self, *arguments: str) -> str:
        """Run a command of penstock to its end and return its output; it must succeed."""
        return self.python("-m", "penstock", *arguments)

    @contextmanager
    def run(self, app: str, extra: Mapping[str, str] | None = None) -> Iterator[Program]:
        """Run `penstock run APP` while the context is entered; it is killed where it has not ended by then."""
        self._started += 1
        output = self._folder / f"output-{self._started}.txt"
        with (
            output.open("wb") as sink,
            subprocess.Popen(
                [sys.executable, "-m", "penstock", "run", app],
                cwd=EXAMPLES,
                env={**self._environment, **(extra or {})},
                stdout=sink,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                yield Program(process, output)
            finally:
                process.kill()
