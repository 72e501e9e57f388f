"""`Context`: handlers get it by its annotation alone; and its content."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Optional

import pytest

import penstock
import penstock as ps
from penstock.consumer import handler
from penstock.errors import ConfigurationError
from penstock.testing import TestApp
from support.consumers import app_of

if TYPE_CHECKING:
    from penstock.nowhere import Elsewhere, Unknown  # type: ignore[import-not-found] # its name is not known at run time

    from penstock import Context

Seen = list[tuple[object, penstock.Context]]


class Notes:
    """Handlers of many forms, which record their arguments."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def note(self, message: object, context: penstock.Context) -> None:
        """Take it as a method does."""
        self.seen.append((message, context))

    def __call__(self, message: penstock.Message, whatever: penstock.Context) -> None:
        """Take it as an object does, by any name."""
        self.note(message, whatever)

    def plain(self) -> Callable[..., object]:
        def handle(message: penstock.Message, context: penstock.Context) -> None:
            self.note(message, context)

        return handle

    def asynchronous(self) -> Callable[..., object]:
        async def handle(message: penstock.Message, context: penstock.Context) -> None:
            self.note(message, context)

        return handle

    def generator(self) -> Callable[..., object]:
        def handle(message: penstock.Message, context: penstock.Context) -> Iterator[penstock.Outgoing]:
            self.note(message, context)
            yield penstock.Outgoing("out", b"1")

        return handle

    def async_generator(self) -> Callable[..., object]:
        async def handle(message: penstock.Message, context: penstock.Context) -> AsyncIterator[penstock.Outgoing]:
            self.note(message, context)
            yield penstock.Outgoing("out", b"1")

        return handle

    def partial(self) -> Callable[..., object]:
        def handle(notes: Notes, message: penstock.Message, context: penstock.Context) -> None:
            notes.note(message, context)

        return functools.partial(handle, self)

    def decorated(self) -> Callable[..., object]:
        @functools.wraps(self.note)
        def handle(*given: object) -> None:
            self.note(*given)  # type: ignore[arg-type] # what the engine gives

        return handle

    def for_type_checkers(self) -> Callable[..., object]:
        def handle(message: Unknown, context: Context) -> None:
            self.note(message, context)

        return handle

    def other_name(self) -> Callable[..., object]:
        def handle(message: penstock.Message, context: ps.Context | None = None) -> None:
            assert context is not None
            self.note(message, context)

        return handle

    def optional(self) -> Callable[..., object]:
        def handle(message: penstock.Message, context: Optional[penstock.Context] = None) -> None:  # noqa: UP045 - the older way to write it
            assert context is not None
            self.note(message, context)

        return handle


FORMS = [
    "plain",
    "asynchronous",
    "generator",
    "async_generator",
    "partial",
    "decorated",
    "for_type_checkers",
    "other_name",
    "optional",
]


@pytest.mark.parametrize("form", [*FORMS, "note", "__call__"])
def test_a_handler_of_any_form_is_given_a_context(form: str) -> None:
    app, notes = app_of(), Notes()
    function = notes if form == "__call__" else notes.note if form == "note" else getattr(notes, form)()

    @app.lifespan
    def span() -> Iterator[str]:
        yield "state"

    app.handler("t")(function)
    with TestApp(app, topics=["out"]) as test:
        test.send("t", "v")
        test.settle()
        published = len(test.published("out"))

    ((message, context),) = notes.seen
    assert isinstance(message, penstock.Message)
    assert message.value == b"v"
    assert context == penstock.Context(app=app, state="state", group="app")
    assert published == ("generator" in form)


def test_the_state_is_that_of_each_start() -> None:
    app, seen, starts = app_of(), [], []

    @app.lifespan
    def without() -> Iterator[None]:
        yield

    @app.lifespan
    async def connection() -> AsyncIterator[dict[str, int]]:
        starts.append("begins")
        yield {"start": len(starts)}
        starts.append("ends")

    @app.handler("t")
    async def handle(message: penstock.Message, context: penstock.Context) -> None:
        seen.append(context.state)

    with TestApp(app) as test, TestApp(app, test.broker):
        test.send("t", "v")
        test.settle()
    with TestApp(app) as test:
        test.send("t", "v")
        test.settle()

    assert seen == [{"start": 1}, {"start": 5}]


def test_two_states_are_refused_at_the_start_and_both_lifespans_end() -> None:
    app, ended = app_of(), []

    def span(name: str) -> Callable[[], Iterator[str]]:
        def give() -> Iterator[str]:
            yield name
            ended.append(name)

        give.__qualname__ = name
        return give

    app.lifespan(span("first"))
    app.lifespan(span("second"))
    app.handler("t")(Notes().note)

    with pytest.raises(ConfigurationError, match="the lifespans first and second both yield a state"):
        TestApp(app).start()

    assert ended == ["second", "first"]


def test_a_second_parameter_without_the_annotation_is_refused_with_a_sentence() -> None:
    def bare(message: penstock.Message, context) -> None: ...  # type: ignore[no-untyped-def] # noqa: ANN001 - on purpose

    def another(message: penstock.Message, context: Unknown) -> None: ...

    def keyword(message: penstock.Message, *, context: penstock.Context) -> None: ...

    def third(message: penstock.Message, size: int, context: penstock.Context) -> None: ...

    def first(context: penstock.Context) -> None: ...

    for function in (bare, another):
        with pytest.raises(ConfigurationError, match=r"give it one parameter, or a second one as penstock\.Context"):
            handler(function)
    for function in (keyword, third, first):
        with pytest.raises(ConfigurationError, match="has its Context as 'context', where it gets no value"):
            handler(function)


def test_the_context_of_another_library_is_not_taken_for_it() -> None:
    seen = list[object]()

    def handle(_message: penstock.Message, context: contextvars.Context | Elsewhere.Context | None = None) -> None:
        seen.append(context)

    app = app_of()
    app.handler("t")(handle)
    with TestApp(app) as test:
        test.send("t", "v")
        test.settle()

    assert seen == [None]


def test_a_sink_function_is_given_no_context() -> None:
    app = app_of()

    def store(batch: object, context: penstock.Context) -> None: ...

    with pytest.raises(ConfigurationError, match=r"sink .*store takes a Context, which handlers alone are given"):
        app.sink("t")(store)
