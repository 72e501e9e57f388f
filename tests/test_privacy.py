"""Keys, values and what quotes them show nowhere unless they are asked for: canaries are sent, and looked for."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import logging
import pickle
import pkgutil
import re
from collections.abc import Iterable, Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import penstock
from penstock.app import App
from penstock.cli.dlq import row_of
from penstock.consumer import retry
from penstock.consumer.failure_text import failure_text
from penstock.dead_letters.headers import read
from penstock.dead_letters.reader import DeadLetter
from penstock.errors import PenstockError
from penstock.message import Message
from penstock.outgoing import Outgoing
from penstock.telemetry import Telemetry
from penstock.testing import TestApp
from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.file.log.frames import Record as FileRecord
from penstock.transactions.wire.half import Half

#: One word for each thing that must not show.
KEY, VALUE, TEXT, HEADER = "canary-key", "canary-value", "canary-text", "canary-header"
CANARY = re.compile(".{0,80}canary.{0,80}")


class PoisonError(Exception):
    """A handler's error; its text quotes the message, as such texts do."""


@dataclasses.dataclass
class Watched:
    """An app that fails every message, and all that it says."""

    app: App
    spans: InMemorySpanExporter
    metrics: InMemoryMetricReader

    @classmethod
    def make(cls, **options: object) -> Watched:
        spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
        tracing = TracerProvider()
        tracing.add_span_processor(SimpleSpanProcessor(spans))
        telemetry = Telemetry(tracer_provider=tracing, meter_provider=MeterProvider([metrics]))
        app = App("app", bootstrap_servers="memory:0", telemetry=telemetry, **options)  # type: ignore[arg-type] # the tests name options
        return cls(app, spans, metrics)

    def texts(self, test: TestApp) -> Iterator[tuple[str, str]]:
        """Return all its texts, with their places."""
        yield "explain", "\n".join(map(str, test.explain()))
        yield "repr of explain", repr(test.explain())
        yield "statistics", repr(test.statistics())
        yield "spans", "\n".join(span.to_json() for span in self.spans.get_finished_spans())
        data = self.metrics.get_metrics_data()
        yield "metrics", "" if data is None else data.to_json()
        yield "app", repr(self.app) + repr(vars(self.app))


def canaries(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return where canaries show, with what surrounds them."""
    return [f"{where}: ...{hit[0]}..." for where, text in texts if (hit := CANARY.search(text)) is not None]


@pytest.mark.parametrize("on_failure", ["dead_letter", "drop", "hold", "stop"])
def test_a_message_that_fails_shows_in_nothing_that_an_app_tells(
    on_failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    watched = Watched.make()

    @watched.app.handler("t", retry=retry(attempts=2), retry_delays=(1,), on_failure=on_failure)
    def fail(message: Message) -> None:
        raise PoisonError(f"{TEXT} {message.value!r}")

    with TestApp(watched.app) as test:
        test.send("t", VALUE, key=KEY, headers=[("h", HEADER.encode())])
        if on_failure == "stop":
            with pytest.raises(PenstockError, match="its offset stays"):
                test.advance(100)
        else:
            test.settle()
            texts = list(watched.texts(test))
            test.advance(100)
            texts += watched.texts(test)
            now = test.statistics()
            assert now.dead_letters + now.dropped + now.held_keys == 1
            assert canaries(texts) == []

    assert canaries([("log", caplog.text)]) == []
    if on_failure != "dead_letter":
        assert "PoisonError" in caplog.text
        assert "in fail" in caplog.text


def test_what_is_held_by_a_key_shows_neither_in_explain_nor_in_the_objects_of_the_engine() -> None:
    watched = Watched.make()

    @watched.app.handler("t", retry=retry(attempts=9), on_failure="dead_letter")
    def fail(message: Message) -> None:
        raise PoisonError(f"{TEXT} {message.value!r}")

    with TestApp(watched.app) as test:
        test.send("t", VALUE, key=KEY)
        test.advance(0.01)
        (said,) = test.explain()
        texts = list(watched.texts(test))
        ours = [found for found in gc.get_objects() if str(type(found).__module__).startswith("penstock.")]
        for found in (found for found in ours if type(found).__repr__ is not object.__repr__):
            # One that an earlier test left half made, by interrupting a thread there, shows nothing.
            with contextlib.suppress(AttributeError):
                texts.append((type(found).__qualname__, repr(found)))

        assert said.key == KEY.encode()
        assert canaries(texts) == []


class WithTexts(logging.Formatter):
    """Adds the text of a handler's exception, as docs/security.md says."""

    def format(self, record: logging.LogRecord) -> str:
        failure = getattr(record, "failure", None)
        return super().format(record) + (f"\n{failure.error}" if failure else "")


@pytest.mark.parametrize("on_failure", ["drop", "hold", "stop"])
def test_a_formatter_of_the_users_adds_the_text_of_an_exception_to_the_log(
    caplog: pytest.LogCaptureFixture, on_failure: str
) -> None:
    watched = Watched.make()
    before = caplog.handler.formatter
    caplog.handler.setFormatter(WithTexts())

    @watched.app.handler("t", retry=retry(attempts=1), on_failure=on_failure)
    def fail(_message: Message) -> None:
        raise PoisonError(TEXT)

    with TestApp(watched.app) as test, contextlib.suppress(PenstockError):
        test.send("t", VALUE, key=KEY)
        test.settle()
    caplog.handler.setFormatter(before)

    errors = [record for record in caplog.records if hasattr(record, "failure")]
    shown = str(errors[0].failure.error if on_failure != "stop" else errors[0].failure.error.__cause__)
    assert (len(errors), shown) == (1, TEXT)
    assert on_failure == "stop" or TEXT in caplog.text
    # Formatters that print all of a record print only its class, and so does all output of the process.
    assert TEXT not in repr(errors[0].failure) + pickle.loads(pickle.dumps(errors[0].failure))  # noqa: S301 - our own
    assert KEY not in caplog.text


def test_a_failure_is_reported_with_its_causes_and_only_our_own_texts() -> None:
    def fail() -> None:
        raise PoisonError(TEXT)

    def stop() -> None:
        try:
            fail()
        except PoisonError as cause:
            raise PenstockError("the consumer stops") from cause

    with pytest.raises(PenstockError) as raised:
        stop()
    texts = failure_text(raised.value)

    assert TEXT not in texts
    assert re.search(r"in fail\n.*PoisonError\n.*in stop.*PenstockError: the consumer stops$", texts, re.DOTALL)


def test_a_dead_letter_shows_what_quotes_the_message_only_where_it_is_asked_for() -> None:
    watched = Watched.make()

    @watched.app.handler("t", retry=retry(attempts=1), on_failure="dead_letter")
    def fail(_message: Message) -> None:
        raise PoisonError(f"{TEXT}\n  {TEXT}")

    with TestApp(watched.app) as test:
        test.send("t", VALUE, key=KEY)
        test.settle()
        (found,) = test.dead_letters("t")
    letter = DeadLetter(found.topic, 0, 0, found.key, found.value, list(found.headers), 0, read(list(found.headers)))
    plain, full = (json.dumps(row_of(letter, None, payload=payload)) for payload in (False, True))

    assert canaries([("plain", plain), ("repr", repr(letter))]) == []
    assert '"exception": "test_privacy.PoisonError"' in plain
    assert re.search(r'File \\".*test_privacy.py\\", line \d+, in fail', plain)
    assert all(word in full for word in (KEY, VALUE, TEXT))


def test_messages_that_are_sent_show_neither_key_nor_value_in_their_repr() -> None:
    half = Half(
        "id", "g", "t", None, KEY.encode(), VALUE.encode(), (("h", HEADER.encode()),), None, order_key=b"canary"
    )
    shown = [
        half,
        Pending(half, 0),
        FileRecord(1, VALUE.encode(), 0),
        Outgoing("t", value=VALUE, key=KEY, headers=[("h", HEADER.encode())]),
        penstock.HalfMessage("t", KEY.encode(), VALUE.encode(), (("h", HEADER.encode()),), "id", 0),
        Message.of(VALUE.encode(), key=KEY.encode(), headers=[("h", HEADER.encode())]),
        Message.of(VALUE.encode(), key=KEY.encode())._record,
    ]

    assert canaries((type(one).__name__, repr(one)) for one in shown) == []


#: What a field is called, or is of, that may hold what a message holds.
_NAMES = re.compile(r"(record_)?(key|value|headers|payload|body|stack)")
_KINDS = re.compile(r"\bbytes\b|\bRecord\b|Headers|HeaderList|BaseException|Hashable|ClientConfig")
#: Types without message content, types that hide it themselves, and types for tests only.
_HARMLESS = re.compile(
    r"penstock\.(testing|demo)\.|.*\.(_Member\.process|findings\.Setting\.value|KeyFunction|Scan\.records)|.*\.(sinks|merge|reducing)\.|.*Sink\.|.*Handler\."
)


def _fields() -> Iterator[tuple[str, str]]:
    """Return every field of every dataclass and named tuple that its repr shows, by its full name and its type."""
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if module.name.endswith("__main__"):
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            if not isinstance(kind, type) or kind.__module__ != module.name:
                continue
            shown: dict[str, object] = {}
            if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.repr:
                shown = {field.name: field.type for field in dataclasses.fields(kind) if field.repr}
            elif hasattr(kind, "_fields") and "collections" in kind.__repr__.__code__.co_filename:
                shown = dict(kind.__annotations__)
            for field, of in shown.items():
                yield f"{module.name}.{name}.{field}", str(of)


def test_no_value_shows_a_field_that_may_hold_what_a_message_holds_or_a_password() -> None:
    shown = [
        f"{name}: {kind}"
        for name, kind in _fields()
        if (_NAMES.fullmatch(name.rpartition(".")[2]) or _KINDS.search(kind)) and not _HARMLESS.match(name)
    ]

    assert shown == []
