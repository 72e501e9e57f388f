"""confluent-kafka's own serializers and deserializers as encoders and decoders, and which of their failures pass.

Most of them speak with a schema registry. What it brings along is the extra `schema-registry`: nothing of that is
imported here. One who gives such a serializer has imported it.
"""

from __future__ import annotations

import sys
import threading
from contextvars import copy_context
from typing import Any
from weakref import WeakValueDictionary

from confluent_kafka.serialization import (
    Deserializer,
    DeserializerBuilder,
    MessageField,
    SerializationContext,
    Serializer,
    SerializerBuilder,
)

from penstock.errors import ConfigurationError, RegistryConnectionError, causes, raised
from penstock.message import Record, headers_of

#: The header that may hold a value's schema id, instead of the value's first bytes: confluent-kafka's name for it.
_SCHEMA_ID_HEADER = "__value_schema_id"
#: What a registry's client raises when it did not get through, by module.
_NOT_REACHED = {
    "httpx2": "TransportError",
    "httpx": "TransportError",
    "confluent_kafka.schema_registry.error": "OAuthTokenError",
}
#: A registry's own codes for what it does not have, what is not compatible and what is not valid (its "API Error
#: Reference"): asked again, it says the same. A bare 404 is that of something on the way to it.
_FINAL_CODES = (range(40400, 40500), range(42200, 42300), range(409, 410))


class RecordDecoder:
    """Decodes with a deserializer, which gets the topic and the headers. Thread-safe, as they are."""

    def __init__(self, deserializer: Deserializer) -> None:
        self.deserializer = deserializer

    def decode(self, record: Record, value: bytes) -> object:
        """Return the body of a record that has a value.

        Raises:
            RegistryConnectionError: not this message is at fault.
            Exception: whatever the deserializer raised; it would again.
        """
        context = SerializationContext(record.topic(), MessageField.VALUE, list(headers_of(record) or ()))
        try:
            # In a copy: it leaves a context variable behind, and the event loop takes a new task when one has changed.
            return copy_context().run(self.deserializer, value, context)
        except:  # noqa: E722 - see `raised`
            raise classified("decoded", raised())  # noqa: B904 - it has its cause


class RecordEncoder:
    """Encodes with a serializer, which gets the topic and the headers. Thread-safe.

    Of a topic's first value two threads cannot be in it at once. The one that comes second may find the schema known to
    be registered, but go on with the id that it read before that, which is None (confluent-kafka 2.16).
    """

    def __init__(self, serializer: Serializer) -> None:
        self.serializer = serializer
        self._lock = threading.Lock()
        #: Of which a value was encoded. Grows under the lock; read without it: one that is missed waits once more.
        self._begun_topics: set[str] = set()

    def encode(self, topic: str, value: object, headers: list[tuple[str, Any]]) -> bytes | None:
        """Return a value's bytes; a serializer may add to `headers`.

        Raises:
            RegistryConnectionError: not this value is at fault.
            Exception: whatever the serializer raised; it would again.
        """
        # Taken over from a message that was consumed, say: readers would believe the first of two.
        headers[:] = [header for header in headers if header[0] != _SCHEMA_ID_HEADER]
        context = SerializationContext(topic, MessageField.VALUE, headers)
        try:
            if topic in self._begun_topics:
                return copy_context().run(self.serializer, value, context)
            with self._lock:
                encoded = copy_context().run(self.serializer, value, context)
                self._begun_topics.add(topic)
                return encoded
        except:  # noqa: E722 - see `raised`
            raise classified("encoded", raised())  # noqa: B904 - it has its cause

    def __reduce__(self) -> tuple[Any, tuple[Serializer]]:
        """Be pickled without the lock, where the serializer can be pickled."""
        return record_encoder, (self.serializer,)


#: One for each serializer, by its identity: handlers that share it share the lock. A serializer takes no attribute and
#: no weak reference; its encoder keeps it, so that no other has its identity meanwhile.
_encoders: WeakValueDictionary[int, RecordEncoder] = WeakValueDictionary()


def record_decoder(given: object) -> RecordDecoder | None:
    """Return what decodes with a deserializer of confluent-kafka; None where this is no such thing."""
    return RecordDecoder(given) if _is_one("decoder", given, Deserializer) else None  # type: ignore[arg-type] # asked


def record_encoder(given: object) -> RecordEncoder | None:
    """Return what encodes with a serializer of confluent-kafka; None where this is no such thing."""
    if not _is_one("encoder", given, Serializer):
        return None
    return _encoders.setdefault(id(given), RecordEncoder(given))  # type: ignore[arg-type] # asked


def _is_one(option: str, given: object, wanted: type) -> bool:
    """Tell whether this is an instance of `wanted`; `ConfigurationError` where it is near to one, and cannot serve."""
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__
    if not issubclass(kind, Serializer | Deserializer | SerializerBuilder | DeserializerBuilder):
        return False
    if issubclass(kind, SerializerBuilder | DeserializerBuilder):
        remedy = "give what it builds"
    elif not issubclass(kind, wanted):
        remedy = f"that one is for {'encoder' if option == 'decoder' else 'decoder'}="
    elif any(base.__name__.startswith("AsyncBase") for base in kind.__mro__):
        # Its `__call__` is a plain function that returns a coroutine.
        remedy = f"nobody would await it: give {name.removeprefix('Async')}, for `async def` handlers too"
    elif isinstance(given, type):
        remedy = f"that is the class: give {name}(...)"
    else:
        return True
    raise ConfigurationError(f"{option} takes an instance of a {wanted.__name__}, which {name} is not; {remedy}")


def classified(done: str, error: BaseException) -> BaseException:
    """Return the failure of a serializer as a `RegistryConnectionError` where it may pass, else as it is."""
    # A rule of a schema wraps what kept it from being applied.
    for cause in causes(error):
        if _is_passing(cause):
            passing = RegistryConnectionError(
                f"the value cannot be {done} for now: {describe(cause)}; see that the schema registry is up, and its "
                "client's url, credentials and timeout"
            )
            passing.__cause__ = error
            return passing
    return error


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return True
    code = _registry_code(error)
    if code is not None:
        return not any(code in final for final in _FINAL_CODES)
    return any(
        isinstance(error, kind)
        for module, name in _NOT_REACHED.items()
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    )


def _registry_code(error: BaseException) -> object | None:
    """Return a registry's code for what it refused, -1 where it gave none; None where another refused."""
    kind = getattr(sys.modules.get("confluent_kafka.schema_registry.error"), "SchemaRegistryError", None)
    if kind is None or not isinstance(error, kind):
        return None
    code: object = error.error_code
    return code if isinstance(code, int) else -1


def describe(error: BaseException) -> str:
    """Name an error by its class, with the registry's code where it has one. Its text may quote the value."""
    code = _registry_code(error)
    name = type(error).__name__
    return name if code is None else f"{name} {code}"
