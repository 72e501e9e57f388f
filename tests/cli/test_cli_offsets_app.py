"""An app that left gaps is stopped, its offsets are moved, and it handles again exactly what docs/operation.md says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tenacity
from offsets_tools import rows, stand, stands

import penstock
from commands import Command
from kafka_tools import produce
from penstock.devbroker import DevBroker
from waiting import wait_until

#: The same key twice: the second message waits behind the first, which fails.
KEYS = [b"a", b"b", b"c", b"parked", b"d", b"e", b"parked", b"f", b"g", b"h"]
GAPS = (range(4, 6), range(7, 10))


class Handled:
    """An app's handler, and the offsets that it has handled."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self.offsets: list[int] = []

    def __call__(self, message: penstock.Message) -> None:
        if self._fails and message.key == b"parked":
            raise ValueError
        self.offsets.append(message.offset)


@pytest.mark.thorough
def test_what_was_done_above_the_commit_point_is_kept_or_handled_again_as_asked(
    penstock_command: Command, broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic()
    group = f"g-{topic}"
    produce(servers, topic, ((key, b"v") for key in KEYS))

    def app(handler: Handled) -> penstock.RunningApp:
        made = penstock.App(group, bootstrap_servers=servers, workers=2, commit_interval=0.1)
        made.handler(topic, retry=penstock.retry(attempts=100, wait=tenacity.wait_fixed(600)))(handler)
        return made.start()

    def offsets(command: str, *arguments: str) -> list[list[str]]:
        ended = penstock_command("offsets", command, "--bootstrap-servers", servers, group, *arguments)
        assert ended.code == 0, ended
        return rows(ended.out)

    def handled_after(command: str, *arguments: str) -> tuple[str, str, list[int]]:
        """Move the offsets, run the app to the end; return what was told (again, skipped), and what it handled."""
        stand(servers, group, topic, 0, 3, done=GAPS)
        [told] = offsets(command, *arguments)
        handler = Handled()
        with app(handler):
            wait_until(lambda: stands(servers, group, topic) == (12, ()))
        return told[4], told[5], sorted(handler.offsets)

    first = Handled(fails=True)
    running = app(first)
    wait_until(lambda: stands(servers, group, topic) == (3, GAPS))
    running.stop(timeout=0.5)
    assert sorted(first.offsets) == [0, 1, 2, 4, 5, 7, 8, 9]
    assert stands(servers, group, topic) == (3, GAPS)
    produce(servers, topic, [(b"i", b"v"), (b"j", b"v")])

    assert handled_after("reset", "--to", "3", "--keep-done") == ("0", "0", [3, 6, 10, 11])
    assert handled_after("reset", "--to", "1") == ("7", "0", list(range(1, 12)))
    assert handled_after("reset", "--to", "1", "--keep-done") == ("2", "0", [1, 2, 3, 6, 10, 11])
    assert handled_after("reset", "--to", "3") == ("5", "0", list(range(3, 12)))
    assert handled_after("reset", "--to", "7") == ("3", "2", [7, 8, 9, 10, 11])
    assert handled_after("reset", "--to", "5", "--keep-done") == ("0", "1", [6, 10, 11])
