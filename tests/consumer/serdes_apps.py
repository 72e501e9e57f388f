"""Apps whose handlers use serializers and deserializers of confluent-kafka."""

from __future__ import annotations

import contextvars
from typing import Any

from confluent_kafka.serialization import (
    Deserializer,
    MessageField,
    SerializationContext,
    Serializer,
)

VALUE = SerializationContext("orders", MessageField.VALUE)


def framed(serializer: Serializer, value: object, context: SerializationContext = VALUE) -> bytes:
    """Return a value's bytes; the context variable that a serializer sets is not left in the test's own context."""
    return contextvars.copy_context().run(serializer, value, context) or b""


class Recording(Serializer, Deserializer):
    """A serializer and a deserializer that records its context."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.contexts: list[tuple[str, str, object]] = []
        self.error = error

    def __call__(self, value: Any, ctx: SerializationContext | None = None) -> Any:
        assert ctx is not None
        self.contexts.append((ctx.topic, ctx.field, ctx.headers))
        if self.error is not None:
            raise self.error
        return value
