"""Decoders make a message's `body` of its value; encoders make the value of a published message of an object.

confluent-kafka's own serializers and deserializers serve as both. Most of them speak with a schema registry. What it
brings along is the extra `schema-registry`: nothing of that is imported here. One who gives such a serializer has
imported it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Any, NewType, get_origin
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
        return encoder_of, (self.serializer,)


#: One for each serializer, by its identity: handlers that share it share the lock. A serializer takes no attribute and
#: no weak reference; its encoder keeps it, so that no other has its identity meanwhile.
_encoders: WeakValueDictionary[int, RecordEncoder] = WeakValueDictionary()


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


#: Makes a body of bytes.
Decode = Callable[[bytes], object]
#: What a handler decodes with: a value alone, or a record.
Decoder = Decode | RecordDecoder
#: A name, a type that JSON is checked against, a deserializer of confluent-kafka, or a callable of bytes.
DecoderSpec = str | type | UnionType | Decode | None

#: Types whose name says nothing of what is in the JSON, or is taken for the value as it stands.
_NO_DECODERS = (str, bytes, bytearray, bool, dict, list, tuple, set, frozenset)

_scan = json.JSONDecoder().raw_decode


def _decode_json(value: bytes) -> object:
    """Return what `json.loads` does, in half the time for the bytes that nearly all are: UTF-8 and no space before."""
    try:
        text = value.decode()
        body, end = _scan(text)
        if end == len(text):
            return body
    except ValueError:
        pass
    # Another encoding, space around it, or no JSON at all: where UTF-8 was read to its end, that says the same.
    return json.loads(value)


def decoder_of(given: DecoderSpec) -> Decoder | None:
    """Return the function that decodes a value, or None; `ConfigurationError` where nothing can be made of it.

    A deserializer of confluent-kafka gives what decodes a record: it gets the topic and the headers.
    """
    if given is None:
        return None
    if given == "json":
        return _decode_json
    if _is_one("decoder", given, Deserializer):
        return RecordDecoder(given)  # type: ignore[arg-type] # asked
    if _is_type(given):
        return _decode_as(given)
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            "decoder must be 'json', a pydantic model, a dataclass, a msgspec struct, a deserializer of "
            f"confluent-kafka or a callable of bytes, but is {_name_of(given)}"
        )
    return given


def _decode_as(given: object) -> Decode:
    """Return what decodes JSON as a type, by the first of the user's packages that knows it."""
    if given in _NO_DECODERS:
        raise ConfigurationError(
            f"decoder={_name_of(given)} tells nothing of what is in a value; give 'json' for what JSON holds, "
            "bytes.decode for text, or a function of bytes"
        )
    decode: Decode = _knowing("decoder", given)[0]
    return decode


def _is_type(given: object) -> bool:
    """Tell whether it names what JSON holds: a class, `list[Model]`, or a new name for such a type."""
    return isinstance(given, type | NewType) or get_origin(given) is not None


def _knowing(option: str, given: Any) -> tuple[Decode, Encode]:
    """Return what makes a type of JSON, and JSON of it, by the first of the user's packages that knows it."""
    why = []
    for name in ("pydantic", "msgspec"):
        try:
            module = import_module(name)
            if name == "pydantic":
                adapter = module.TypeAdapter(given)
                # Else it would write a value of another type, too, with a warning.
                return adapter.validate_json, partial(adapter.dump_json, warnings="error")
            # It takes any class, and refuses each value of one that it does not know; for that it has no schema.
            module.json.schema(given)
            return module.json.Decoder(given).decode, module.json.encode
        except ImportError:
            why.append(f"{name} is not installed")
        except Exception as error:  # noqa: BLE001 - each has its own for a type that it does not know
            why.append(f"{name} says: {(str(error).splitlines() or [type(error).__name__])[0]}")
    raise ConfigurationError(
        f"{option}={_name_of(given)} needs pydantic or msgspec, for a type of JSON ({'; '.join(why)}); install one of "
        "them, or give 'json' or a function"
    )


def _name_of(given: object) -> str:
    """Name what was given; of an object, which may hold anything, its type."""
    if isinstance(given, type):
        return given.__name__
    return repr(given) if isinstance(given, str | bytes | int) or get_origin(given) else f"a {type(given).__name__}"


#: Makes bytes, or text, of an object.
Encode = Callable[[Any], bytes | str | None]
#: What a handler encodes with: the value alone, or the value for a topic, with headers.
Encoder = Encode | RecordEncoder
#: A name, a model class, a serializer of confluent-kafka, or a callable of an object.
EncoderSpec = str | type | UnionType | Encode | None


def encoder_of(given: EncoderSpec) -> Encoder | None:
    """Return the function that encodes a value, or None.

    Args:
        given: "json"; a pydantic model (known by `model_dump_json`); another type that JSON is made of, by pydantic or
            msgspec; a serializer of confluent-kafka, which gets the topic and the headers; or any callable of an object
            that returns bytes or text, `str` among them.

    Raises:
        ConfigurationError: it is none of these.
    """
    if given is None:
        return None
    if given == "json":
        return _json
    dump: Encode | None = getattr(given, "model_dump_json", None)
    if dump is not None and isinstance(given, type):
        return dump  # of the class of each value, which may have more fields
    if _is_one("encoder", given, Serializer):
        return _encoders.setdefault(id(given), RecordEncoder(given))  # type: ignore[arg-type] # asked
    if _is_type(given) and given is not str:
        return _encode_as(given)
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            "encoder must be 'json', a pydantic model, a dataclass, a msgspec struct, a serializer of confluent-kafka "
            f"or a callable of an object, but is {_name_of(given)}"
        )
    return given


def _encode_as(given: object) -> Encode:
    """Return what makes JSON of a type."""
    if given is bytes or given is bytearray:
        raise ConfigurationError(
            f"encoder={_name_of(given)} makes zero bytes of a number; leave it out where the handler returns bytes, or "
            "give a function"
        )
    return _knowing("encoder", given)[1]


def _json(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which `decoder="json"` takes, has no UTF-8: this writes it as JSON's own escape.
    return text.encode("utf-8", "backslashreplace")
