"""How handlers are pickled for executors: by name where executors can import them, else by value.

A `WorkerResource` holds what belongs to threads, and handlers find theirs by name: so one that its module has under
its function's name is pickled by that name, and executors close the one that their handlers use. Others are pickled as
the function that makes them. A serializer of confluent-kafka holds locks and connections: one that a module has as a
global is pickled by that name, so that executors make their own.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

from confluent_kafka.serialization import Deserializer, Serializer
from pyspark import cloudpickle

from penstock.consumer.handlers.environment import WorkerResource
from penstock.errors import ConfigurationError, SinkError

#: Module and name of the class whose method decodes where a handler's decoder is a msgspec struct.
_MSGSPEC_DECODER = ("msgspec.json", "Decoder")


class _Pickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        """Reduce a resource, a serializer and a msgspec decoder; everything else as Spark has it."""
        kind = type(obj)
        if (kind.__module__, kind.__name__) == _MSGSPEC_DECODER:
            # It does not say itself how it is made, and ours are made of the struct alone.
            return kind, (obj.type,)
        if isinstance(obj, Serializer | Deserializer) and (place := _place_of(obj)) is not None:
            return _named, place
        if isinstance(obj, WorkerResource):
            make = made_by(obj)
            place = make.__module__, make.__qualname__
            is_global = place[0] != "__main__" and getattr(importlib.import_module(place[0]), place[1], None) is obj
            return (_named, place) if is_global else (WorkerResource, (make,))
        return super().reducer_override(obj)  # type: ignore[no-untyped-call] # cloudpickle ships no types


def made_by(resource: WorkerResource[Any]) -> Callable[..., Any]:
    """Return the function that makes a resource."""
    function: Callable[..., Any] = resource._make.__wrapped__  # type: ignore[attr-defined] # `contextmanager` keeps it there
    return function


def _place_of(what: object) -> tuple[str, str] | None:
    """Return the module and the name under which others can import something; None where no module has it."""
    for module, found in list(sys.modules.items()):
        for name, value in list(getattr(found, "__dict__", {}).items()) if module != "__main__" else ():
            if value is what:
                return module, name
    return None


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def pack(what: object) -> bytes:
    """Return something as bytes that another process can `unpack`; what cannot be pickled raises any exception."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(what)  # type: ignore[no-untyped-call] # the same
    return buffer.getvalue()


def require_packable(called: str, what: object) -> None:
    """Raise `ConfigurationError` where something, `called` so, cannot be pickled for executors."""
    try:
        pack(what)
    except Exception as error:
        raise ConfigurationError(
            f"{called} cannot be sent to Spark's executors: {type(error).__name__}: {error}; it refers to something "
            "that lives in this process only, such as a lock, a connection or a session: make that inside the "
            "handler, in a worker_resource or in a lifespan, or move the function, or a serializer as a global, into a "
            "module that executors import"
        ) from error


def unpack(packed: bytes) -> Any:
    """Return what was packed, on an executor; `SinkError` where it refers to what this process cannot import."""
    try:
        return cloudpickle.loads(packed)
    except ModuleNotFoundError as error:
        raise SinkError(
            f"an executor cannot import {error.name}, which a handler comes from; ship it with spark-submit "
            "--py-files (or SparkContext.addPyFile), or install it where executors run"
        ) from error
    except AttributeError as error:
        raise SinkError(
            f"what executors import is not what the driver has: {error}; ship the same version of the handlers' "
            "modules to both"
        ) from error
