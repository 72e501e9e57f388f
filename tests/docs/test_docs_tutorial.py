"""The tutorial does what it says: its programs and commands run in order, in an empty folder, on its own Kafka."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks

TUTORIAL = blocks(ROOT / "docs" / "tutorial.md")
#: What a reader does once and the tests have done.
DONE_BEFORE = ("python3 -m venv", "pip install")
#: What may be asked again until it answers as the page says: it looks, and changes nothing.
LOOKS = ("cat ", "penstock tx ls", "penstock lag")
#: Seconds that a command may take, and that an answer may be waited for, on a busy machine.
COMMAND_S, ANSWER_S = 300.0, 180.0


@dataclass
class Terminal:
    """A reader's terminal: a folder, an environment, and commands in the background."""

    folder: Path
    port: int
    environment: dict[str, str]
    background: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def do(self, command: str, said: list[str]) -> None:
        """Run a command as it stands on the page; it must print these lines, in this order."""
        command = command.replace("9092", str(self.port))
        said = [line.replace("9092", str(self.port)) for line in said]
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value
        elif command.startswith("kill "):
            for number in re.findall(r"%(\d)", command):
                self.stop(self.background[int(number) - 1])
        elif command.endswith(" &"):
            self.background.append(self._start(f"exec {command.removesuffix(' &')}"))
        else:
            self._run(command, said)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a command of the background in order."""
        process.send_signal(signal.SIGTERM)
        process.wait(COMMAND_S)

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment)

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
            if in_order(said, done.stdout):
                return
            again = command.startswith(LOOKS) and time.monotonic() < until
            assert again, f"$ {command}\nprinted:\n{done.stdout}{done.stderr[-3000:]}\nand not:\n" + "\n".join(said)
            time.sleep(0.5)


def in_order(wanted: list[str], printed: str) -> bool:
    """Tell whether all that is wanted stands in what was printed, in that order; blanks count as one."""
    rest = re.sub(r"[ \t]+", " ", printed)
    for line in wanted:
        _, found, rest = rest.partition(re.sub(r"[ \t]+", " ", line))
        if not found:
            return False
    return True


def steps(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block, with the lines that it prints."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *said = part.rstrip("\n").split("\n")
        yield command, said


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in an empty folder; what runs in its background ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The JVMs of the tutorial live for seconds: their second compiler would take more than it gives.
    quick = {"COLUMNS": "200", "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
    one = Terminal(tmp_path, port, {**os.environ, "PATH": path, **quick})
    try:
        yield one
    finally:
        for process in one.background:
            if process.poll() is None:
                process.kill()
                process.wait(30)


@pytest.mark.thorough
@pytest.mark.timeout(650)  # `make test-all` ends a process that is stuck for 700
def test_the_tutorial_runs_from_an_empty_folder_to_the_end(terminal: Terminal) -> None:
    ran = 0
    for block in TUTORIAL:
        if block.language == "python":
            assert block.title, f"{block.place}: a program of the tutorial has a name"
            (terminal.folder / block.title).write_text(block.text)
        elif block.language == "console":
            for command, said in steps(block):
                if not command.startswith(DONE_BEFORE):
                    terminal.do(command, said)
                    ran += 1

    assert ran > 15
    assert [process.poll() for process in terminal.background[1:]] == [0, -signal.SIGTERM]
