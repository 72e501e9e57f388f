"""Makes all Kafka clients, each from the user's one configuration, and destroys them safely.

The client library's destructor waits for the client's own threads without a bound. A thread that hangs, for example in
a callback, would block the thread that drops the client. Run on one of the client's own threads, the destructor would
end the process; garbage collection there may find a client in a reference cycle. So a thread of its own destroys every
dropped client, and clients that are left at the end of the interpreter end with the process.
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

#: Seconds to wait for the last references to a dropped client, and between two looks.
_RELEASE_BUDGET_S = 1.0
_POLL_S = 0.01
#: Seconds that brokers may take to describe the topics of a member.
_TOPICS_S = 5.0

#: Adds a reference that is never removed, so that the destructor is never called.
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


#: Our own setting: how many copies a topic has that penstock creates.
REPLICATION_FACTOR = "penstock.replication.factor"


class DestroyedElsewhere:
    """A client of the library that may be dropped on any thread: nobody waits for its destructor."""

    # The functions it calls are default arguments: at the end of the interpreter a module has lost its names.
    def __del__(self, is_finalizing: Any = sys.is_finalizing, keep_for_ever: Any = _keep_for_ever) -> None:
        if is_finalizing():
            keep_for_ever(self)
        else:
            # The list keeps it alive. Starting a thread of `threading` would wait until that runs.
            _thread.start_new_thread(_destroy, ([self],))


def _destroy(client: list[Any]) -> None:
    deadline = time.monotonic() + _RELEASE_BUDGET_S
    # The list and the call of getrefcount refer to it.
    while sys.getrefcount(client[0]) > 2 and time.monotonic() < deadline:  # noqa: PLR2004 - see above
        time.sleep(_POLL_S)
    left = weakref.ref(client[0])
    client.clear()
    if left() is not None:
        # It is in a reference cycle. A later collection, on any thread, would destroy it without a second `__del__`.
        gc.collect()


# `left_out` names the settings that a kind of client must not get. The library ignores settings of other kinds, with a
# log line that `ClientWords` drops, but it does not ignore Python callbacks and our own settings.


class TopicsNotKnownError(KafkaException):
    """Brokers did not describe the topics of a member in time. It has not joined its group; join again later."""


class Consumer(DestroyedElsewhere, confluent_kafka.Consumer):
    """The library's consumer, with its last log lines."""

    left_out = frozenset({"on_delivery", REPLICATION_FACTOR})
    words: ClientWords
    #: Whether it joins groups by `group.protocol=consumer` (KIP-848).
    is_assigned_by_brokers: bool

    def subscribe(self, topics: list[str], *arguments: Any, **callbacks: Any) -> None:
        """Join the group, or change the topics. `TopicsNotKnownError`: no answer of the brokers, nothing was changed.

        With KIP-848, brokers assign topics by id. A member that does not know the name of an id yet asks for it. If a
        heartbeat falls due meanwhile, it reports that the member owns nothing. The brokers then give the partition to
        another member while this one begins to read it, and both commit (librdkafka 2.16, Kafka 4.3; seen as results
        that came twice). A member that knows the names first takes its partitions before its next heartbeat. The
        library refreshes them every `topic.metadata.refresh.interval.ms`, before it forgets them.
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
    """The library's producer, with its last log lines."""

    left_out = frozenset({"on_commit", REPLICATION_FACTOR})
    words: ClientWords


class AdminClient(DestroyedElsewhere, kafka_admin.AdminClient):
    """The library's admin client, with its last log lines, its addresses and its configuration."""

    #: The library makes it as a producer: it must not ask for a producer id. Its events are served only in requests.
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
    #: Replication factor of the topics that it creates; None: not set.
    replication_factor: int | None


AnyClient = Consumer | Producer | AdminClient
ClientT = TypeVar("ClientT", Consumer, Producer, AdminClient)

_UNSECURED = "enable.sasl.oauthbearer.unsecure.jwt"

#: Callbacks of the user, besides `error_cb`, that the library calls with one argument.
_CALLBACKS = ("stats_cb", "throttle_cb")
#: Most milliseconds between two tries to reach a broker. With the client's own 10 s, work would resume up to 10 s after
#: the broker is back.
_LONGEST_RECONNECT_MS = 1_000
#: Milliseconds that a broker may take to answer a producer. With the client's own 60 s, records sent to a frozen broker
#: wait that long although another broker leads the partition. A transactional producer has its own limit.
_PRODUCER_ANSWER_MS = 10_000
#: Milliseconds after which an admin client refreshes the leaders of partitions.
_LEADERS_AGE_MS = 3_000


class ClientRefusedError(ConfigurationError):
    """The client library refused a setting."""


def consumer(bootstrap_servers: str, config: ClientConfig) -> Consumer:
    """Return a consumer. Settings have librdkafka's names; those that only producers accept are left out.

    Raises `ConfigurationError` if the client library refuses a setting, and `BrokerConnectionError`, which is also a
    `KafkaException`, if `oauth_cb` gives no token.
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
    """Return the configuration of a client of that kind: its settings, the addresses, and our log.

    Raises `ConfigurationError` without addresses, with two different ones, or if `oauth_cb` cannot be used;
    `NoTokenError` if `oauth_cb` gives no token.
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
    callbacks = {name: words.guarded(name, made[name]) for name in _CALLBACKS if callable(made.get(name))}
    made |= {"logger": words, "error_cb": words.hear, **callbacks}
    if "reconnect.backoff.ms" not in config:
        made.setdefault("reconnect.backoff.max.ms", _LONGEST_RECONNECT_MS)
    if kind is Producer and "transactional.id" not in made:
        made.setdefault("socket.timeout.ms", _PRODUCER_ANSWER_MS)
    if kind is AdminClient:
        # Otherwise a request that waits for a broker that is down connects to it without a pause (librdkafka 2.16: each
        # change of its state asks for a connection at once): 92 to 189 % of a core were seen, and 0 % with this.
        made.setdefault("enable.sparse.connections", False)
        # Otherwise, after a change of leader, requests for the ends of a partition carry the old leader epoch and are
        # refused for up to 15 minutes (same version: the refusal does not make it look for the new leader).
        made.setdefault("metadata.max.age.ms", _LEADERS_AGE_MS)
    return made


def _made(kind: type[ClientT], bootstrap_servers: str, given: ClientConfig) -> ClientT:
    config = settings(kind, bootstrap_servers, given)
    try:
        client = kind(config)
        client.words = config["logger"]
    except (KafkaException, TypeError, ValueError) as error:
        said = reason(error) if isinstance(error, KafkaException) else str(error)
        # The library repeats some values, and any may be a secret, for example under a wrong key. So the error is not
        # chained either.
        for value in config.values():
            if isinstance(value, str):
                said = said.replace(f'"{value}"', '"***"')
    else:
        if str(config.get(_UNSECURED, "")).lower() == "true":
            # The library makes these tokens when events are served, and an idle client serves none.
            client.poll(0)
        return client
    raise ClientRefusedError(f"the Kafka client refused its configuration: {said}; correct that key in config")
