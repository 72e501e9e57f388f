"""An option list for several functions: each shows it, fills in defaults, and refuses other names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TypedDict, Unpack

import pytest

import penstock
from penstock.consumer import ConsumerSettings, LitePushConsumer, LiveSettings, handler
from penstock.consumer.handlers.handler import DEFAULTS
from penstock.consumer.handlers.options import HandlerOptions
from penstock.errors import ConfigurationError
from penstock.option_list import takes_options
from penstock.transactions.stores.store_coordinator import CoordinatorOptions


class Tea(TypedDict, total=False):
    """Options of a test."""

    leaf: str
    minutes: float


@takes_options(Tea, {"leaf": "green", "minutes": 3.0})
def brew(cup: str, *, hot: bool = True, **options: Unpack[Tea]) -> tuple[str, bool, Tea]:
    """Return its options."""
    return cup, hot, options


def app() -> penstock.App:
    return penstock.App("a", bootstrap_servers="127.0.0.1:1")


def test_what_is_left_out_has_its_default_and_what_is_given_counts() -> None:
    assert brew("a") == ("a", True, {"leaf": "green", "minutes": 3.0})
    assert brew("a", minutes=5.0, hot=False) == ("a", False, {"leaf": "green", "minutes": 5.0})


def test_the_signature_lists_the_options_one_by_one() -> None:
    assert str(inspect.signature(brew)) == (
        "(cup: 'str', *, hot: 'bool' = True, leaf: 'str' = 'green', minutes: 'float' = 3.0) -> 'tuple[str, bool, Tea]'"
    )
    assert brew.__doc__ == "Return its options."


def test_another_name_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=re.escape("brew() got an unexpected keyword argument 'minute'. Did you mean")):
        brew("a", minute=5)  # type: ignore[call-arg] # on purpose
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'$"):
        brew("a", xyzzy=5)  # type: ignore[call-arg] # on purpose


def test_an_app_and_the_engine_under_it_list_the_same_options_of_a_handler() -> None:
    of_app = dict(inspect.signature(penstock.App.handler).parameters)
    of_engine = dict(inspect.signature(handler).parameters)

    for own in ("self", "topics", "pattern"):
        del of_app[own]
    del of_engine["function"]

    assert of_app == of_engine
    assert list(of_app) == list(HandlerOptions.__annotations__) == list(DEFAULTS)


def test_an_unknown_option_of_a_handler_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"handler\(\) got an unexpected keyword argument 'ordr'. Did you mean 'order'"):
        app().handler("t", ordr="key")  # type: ignore[call-arg] # on purpose


@pytest.mark.parametrize(
    ("take", "old", "instead"),
    [
        (lambda **old: penstock.App("a", bootstrap_servers="a:1", **old), "exception_texts", r"logging\.Formatter"),
        (lambda **old: penstock.App("a", bootstrap_servers="a:1", **old), "max_parked", "max_in_flight limits"),
        (lambda **old: penstock.App("a", bootstrap_servers="a:1", **old), "one_core", "taskset -c"),
        (ConsumerSettings, "max_parked_bytes", "a quarter of max_in_flight_bytes"),
        (lambda **old: penstock.RunningApp.change(None, **old), "max_parked", "max_in_flight limits"),
        (lambda **old: app().handler("t", **old), "deferred_timeout", r"DeferredCompletion\(timeout="),
        (lambda **old: handler(print, **old), "retry_policy", "write retry="),
        (penstock.ReportSettings, "stacks", "the action Stacks"),
    ],
)
def test_a_removed_option_is_refused_with_what_to_write_instead(
    take: Callable[..., object], old: str, instead: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"has no option {old} any more: .*{instead}"):
        take(**{old: 1})


def test_what_may_change_while_it_runs_is_listed_by_the_app_and_by_its_consumer() -> None:
    of_app = inspect.signature(penstock.RunningApp.change).parameters
    of_consumer = inspect.signature(LitePushConsumer.change).parameters

    assert of_app == of_consumer
    assert list(of_app) == ["self", *LiveSettings.__annotations__]
    assert set(LiveSettings.__annotations__) <= set(inspect.signature(ConsumerSettings).parameters)


@pytest.mark.parametrize(
    ("face", "behind"), [(penstock.App, ConsumerSettings), (penstock.Coordinator, CoordinatorOptions)]
)
def test_a_face_that_writes_its_options_out_has_the_defaults_of_what_is_behind_it(face: type, behind: type) -> None:
    shown, checked = inspect.signature(face).parameters, inspect.signature(behind).parameters

    same = (shown.keys() & checked.keys()) - {"config"}  # nothing, or a table of nothing

    assert len(same) > 7
    assert {name: shown[name].default for name in same} == {name: checked[name].default for name in same}
