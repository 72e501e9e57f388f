"""The handler sink before Spark runs: refusals at construction, and how its handlers travel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from penstock.consumer import Handler, handler
from penstock.errors import ConfigurationError, SinkError
from penstock.message import Message
from penstock.spark_sink.queries.supervise import FailureKind, kind_of
from penstock.spark_sink.sinks.handlers import sink as handler_sink
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.telemetry import Telemetry


def nothing(_: Message) -> None:
    """Handle nothing."""


def sink_of(one: Handler | Callable[..., object], **options: Any) -> HandlerSink:
    made = one if isinstance(one, Handler) else handler(one)
    return HandlerSink(**{"handlers": {"orders": made}, "group": "billing", "parallelism": 4, **options})


NAMED = {"name": "invoices", "bootstrap_servers": "there:1"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parallelism": 0}, "parallelism must be a whole number of at least 1"),
        ({"group": " "}, "group must be a name"),
        ({"max_in_flight": 0}, "max_in_flight must be a whole number"),
        ({"overlap": "perhaps"}, "overlap must be 'refused' or 'allowed', but is 'perhaps'"),
        ({"handlers": {}}, "there is no handler"),
        ({"handlers": {"orders": nothing}}, r"must be made by penstock.consumer.handler\(...\), but is a function"),
        # What executors cannot keep.
        ({"retry_delays": [5.0]}, "the handler nothing of orders has retry_delays, but a query does not read retry"),
        ({"rate": 10.0}, "the handler nothing of orders has a rate, which executors cannot share"),
        ({"key_rate": 10.0}, "the handler nothing of orders has a rate, which executors cannot share"),
        ({"on_failure": "hold"}, "the handler nothing of orders has on_failure='hold', but a batch ends only when"),
        # Where dead letters and results go.
        ({"on_failure": "dead_letter"}, r"nothing of orders has dead letters; give the HandlerSink name=\.\.\."),
        ({"on_failure": "dead_letter", **NAMED, "config": {"oauth_cb": print}}, "oauth_cb.* cannot travel"),
        ({"to": "invoices"}, r"nothing of orders has to='invoices'; give the HandlerSink name=\.\.\."),
        ({"name": "invoices"}, "the sink invoices publishes; give bootstrap_servers"),
        ({**NAMED, "to": "invoices", "ledger_topic": "invoices"}, "has to='invoices', the topic of the ledger"),
        ({**NAMED, "config": {"transactional.id": "x"}}, r"config\['transactional.id'\] belongs to HandlerSink"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], sentence: str) -> None:
    of_sink = {name: value for name, value in options.items() if name in {field.name for field in fields(HandlerSink)}}
    of_handler = {name: value for name, value in options.items() if name not in of_sink}

    with pytest.raises(ConfigurationError, match=sentence):
        sink_of(handler(nothing, **of_handler), **of_sink)


def test_a_sink_travels_with_its_settings_and_leaves_telemetry_behind() -> None:
    sink = sink_of(handler(nothing, key="header:account"), max_in_flight=7, telemetry=Telemetry())

    again = cloudpickle.loads(cloudpickle.dumps(sink))

    assert (again.group, again.parallelism, again.max_in_flight, again.telemetry) == ("billing", 4, 7, None)
    (one,) = again.handlers.values()
    assert one.key(Message.of(b"", headers=[("account", b"42")])) == b"42"
    assert again.last_report is None


MODULE = """
import threading

from confluent_kafka.serialization import Deserializer
from penstock.consumer import WorkerResource

def session():
    yield object()

session = WorkerResource(session)

class Decoder(Deserializer):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, value, ctx=None):
        return value

decoder = Decoder()

def decode(value):
    return decoder(value)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that this process can import."""
    (tmp_path / "shop_of_handlers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    yield importlib.import_module("shop_of_handlers")
    del sys.modules["shop_of_handlers"]


def test_an_option_that_only_this_process_has_is_named_and_what_a_module_has_travels_by_its_name(shop: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the handler nothing of orders cannot be sent .*lock"):
        sink_of(handler(nothing, decoder=shop.decoder))

    sink = sink_of(handler(nothing, decoder=shop.decode), resources=(shop.session,))
    again = cloudpickle.loads(cloudpickle.dumps(sink))

    assert again.handlers["orders"].decoder is shop.decode
    assert again.resources == (shop.session,), "the one that the module's handlers use"


def schema(**changed: Any) -> StructType:
    kinds = {"key": BinaryType(), "value": BinaryType(), "topic": StringType(), "partition": IntegerType()}
    found = StructType()
    for name, kind in {**kinds, "offset": LongType(), **changed}.items():
        if kind is not None:
            found.add(name, kind)
    return found


def test_a_frame_that_lacks_a_column_or_has_another_type_is_refused_with_a_sentence() -> None:
    sink = sink_of(nothing)

    sink_of(nothing, headers=False).check(schema())
    with pytest.raises(SinkError, match=r"has no column headers.*includeHeaders=true"):
        sink.check(schema())
    with pytest.raises(SinkError, match="lacks offset"):
        sink.check(schema(offset=None))
    sink_of(nothing, headers=False).check(schema(value=StringType()))
    with pytest.raises(
        SinkError, match="column value of the frame for the handlers of billing is bigint; messages are text"
    ):
        sink.check(schema(value=LongType()))


class Settings:
    """The part of a session that is asked."""

    def __init__(self, **settings: str) -> None:
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}
        self.conf = self

    def get(self, key: str, default: str) -> str:
        return self._settings.get(key, default)


ONCE = {"spark_master": "spark://host:7077", "spark_stage_maxConsecutiveAttempts": "1"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spark_speculation": "True"}, "spark.speculation is true:.* --conf spark.speculation=false,"),
        ({"spark_master": "yarn"}, "--conf spark.stage.maxConsecutiveAttempts=1,"),
        ({"spark_master": "local-cluster[2,1,700]"}, "maxConsecutiveAttempts is 4:"),
        ({**ONCE, "spark_decommission_enabled": "true"}, "--conf spark.stage.ignoreDecommissionFetchFailure=false,"),
    ],
)
def test_settings_that_would_run_two_handlers_of_a_key_at_once_are_refused(settings: dict[str, str], says: str) -> None:
    batch: Any = mock.Mock(sparkSession=Settings(**settings))  # the part of a session that is asked
    behind = mock.patch.object(handler_sink, "seconds_until_killed", side_effect=ZeroDivisionError)

    with mock.patch.object(HandlerSink, "check"), mock.patch.object(HandlerSink, "_messages"), behind:
        with pytest.raises(ConfigurationError, match=says) as caught:
            sink_of(nothing)(batch, 0)
        with pytest.raises(ZeroDivisionError):
            sink_of(nothing, overlap="allowed")(batch, 0)

    assert kind_of(caught.value) is FailureKind.PERMANENT
    assert "give the sink overlap='allowed'" in str(caught.value)
