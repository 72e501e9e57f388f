"""The tutorial is correct: its programs and commands run in order, in an empty folder, on its own Kafka."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from pages import ROOT, blocks
from terminal import terminal

TUTORIAL = blocks(ROOT / "docs" / "tutorial.md")


@pytest.mark.thorough
@pytest.mark.timeout(650)  # `make test-all` ends a process that is stuck for 700
def test_the_tutorial_runs_from_an_empty_folder_to_the_end(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with terminal(tmp_path, {"9092": str(port)}) as reader:
        reader.follow(TUTORIAL)

        assert reader.ran > 15
        ended = [process.poll() for process in reader.background[1:] if process is not None]
        assert ended == [0, -signal.SIGTERM]
