"""Asking again: until the answer is as wanted, and no longer than a limit."""

from __future__ import annotations

import pytest

from penstock.clients.asking import ask_again


def test_it_is_asked_until_the_answer_is_as_wanted() -> None:
    answers = iter([0, 3, 7])

    assert ask_again(lambda: next(answers), 5.0, 0.001, until=lambda answer: answer > 5) == 7


def test_after_the_limit_the_last_answer_counts() -> None:
    assert ask_again(lambda: None, 0.1, 0.01) is None


def test_a_limit_of_nothing_asks_once() -> None:
    answers = iter([0])

    assert ask_again(lambda: next(answers), 0.0, 60.0) == 0


def test_an_error_that_does_not_pass_is_raised_at_once_and_one_that_may_is_the_last_answer() -> None:
    asked = 0

    def ask() -> bool:
        nonlocal asked
        asked += 1
        raise KeyError(asked)

    with pytest.raises(KeyError, match="1"):
        ask_again(ask, 5.0, 0.001)
    with pytest.raises(KeyError) as last:
        ask_again(ask, 0.1, 0.01, passes=lambda error: isinstance(error, KeyError))
    assert last.value.args == (asked,)
    assert asked > 2
