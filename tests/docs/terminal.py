"""A reader's terminal: the commands of a page run in order, in one folder, and print the lines of the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pages import Block

#: What a reader does once and the tests have done.
DONE_BEFORE = ("python3 -m venv", "pip install")
#: What stands on a page, as a line or at its begin or end, for what is left out.
LEFT_OUT = "..."
#: What may be asked again until it answers as the page says: it looks, and changes nothing.
LOOKS = (
    "cat ",
    "grep ",
    "psql ",
    "penstock tx ls",
    "penstock lag",
    "penstock dlq ls",
    "penstock dlq show",
    "penstock explain",
    "penstock status",
    "curl ",
)
#: Seconds that a command may take, and that an answer may be waited for, on a busy machine.
COMMAND_S, ANSWER_S = 300.0, 180.0


@dataclass
class Terminal:
    """A folder, an environment, and commands in the background.

    Attributes:
        folder: where programs are written and commands run.
        environment: variables of the commands; `export` on the page adds to them, save those in `given`.
        given: text of the page by what stands for it here, such as addresses, and names that other tests use.
        started: beginnings of commands in the background that have been started already.
    """

    folder: Path
    environment: dict[str, str]
    given: Mapping[str, str] = field(default_factory=dict)
    started: tuple[str, ...] = ()
    background: list[subprocess.Popen[bytes] | None] = field(default_factory=list)
    ran: int = 0

    def follow(self, page: list[Block]) -> None:
        """Write each program of a page with a title, and run each command."""
        for block in page:
            if block.title:
                (self.folder / block.title).write_text(self._here(block.text))
            elif block.language == "console":
                for command, said in steps(block):
                    if not command.startswith(DONE_BEFORE):
                        self._do(self._here(command), [self._here(line) for line in said])
                        self.ran += 1

    def _here(self, text: str) -> str:
        for name, value in self.given.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lambda _, value=value: value, text)  # type: ignore[misc]
        return text

    def _do(self, command: str, said: list[str]) -> None:
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value.strip("'\"")
        elif command.startswith("kill "):
            for process in self._named(command):
                self._stop(process, signal.SIGKILL if " -9 " in command else signal.SIGTERM)
        elif command.endswith(" &"):
            done = command.startswith(self.started) if self.started else False
            self.background.append(None if done else self._start(f"exec {command.removesuffix(' &')}"))
        else:
            self._run(command, said)

    def _named(self, command: str) -> list[subprocess.Popen[bytes]]:
        """Return the processes that a `kill` names: `$!` is the last one, `$(jobs -p)` all, `%2` the second."""
        if "$!" in command:
            named = self.background[-1:]
        elif "$(jobs -p)" in command:
            named = [process for process in self.background if process is not None and process.poll() is None]
        else:
            named = [self.background[int(number) - 1] for number in re.findall(r"%(\d)", command)]
        found = [process for process in named if process is not None]
        assert [*found] == named != [], f"$ {command}\nnames no process of the page"
        return found

    def _stop(self, process: subprocess.Popen[bytes], by: signal.Signals) -> None:
        process.send_signal(by)
        process.wait(COMMAND_S)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment)

    def _spark_was_late(self) -> bool:
        """Return whether Spark gave Python up, which has ten seconds to start there: too few on a busy machine."""
        log = self.folder / "spark.log"
        return log.exists() and "Python worker failed to connect back" in log.read_text()

    def _run(self, command: str, said: list[str]) -> None:
        until = time.monotonic() + ANSWER_S
        while True:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
                check=False,
            )
            again = command.startswith(LOOKS) and time.monotonic() < until
            if done.returncode and self._spark_was_late():
                again = True
            elif in_order(said, done.stdout):
                return
            assert again, f"$ {command}\nprinted:\n{done.stdout}{done.stderr[-3000:]}\nand not:\n" + "\n".join(said)
            time.sleep(0.5)


@contextmanager
def terminal(folder: Path, given: Mapping[str, str], started: tuple[str, ...] = ()) -> Iterator[Terminal]:
    """Open a terminal in a folder; its background processes end with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The JVMs of the pages live for seconds: their second compiler would take more than it gives.
    quick = {"COLUMNS": "200", "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
    opened = Terminal(folder, {**os.environ, "PATH": path, **quick}, given, started)
    try:
        yield opened
    finally:
        for process in opened.background:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(30)


def in_order(wanted: list[str], printed: str) -> bool:
    """Return whether the output has all wanted texts in this order; blanks count as one space."""
    rest = re.sub(r"[ \t]+", " ", printed)
    for line in wanted:
        part = re.sub(r"[ \t]+", " ", line.strip().removeprefix(LEFT_OUT).removesuffix(LEFT_OUT).strip())
        if part:
            _, found, rest = rest.partition(part)
            if not found:
                return False
    return True


def steps(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block, with the lines that it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *said = part.rstrip("\n").split("\n")
        yield command, said
