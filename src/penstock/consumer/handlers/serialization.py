"""Decoders and encoders: from a message's value to its `body`, and from an object to the value of a published message.

confluent-kafka's serializers and deserializers serve as encoders and decoders. Most of them talk to a schema registry,
which needs the extra `schema-registry`. This file imports nothing of that extra: a user with such a serializer has
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
#: The error that a registry's client raises when it does not reach the registry, by module.
_NOT_REACHED = {
    "httpx2": "TransportError",
    "httpx": "TransportError",
    "confluent_kafka.schema_registry.error": "OAuthTokenError",
}
#: A registry's own codes for "not found", "not compatible" and "not valid" (its "API Error Reference"). A repeated
#: request gets the same answer. A bare 404 comes from a proxy in between.
_FINAL_CODES = (range(40400, 40500), range(42200, 42300), range(409, 410))


class RecordDecoder:
    """Decodes with a deserializer, which gets the topic and the headers. Thread-safe, as deserializers are."""

    def __init__(self, deserializer: Deserializer) -> None:
        self.deserializer = deserializer

    def decode(self, record: Record, value: bytes) -> object:
        """Return the body of a record that has a value.

        Raises:
            RegistryConnectionError: the registry failed; the message is not at fault.
            Exception: an error of the deserializer, which would come again.
        """
        context = SerializationContext(record.topic(), MessageField.VALUE, list(headers_of(record) or ()))
        try:
            # In a copy: it sets a context variable, and the event loop takes a new task after such a change.
            return copy_context().run(self.deserializer, value, context)
        except:  # noqa: E722 - see `raised`
            raise classified("decoded", raised())  # noqa: B904 - it carries its cause


class RecordEncoder:
    """Encodes with a serializer, which gets the topic and the headers. Thread-safe.

    The first value of a topic is encoded under a lock. Without it, a second thread may see the schema as registered,
    but continue with the schema id that it read before, which is None (confluent-kafka 2.16).
    """

    def __init__(self, serializer: Serializer) -> None:
        self.serializer = serializer
        self._lock = threading.Lock()
        #: Topics with an encoded value. Grows under the lock. Read without it: a late reader takes the lock once more.
        self._begun_topics: set[str] = set()

    def encode(self, topic: str, value: object, headers: list[tuple[str, Any]]) -> bytes | None:
        """Return a value's bytes; a serializer may add to `headers`.

        Raises:
            RegistryConnectionError: the registry failed; the value is not at fault.
            Exception: an error of the serializer, which would come again.
        """
        # It may be copied from a consumed message, and readers believe the first of two such headers.
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
            raise classified("encoded", raised())  # noqa: B904 - it carries its cause

    def __reduce__(self) -> tuple[Any, tuple[Serializer]]:
        """Pickle it without the lock, if the serializer can be pickled."""
        return encoder_of, (self.serializer,)


#: The encoder of each serializer, by `id()`: handlers with the same serializer share one lock. A serializer allows no
#: attributes and no weak references. Its encoder keeps it alive, so its id is not reused meanwhile.
_encoders: WeakValueDictionary[int, RecordEncoder] = WeakValueDictionary()


def _is_instance(option: str, spec: object, wanted: type) -> bool:
    """Return whether `spec` is an instance of `wanted`; raise `ConfigurationError` for a related type that is not."""
    kind = spec if isinstance(spec, type) else type(spec)
    name = kind.__name__
    if not issubclass(kind, Serializer | Deserializer | SerializerBuilder | DeserializerBuilder):
        return False
    if issubclass(kind, SerializerBuilder | DeserializerBuilder):
        remedy = "give what it builds"
    elif not issubclass(kind, wanted):
        remedy = f"that one is for {'encoder' if option == 'decoder' else 'decoder'}="
    elif any(base.__name__.startswith("AsyncBase") for base in kind.__mro__):
        # Its `__call__` is a plain function that returns a coroutine, so `is_async` does not see it.
        remedy = f"no code would await it: give {name.removeprefix('Async')}, for `async def` handlers too"
    elif isinstance(spec, type):
        remedy = f"that is the class: give {name}(...)"
    else:
        return True
    raise ConfigurationError(f"{option} takes an instance of a {wanted.__name__}, which {name} is not; {remedy}")


def classified(done: str, error: BaseException) -> BaseException:
    """Return a serializer's error: as a `RegistryConnectionError` if it is transient, else unchanged."""
    # A schema rule wraps the error that stopped it, so the causes are checked too.
    for cause in causes(error):
        if _is_transient(cause):
            transient = RegistryConnectionError(
                f"the value cannot be {done} for now: {describe(cause)}; see that the schema registry is up, and its "
                "client's url, credentials and timeout"
            )
            transient.__cause__ = error
            return transient
    return error


def _is_transient(error: BaseException) -> bool:
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
    """Return the code in a registry's error, -1 if it has none; None for the error of another component."""
    kind = getattr(sys.modules.get("confluent_kafka.schema_registry.error"), "SchemaRegistryError", None)
    if kind is None or not isinstance(error, kind):
        return None
    code: object = error.error_code
    return code if isinstance(code, int) else -1


def describe(error: BaseException) -> str:
    """Return the class of an error and the registry's code, if any; not its text, which may quote the value."""
    code = _registry_code(error)
    name = type(error).__name__
    return name if code is None else f"{name} {code}"


#: Makes a body from bytes.
Decode = Callable[[bytes], object]
#: A handler's decoder: of a value alone, or of a record.
Decoder = Decode | RecordDecoder
#: A name, a type that JSON is checked against, a deserializer of confluent-kafka, or a callable of bytes.
DecoderSpec = str | type | UnionType | Decode | None

#: Types that do not describe the content of the JSON, or that users may mean as "leave the value unchanged".
_NO_DECODERS = (str, bytes, bytearray, bool, dict, list, tuple, set, frozenset)

_scan = json.JSONDecoder().raw_decode


def _decode_json(value: bytes) -> object:
    """Do the same as `json.loads`, in half the time for the usual bytes: UTF-8 without leading space."""
    try:
        text = value.decode()
        body, end = _scan(text)
        if end == len(text):
            return body
    except ValueError:
        pass
    # Another encoding, space around the text, or no JSON. For valid UTF-8 the result is the same.
    return json.loads(value)


def decoder_of(spec: DecoderSpec) -> Decoder | None:
    """Return the decoder for a user's option, or None; raise `ConfigurationError` if the option is no decoder.

    For a deserializer of confluent-kafka it is a `RecordDecoder`, because the deserializer needs topic and headers.
    """
    if spec is None:
        return None
    if spec == "json":
        return _decode_json
    if _is_instance("decoder", spec, Deserializer):
        return RecordDecoder(spec)  # type: ignore[arg-type] # checked above
    if _is_type(spec):
        if spec in _NO_DECODERS:
            raise ConfigurationError(
                f"decoder={_name_of(spec)} does not describe the content of a value; give 'json' for any "
                "JSON, bytes.decode for text, or a function of bytes"
            )
        return _json_functions("decoder", spec)[0]
    if isinstance(spec, str) or not callable(spec):
        raise ConfigurationError(
            "decoder must be 'json', a pydantic model, a dataclass, a msgspec struct, a deserializer of "
            f"confluent-kafka or a callable of bytes, but is {_name_of(spec)}"
        )
    return spec


def _is_type(spec: object) -> bool:
    """Return whether this is a type of JSON content: a class, `list[Model]`, or a `NewType`."""
    return isinstance(spec, type | NewType) or get_origin(spec) is not None


def _json_functions(option: str, spec: Any) -> tuple[Decode, Encode]:
    """Return a JSON decoder and a JSON encoder of a type, by the first installed package that knows the type."""
    why = []
    for name in ("pydantic", "msgspec"):
        try:
            module = import_module(name)
            if name == "pydantic":
                adapter = module.TypeAdapter(spec)
                # Without "error" it would also write values of other types, with a mere warning.
                return adapter.validate_json, partial(adapter.dump_json, warnings="error")
            # The decoder takes any class, and fails later at each value of an unknown one. The schema fails at once.
            module.json.schema(spec)
            return module.json.Decoder(spec).decode, module.json.encode
        except ImportError:
            why.append(f"{name} is not installed")
        except Exception as error:  # noqa: BLE001 - each package has its own error for an unknown type
            why.append(f"{name} says: {(str(error).splitlines() or [type(error).__name__])[0]}")
    raise ConfigurationError(
        f"{option}={_name_of(spec)} needs pydantic or msgspec, for a type of JSON ({'; '.join(why)}); install one of "
        "them, or give 'json' or a function"
    )


def _name_of(spec: object) -> str:
    """Return an option's value in words; for an object, which may hold secrets, only its type."""
    if isinstance(spec, type):
        return spec.__name__
    return repr(spec) if isinstance(spec, str | bytes | int) or get_origin(spec) else f"a {type(spec).__name__}"


#: Makes bytes or text from an object.
Encode = Callable[[Any], bytes | str | None]
#: A handler's encoder: of a value alone, or of a value for a topic, with headers.
Encoder = Encode | RecordEncoder
#: A name, a model class, a serializer of confluent-kafka, or a callable of an object.
EncoderSpec = str | type | UnionType | Encode | None


def encoder_of(spec: EncoderSpec) -> Encoder | None:
    """Return the encoder for a user's option, or None.

    Args:
        spec: "json"; a pydantic model (recognized by `model_dump_json`); another type that pydantic or msgspec writes
            as JSON; a serializer of confluent-kafka, which gets the topic and the headers; or any callable of an object
            that returns bytes or text, such as `str`.

    Raises:
        ConfigurationError: it is none of these.
    """
    if spec is None:
        return None
    if spec == "json":
        return _json
    dump: Encode | None = getattr(spec, "model_dump_json", None)
    if dump is not None and isinstance(spec, type):
        return dump  # it writes by the class of each value, which may have more fields than the model
    if _is_instance("encoder", spec, Serializer):
        return _encoders.setdefault(id(spec), RecordEncoder(spec))  # type: ignore[arg-type] # checked above
    if _is_type(spec) and spec is not str:
        if spec is bytes or spec is bytearray:
            raise ConfigurationError(
                f"encoder={_name_of(spec)} turns a number into zero bytes; leave it out if the handler returns "
                "bytes, or give a function"
            )
        return _json_functions("encoder", spec)[1]
    if isinstance(spec, str) or not callable(spec):
        raise ConfigurationError(
            "encoder must be 'json', a pydantic model, a dataclass, a msgspec struct, a serializer of confluent-kafka "
            f"or a callable of an object, but is {_name_of(spec)}"
        )
    return spec


def _json(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # `decoder="json"` accepts lone surrogates, which UTF-8 cannot encode. Here they become JSON escapes.
    return text.encode("utf-8", "backslashreplace")
