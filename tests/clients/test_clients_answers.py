"""Requests of an admin client have one time limit of ours, even if the library ignores its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException

from fake_admin import FakeAdmin
from penstock.clients import answers
from penstock.clients.answers import LATE_S, all_answered
from penstock.clients.rights import Operation, ask_rights, topic_right
from penstock.clients.topics import LAST, ask_topic_ids, known_offsets


class Silent(Future[Any]):
    """A question without an answer: who waits for it lets the time go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "waited without a limit"
        self._clock.now += timeout
        raise TimeoutError


class Clock:
    """Replaces the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


class SilentAdmin(FakeAdmin):
    """An admin client whose questions get no answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def describe_topics(self, topics: Any, **_: object) -> dict[str, Silent]:
        return {name: Silent(self._clock) for name in topics.topic_names}

    def list_offsets(self, places: dict[Any, object], **_: object) -> dict[Any, Silent]:
        return {place: Silent(self._clock) for place in places}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(answers, "time", made)
    return made


def test_questions_that_are_asked_together_share_one_time_limit(clock: Clock) -> None:
    there: Future[int] = Future()
    there.set_result(7)

    found, failed = all_answered({"a": Silent(clock), "b": Silent(clock), "there": there}, 5.0)

    assert clock.now == 100.0 + 5.0 + LATE_S
    assert found == {"there": 7}
    assert {name: error.args[0].code() for name, error in failed.items()} == dict.fromkeys("ab", KafkaError._TIMED_OUT)


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: ask_topic_ids(admin, ["t"], 5.0),
        lambda admin: ask_rights(admin, [topic_right(Operation.READ, "t")], 5.0),
    ],
)
def test_who_waits_for_an_answer_that_never_comes_gets_one_in_the_end(clock: Clock, ask: Callable[[Any], Any]) -> None:
    answer = ask(SilentAdmin(clock))

    assert "did not answer" in str(answer) or answer.unknown == (topic_right(Operation.READ, "t"),)
    assert clock.now == 100.0 + 5.0 + LATE_S


def test_an_answer_without_an_offset_is_none() -> None:
    class Admin:
        def list_offsets(self, places: dict[Any, object], **_: object) -> dict[Any, Future[Any]]:
            made: Future[Any] = Future()
            made.set_result(type("Answer", (), {"offset": OFFSET_INVALID}))
            return dict.fromkeys(places, made)

    with pytest.raises(KafkaException, match="may have no leader yet"):
        known_offsets(cast("Any", Admin()), {("t", 0): LAST}, 5.0)
