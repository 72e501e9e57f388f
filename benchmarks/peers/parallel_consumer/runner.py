"""The commands that run Confluent's Parallel Consumer: `PublishRunner` and `ConsumeRunner` of this folder."""

from __future__ import annotations

from pathlib import Path

from peers.java import JavaPeer

VERSION = "0.5.3.3"

_PEER = JavaPeer(
    "parallel-consumer",
    VERSION,
    Path(__file__).parent,
    (
        ("io.confluent.parallelconsumer", "parallel-consumer-core", VERSION),
        ("org.slf4j", "slf4j-nop", "2.0.13"),
    ),
)


def runner_command(program: str = "PublishRunner") -> list[str]:
    """Return the command of a runner without its arguments; raises as `JavaPeer.command`."""
    return _PEER.command(program, "-Xmx2g")
