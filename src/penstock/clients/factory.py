"""Makes all Kafka clients, each from the user's one configuration; and where they are destroyed.

The client library's destructor waits for the client's own threads, without a bound: one that hangs, in a callback say,
would hold up whoever drops the client. On one of those threads it would end the process; there a client that hangs in a
circle of objects may be found by Python's search for garbage. So every client that is dropped is handed to a thread of
its own, and what is left at the end of the interpreter ends with the process.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaException
from confluent_kafka import admin as kafka_admin

from penstock.clients.client_log import ClientWords, client_log
from penstock.clients.kafka_errors import reason
from penstock.clients.tokens import with_tokens
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, is_classic, is_client_text, not_empty, positive_int

#: Seconds for which whoever dropped or found the client may still refer to it, and between two looks.
_RELEASE_BUDGET_S = 1.0
_POLL_S = 0.01
#: Seconds that brokers may take to say which topics a member asks for.
_TOPICS_S = 5.0

#: Adds a reference that nobody takes back, so that the destructor is never called.
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


#: Our own setting: how many copies a topic has that penstock creates.
REPLICATION_FACTOR = "penstock.replication.factor"


class DestroyedElsewhere:
    """A client of the library that may be dropped on any thread: nobody waits for its destructor."""

    # What it calls are defaults: at the end of the interpreter a module has lost its names.
    def __del__(self, is_finalizing: Any = sys.is_finalizing, keep_for_ever: Any = _keep_for_ever) -> None:
        if is_finalizing():
            keep_for_ever(self)
        else:
            # It lives on in the list. Nothing waits here: a thread of `threading` would be waited for until it runs.
            _thread.start_new_thread(_destroy, ([self],))


def _destroy(client: list[Any]) -> None:
    deadline = time.monotonic() + _RELEASE_BUDGET_S
    # The list and the call of getrefcount refer to it.
    while sys.getrefcount(client[0]) > 2 and time.monotonic() < deadline:  # noqa: PLR2004 - see above
        time.sleep(_POLL_S)
    left = weakref.ref(client[0])
    client.clear()
    if left() is not None:
        # What lies in the circle with it was found and kept, and would be found anywhere again, without a second
        # `__del__`.
        gc.collect()


# What each kind of client must not be handed is in its `left_out`. The library itself ignores what only another kind
# takes, and logs that, which `ClientWords` drops. It does not know the callbacks of its own Python there, nor our
# settings.


class TopicsNotKnownError(KafkaException):
    """Brokers did not say in time which topics a member asks for: it has not joined its group; join again later."""


class Consumer(DestroyedElsewhere, confluent_kafka.Consumer):
    """The library's, with what it said last."""

    left_out = frozenset({"on_delivery", REPLICATION_FACTOR})
    words: ClientWords
    #: Whether it joins groups by `group.protocol=consumer` (KIP-848).
    is_assigned_by_brokers: bool

    def subscribe(self, topics: list[str], *arguments: Any, **callbacks: Any) -> None:
        """Join the group, or change what it reads. `TopicsNotKnownError`: nothing was done, for want of an answer.

        With KIP-848, brokers assign topics by their ids. A member that does not know the name of one yet asks for it,
        and a heartbeat that falls due meanwhile, as when the last one was answered late, says that the member owns
        nothing. To the brokers that is a partition given back: they give it to another member while this one begins
        with it, and both commit (librdkafka 2.16, Kafka 4.3; seen as results that came twice). A member that knows the
        names takes what it is assigned before its next heartbeat. The library itself asks for them again every
        `topic.metadata.refresh.interval.ms`, before it forgets them.
        """
        if self.is_assigned_by_brokers:
            deadline = time.monotonic() + _TOPICS_S
            for topic in topics:
                try:
                    self.list_topics(topic, timeout=max(_POLL_S, deadline - time.monotonic()))
                except KafkaException as error:
                    raise TopicsNotKnownError(*error.args) from None
        super().subscribe(topics, *arguments, **callbacks)


class Producer(DestroyedElsewhere, confluent_kafka.Producer):
    """The library's, with what it said last."""

    left_out = frozenset({"on_commit", REPLICATION_FACTOR})
    words: ClientWords


class AdminClient(DestroyedElsewhere, kafka_admin.AdminClient):
    """The library's, with what it said last, and the addresses and the configuration that it was made from."""

    #: For the library it is a producer; this one must not ask for an id. Nobody serves its events between two requests.
    left_out = frozenset(
        {
            "debug",
            "default.topic.config",
            "enable.gapless.guarantee",
            "enable.idempotence",
            "on_commit",
            "on_delivery",
            REPLICATION_FACTOR,
            "statistics.interval.ms",
            "stats_cb",
            "throttle_cb",
            "transactional.id",
        }
    )
    words: ClientWords
    servers: str
    config: ClientConfig
    #: Copies of each topic that it creates; None: not said.
    replication_factor: int | None


AnyClient = Consumer | Producer | AdminClient
ClientT = TypeVar("ClientT", Consumer, Producer, AdminClient)

_UNSECURED = "enable.sasl.oauthbearer.unsecure.jwt"

#: Milliseconds between two tries to reach a broker at most: with the client's own 10 s, work would go on that much
#: later than the broker is back.
_LONGEST_RECONNECT_MS = 1_000
#: Milliseconds that a broker may take to answer a producer: with the client's own 60 s, what was sent to a broker that
#: froze waits so long, though another leads the partition since. A transactional producer has its own limit.
_PRODUCER_ANSWER_MS = 10_000
#: Milliseconds after which an admin client asks again who leads a partition.
_LEADERS_AGE_MS = 3_000


class ClientRefusedError(ConfigurationError):
    """The client library refused a setting."""


def consumer(bootstrap_servers: str, config: ClientConfig) -> Consumer:
    """Return a consumer; of the settings, by librdkafka's names, what only producers take is left out.

    `ConfigurationError` where the client library refused a setting; `BrokerConnectionError`, which is a
    `KafkaException`, too, where `oauth_cb` gave no token.
    """
    client = _made(Consumer, bootstrap_servers, config)
    client.is_assigned_by_brokers = not is_classic(config)
    return client


def producer(bootstrap_servers: str, config: ClientConfig) -> Producer:
    """Return a producer; otherwise as `consumer`."""
    return _made(Producer, bootstrap_servers, config)


def admin(bootstrap_servers: str, config: ClientConfig) -> AdminClient:
    """Return an admin client; otherwise as `consumer`."""
    factor = config.get(REPLICATION_FACTOR)
    if isinstance(factor, str) and factor.isdecimal():
        factor = int(factor)
    if factor is not None:
        positive_int(f"config[{REPLICATION_FACTOR!r}]", factor)
    client = _made(AdminClient, bootstrap_servers, config)
    client.servers, client.config, client.replication_factor = bootstrap_servers, config, factor
    return client


def settings(kind: type[AnyClient], bootstrap_servers: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a client of that kind is made from: what it takes, the addresses, and our log, rationed.

    `ConfigurationError` where there are no addresses, or two that differ, or `oauth_cb` cannot be used; `NoTokenError`
    where that gave no token.
    """
    not_empty("bootstrap_servers", bootstrap_servers)
    given = config.get("bootstrap.servers", bootstrap_servers)
    if given != bootstrap_servers:
        raise ConfigurationError(
            f"bootstrap_servers is {bootstrap_servers!r} but config['bootstrap.servers'] is {given!r}; give it once"
        )
    taken = {key: value for key, value in with_tokens(config).items() if key not in kind.left_out}
    made = {"logger": client_log, **taken, "bootstrap.servers": bootstrap_servers}
    for key, value in made.items():
        if isinstance(value, str) and not is_client_text(value):
            raise ClientRefusedError(f"config[{key!r}] must be text in UTF-8, without a NUL character; correct it")
    if not callable(made.get("error_cb", print)):
        raise ConfigurationError(f"config['error_cb'] must be a function, but is a {type(made['error_cb']).__name__}")
    words = ClientWords(made, made["logger"])
    made |= {"logger": words, "error_cb": words.hear}
    if "reconnect.backoff.ms" not in config:
        made.setdefault("reconnect.backoff.max.ms", _LONGEST_RECONNECT_MS)
    if kind is Producer and "transactional.id" not in made:
        made.setdefault("socket.timeout.ms", _PRODUCER_ANSWER_MS)
    if kind is AdminClient:
        # Else a request that waits for a broker which is down connects to it without any pause (librdkafka 2.16: each
        # change of its state asks for a connection at once): 92 to 189 % of a core were seen, and 0 % so.
        made.setdefault("enable.sparse.connections", False)
        # Else the ends of a partition whose leader has changed are asked for with the old leader epoch, and refused,
        # for up to a quarter of an hour (the same version: the refusal does not make it look for the leader).
        made.setdefault("metadata.max.age.ms", _LEADERS_AGE_MS)
    return made


def _made(kind: type[ClientT], bootstrap_servers: str, given: ClientConfig) -> ClientT:
    config = settings(kind, bootstrap_servers, given)
    try:
        client = kind(config)
        client.words = config["logger"]
    except (KafkaException, TypeError, ValueError) as error:
        said = reason(error) if isinstance(error, KafkaException) else str(error)
        # The library repeats some values. Any may be a secret, as one that was given under another one's name; so the
        # error is not chained either.
        for value in config.values():
            if isinstance(value, str):
                said = said.replace(f'"{value}"', '"***"')
    else:
        if str(config.get(_UNSECURED, "")).lower() == "true":
            # The library makes these tokens where events are served, which a client that only answers questions is not.
            client.poll(0)
        return client
    raise ClientRefusedError(f"the Kafka client refused its configuration: {said}; correct that key in config")
