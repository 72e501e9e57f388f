"""The decisions of a retry policy, and the end of a message whose tries are exhausted: `on_failure`."""

from __future__ import annotations

import pytest
import tenacity

from penstock import App, OnFailure, PenstockError, retry
from penstock.errors import RetryLater, StoppedError
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import Handled, PoisonError, app_of

TWICE = retry(attempts=2, wait=tenacity.wait_fixed(1))


def holding(takes: object, **options: object) -> App:
    app = app_of()
    app.handler("t", **{"retry": TWICE, "on_failure": "hold", **options})(takes)  # type: ignore[arg-type,type-var] # options of several types
    return app


def test_a_message_that_is_held_keeps_its_key_and_its_offset_while_everything_else_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    takes = Handled()

    with TestApp(holding(takes)) as test:
        test.send("t", "poison", key="bad")
        test.advance(5)
        for number in range(3):
            test.send("t", f"bad {number}", key="bad")
            test.send("t", f"good {number}", key="good")
        test.advance(3_600)
        now, (said,) = test.statistics(), test.explain()

        assert takes.calls == ["poison", "poison", "good 0", "good 1", "good 2"]
        assert test.committed("t") == {0: 0}
        assert (now.held_keys, now.parked_keys, now.handled, now.dropped, now.dead_letters) == (1, 1, 3, 0, 0)
        assert (said.state, said.blocking_offset, said.attempt, said.due_in) == ("held", 0, 2, None)
        assert "held (Handled)" in str(said)
        assert "start the app again" in str(said)
        assert [line.levelname for line in caplog.records if "is held" in line.getMessage()] == ["ERROR"]
        test.stop()


def test_what_was_held_is_tried_again_by_the_next_start_and_what_was_done_above_it_is_not() -> None:
    takes = Handled()

    with TestApp(holding(takes)) as test:
        test.send("t", "poison", key="bad")
        test.send("t", "behind", key="bad")
        test.send("t", "good", key="good")
        test.advance(5)
        takes.fixed = True
        test.restart()
        test.settle()

    assert takes.calls == ["poison", "good", "poison", "poison", "behind"]
    assert test.committed("t") == {0: 3}


def test_a_stop_does_not_wait_for_what_is_held() -> None:
    app = holding(Handled())

    with TestApp(app) as test:
        test.send("t", "poison")
        test.advance(5)
        begun = test.clock.monotonic()

        assert not test.stop()
        assert test.clock.monotonic() - begun < 1


def test_messages_of_a_batch_that_fail_to_the_end_are_held_and_the_others_of_it_are_done() -> None:
    seen: list[list[str]] = []

    def takes(messages: list[Message]) -> None:
        values = [(message.value or b"").decode() for message in messages]
        seen.append(values)
        if "poison" in values:
            raise PoisonError

    with TestApp(holding(takes, batch=3)) as test:
        for value, key in (("poison", "a"), ("one", "b"), ("two", "c")):
            test.send("t", value, key=key)
        test.advance(60)

        assert test.statistics().held_keys == 1
        assert test.statistics().handled == 2
        assert test.explain()[0].state == "held"
        test.crash()


def test_a_message_that_waits_behind_a_held_one_of_another_topic_says_so() -> None:
    app = app_of()
    app.handler("a", "b", retry=TWICE, on_failure="hold")(Handled())

    with TestApp(app) as test:
        test.send("a", "poison", key="k")
        test.advance(5)
        test.send("b", "behind", key="k")
        test.settle()

        (said,) = [explanation for explanation in test.explain() if explanation.topic == "b"]
        assert said.state == "behind its key"
        assert said.detail == "it waits for a:0@0 of its key, which its handler holds"
        test.crash()


@pytest.mark.parametrize("given", ["stop", OnFailure.STOP, None])
def test_without_a_choice_the_app_stops_and_keeps_the_offset(given: object) -> None:
    options = {} if given is None else {"on_failure": given}
    app = app_of()
    app.handler("t", retry=TWICE, **options)(Handled())  # type: ignore[arg-type] # a name, an enum's member or nothing

    with TestApp(app) as test:
        test.send("t", "poison")
        with pytest.raises(
            PenstockError,
            match=r"failed t:0@0 2 times.* correct the handler, or choose on_failure='dead_letter', 'drop' or 'hold'",
        ) as stopped:
            test.advance(5)
        with pytest.raises(StoppedError, match="does not run"):
            test.settle()

    assert isinstance(stopped.value.__cause__, PoisonError)
    assert test.committed("t").get(0, 0) == 0


def test_the_delays_are_what_tenacity_says() -> None:
    policy = retry(stop=tenacity.stop_after_delay(10), wait=tenacity.wait_incrementing(start=1, increment=2))

    delays = [policy.delay_after(attempts, 0.0, PoisonError()) for attempts in (1, 2, 3)]
    too_late = policy.delay_after(4, 11.0, PoisonError())

    assert delays == [1, 3, 5]
    assert too_late is None


def test_a_wish_to_try_again_is_no_failure_that_a_policy_sorts_out_but_ends_by_its_stop() -> None:
    policy = retry(
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_fixed(1),
        retry=tenacity.retry_if_exception_type(OSError),
    )

    assert policy.delay_after(1, 0.0, PoisonError()) is None
    assert [policy.delay_after(attempts, 0.0, RetryLater(5)) for attempts in (1, 2, 3)] == [5, 5, None]
    assert policy.delay_after(1, 0.0, tenacity.TryAgain()) == 1


def test_a_stop_that_counts_the_next_wait_in_is_asked_as_tenacity_asks_it() -> None:
    policy = retry(stop=tenacity.stop_before_delay(10), wait=tenacity.wait_fixed(8))

    assert policy.delay_after(1, 0.0, PoisonError()) == 8
    assert policy.delay_after(2, 8.0, PoisonError()) is None
    assert policy.delay_after(1, 0.0, RetryLater(12)) is None
    assert policy.delay_after(1, 3.0, RetryLater(5)) == 5
