"""What becomes of a message whose tries are exhausted: `on_failure`, and above all a key that is held."""

from __future__ import annotations

import logging

import pytest
import tenacity
from confluent_kafka import KafkaError

from penstock import App, OnFailure, PenstockError, retry
from penstock.consumer import handler
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.testing import TestApp

TWICE = retry(attempts=2, wait=tenacity.wait_fixed(1))


class PoisonError(Exception):
    """What a poison message raises."""


class Takes:
    """A handler that fails poison, and writes down what it is given."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.mended = False

    def __call__(self, message: Message) -> None:
        """Take a message."""
        self.seen.append((message.value or b"").decode())
        if message.value == b"poison" and not self.mended:
            raise PoisonError


def app_of(takes: object, **options: object) -> App:
    app = App("app", bootstrap_servers="memory:0")
    app.handler("t", **{"retry": TWICE, "on_failure": "hold", **options})(takes)  # type: ignore[arg-type,type-var] # options of several types
    return app


def test_a_message_that_is_held_keeps_its_key_and_its_offset_while_everything_else_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    takes = Takes()

    with TestApp(app_of(takes)) as test:
        test.send("t", "poison", key="bad")
        test.advance(5)
        for number in range(3):
            test.send("t", f"bad {number}", key="bad")
            test.send("t", f"good {number}", key="good")
        test.advance(3_600)
        now, (said,) = test.statistics(), test.explain()

        assert takes.seen == ["poison", "poison", "good 0", "good 1", "good 2"]
        assert test.committed("t") == {0: 0}
        assert (now.held_keys, now.parked_keys, now.handled, now.dropped, now.dead_letters) == (1, 1, 3, 0, 0)
        assert (said.state, said.blocking_offset, said.attempt, said.due_in) == ("held", 0, 2, None)
        assert "held (Takes)" in str(said)
        assert "start the app again" in str(said)
        assert [one.levelname for one in caplog.records if "is held" in one.getMessage()] == ["ERROR"]
        test.stop()


def test_what_was_held_is_tried_again_by_the_next_start_and_what_was_done_above_it_is_not() -> None:
    takes = Takes()

    with TestApp(app_of(takes)) as test:
        test.send("t", "poison", key="bad")
        test.send("t", "behind", key="bad")
        test.send("t", "good", key="good")
        test.advance(5)
        takes.mended = True
        test.restart()
        test.settle()

    assert takes.seen == ["poison", "good", "poison", "poison", "behind"]
    assert test.committed("t") == {0: 3}


def test_a_stop_does_not_wait_for_what_is_held() -> None:
    app = app_of(Takes())

    with TestApp(app) as test:
        test.send("t", "poison")
        test.advance(5)
        begun = test.clock.monotonic()

        assert not test.stop()
        assert test.clock.monotonic() - begun < 1


def test_messages_of_a_batch_that_fail_to_the_end_are_held_and_the_others_of_it_are_done() -> None:
    seen: list[list[str]] = []

    def takes(messages: list[Message]) -> None:
        values = [(one.value or b"").decode() for one in messages]
        seen.append(values)
        if "poison" in values:
            raise PoisonError

    with TestApp(app_of(takes, batch=3)) as test:
        for value, key in (("poison", "a"), ("one", "b"), ("two", "c")):
            test.send("t", value, key=key)
        test.advance(60)

        assert test.statistics().held_keys == 1
        assert test.statistics().handled == 2
        assert test.explain()[0].state == "held"
        test.crash()


def test_a_value_that_cannot_be_decoded_is_held_at_once() -> None:
    with TestApp(app_of(Takes(), decoder="json")) as test:
        test.send("t", "{")
        test.settle()

        assert test.statistics().held_keys == 1
        test.crash()


def test_what_no_retry_topic_takes_is_held_by_a_handler_that_holds() -> None:
    takes = Takes()

    with TestApp(app_of(takes, retry=retry(attempts=1), retry_delays=(60,))) as test:
        test.broker.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE)
        test.send("t", "poison", key="k")
        test.settle()
        test.send("t", "behind", key="k")
        test.advance(600)

        assert takes.seen == ["poison"]
        assert test.statistics().held_keys == 1
        assert {one.topic: one.state for one in test.explain()}["t"] == "held"
        test.crash()


def test_a_message_that_waits_behind_a_held_one_of_another_topic_says_so() -> None:
    app = App("app", bootstrap_servers="memory:0")
    app.handler("a", "b", retry=TWICE, on_failure="hold")(Takes())

    with TestApp(app) as test:
        test.send("a", "poison", key="k")
        test.advance(5)
        test.send("b", "behind", key="k")
        test.settle()

        (said,) = [one for one in test.explain() if one.topic == "b"]
        assert said.state == "behind its key"
        assert said.detail == "it waits for a[0]@0 of its key, which its handler holds"
        test.crash()


@pytest.mark.parametrize("given", ["stop", OnFailure.STOP, None])
def test_without_a_choice_the_app_stops_and_keeps_the_offset(given: object) -> None:
    options = {} if given is None else {"on_failure": given}
    app = App("app", bootstrap_servers="memory:0")
    app.handler("t", retry=TWICE, **options)(Takes())  # type: ignore[arg-type] # a name, an enum's member or nothing

    with TestApp(app) as test:
        test.send("t", "poison")
        with pytest.raises(
            PenstockError, match="mend the handler, or choose on_failure='dead_letter', 'drop' or 'hold'"
        ):
            test.advance(5)

    assert test.committed("t").get(0, 0) == 0


@pytest.mark.parametrize("given", [True, False, "away", None])
def test_what_names_no_choice_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="on_failure must be one of 'dead_letter', 'drop', 'hold', 'stop'"):
        handler(Takes(), on_failure=given)  # type: ignore[arg-type] # that is what is tested


def test_no_alarm_is_given_for_a_key_that_only_waits_for_its_retry(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), TestApp(app_of(Takes())) as test:
        test.send("t", "poison")
        test.settle()

        assert (test.statistics().parked_keys, test.statistics().held_keys) == (1, 0)
        test.crash()

    assert caplog.text == ""
