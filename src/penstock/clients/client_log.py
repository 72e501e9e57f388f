"""The log of the Kafka clients: plain sentences at a readable rate, and the reason why no broker can be reached.

The client library reports in its log and to `error_cb` why it reaches no broker. The request itself ends in a time-out.

While a broker is away, each client logs every try to reach it, many times a second. Of equal lines about a broker, the
first passes at once, and then one every few seconds with the number of suppressed ones. A program without logging shows
these warnings on its screen. So they name the setting to change, if it is known, and no internals of the library.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError

from penstock.clients.kafka_errors import REBALANCING
from penstock.clients.ration import once_in, rationed
from penstock.errors import raised
from penstock.options import ClientConfig

#: Decorations that the library adds to a line: the client's thread, how long, how often.
THREAD = re.compile(r"\[thrd:[^\]]*\]:? ?")
AFTER = re.compile(r" ?\(after (?:[^()]|\([^)]*\))*\)")
#: A connection is called `host:port/bootstrap` until brokers have named their nodes, and then `host:port/node`.
_BOOTSTRAP = "/bootstrap"
_NODE = re.compile(r":\d+/\d+: ")
#: The library's guesses at wrong security settings. They are false for a connection to a known node.
_SETTINGS_GUESS = re.compile(
    r":? ?(?:verify that security\.protocol .*SASL authentication|connecting to a PLAINTEXT broker listener\?"
    r"|requesting ApiVersion: might be caused by incorrect security\.protocol configuration \([^)]*\))"
)
#: The library's text for a broker that is connected and does not answer.
_UNANSWERED = re.compile(r": Timed out (?:\w+Request|\d+ in-flight).*")
#: Seconds for which a reported cause counts. While a broker stays away, the library repeats its report every 30 s.
_SAID_AGAIN_S = 35.0
#: A false guess of the library: such old brokers no longer exist.
_OLD_BROKER = re.compile(
    r":? ?(?:might be caused by|probably due to|or) broker version(?: is)? < 0\.10 \(see api\.version\.request[^)]*\)"
)
#: The library's text for a setting that only producers or only consumers accept.
_OF_ANOTHER_KIND = "will be ignored by this"
BROKER = re.compile(r"[\w.-]+:\d+")

#: Text of the library (2.16, seen), the remedy, and whether waiting may help. A connection that ends early can mean a
#: wrong protocol, or a broker that is starting behind a proxy. If waiting may help, the remedy is a guess. It is made
#: only for an address that never answered.
_CAUSES = (
    (r"Unsupported SASL mechanism", "set sasl.mechanism to one that the broker supports", False),
    (
        r"Request not valid in current SASL state",
        "this listener asks for no SASL: set security.protocol to PLAINTEXT or SSL, or name another listener",
        False,
    ),
    (
        r"SASL authentication error|Failed to initialize SASL",
        "correct sasl.username and sasl.password, or what gives the token (oauth_cb, sasl.oauthbearer.*)",
        False,
    ),
    (
        r"certificate verify failed|Failed to verify broker certificate",
        "set ssl.ca.location to who signed the broker's certificate; see that it has not expired and names this host",
        False,
    ),
    (
        r"alert (bad certificate|certificate|unknown ca|handshake failure)",
        "set ssl.certificate.location and ssl.key.location to a certificate that the broker trusts and has not expired",
        False,
    ),
    (
        r"PLAINTEXT broker listener|wrong version number|in state SSL_HANDSHAKE",
        "this listener may speak no TLS: set security.protocol to PLAINTEXT or SASL_PLAINTEXT, or name another one",
        True,
    ),
    (
        r"ApiVersionRequest failed",
        "what listens there may be no Kafka broker, or one that is overloaded: see the address and its port",
        True,
    ),
    (
        r"Disconnected.* in state APIVERSION_QUERY",
        "this listener may speak TLS: set security.protocol to SSL or SASL_SSL, or name another one",
        True,
    ),
    (
        r"^(?!sasl_)\S+: Disconnected.* in state UP",
        "this listener may ask for SASL: set security.protocol to SASL_SSL or SASL_PLAINTEXT, or name another one",
        True,
    ),
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a client reaches no broker."""

    #: The client's own words.
    words: str
    #: What to change; empty: not known.
    remedy: str = ""
    #: Whether waiting may help.
    may_pass: bool = True

    def __str__(self) -> str:
        """Return it as a sentence."""
        return f"the client says: {self.words}" + (f"; {self.remedy}" if self.remedy else "")


class ClientWords:
    """Listens to one client, as its logger and its `error_cb`, and passes everything on.

    Written by the thread that serves the client, read by any thread: each field is replaced as a whole.
    """

    def __init__(self, config: ClientConfig, log: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._error_cb = self.guarded("error_cb", config.get("error_cb", id))
        self._clock = clock
        # The last cause and its time. A refusal stays: it says more than the attempts that follow it.
        self._said: tuple[Cause, float] | None = None
        #: Whether a broker has accepted this client: its settings are right.
        self.has_worked = False
        # Addresses that refused permanently.
        self._refused: frozenset[str] = frozenset()

    @property
    def cause(self) -> Cause | None:
        """Why no broker answers now, as far as the library reported it recently."""
        said = self._said
        return said[0] if said is not None and self._clock() - said[1] < _SAID_AGAIN_S else None

    def hear(self, error: KafkaError) -> None:
        """Take an error from `error_cb`."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - the client library's public constants look so
            self._note(error.str())
        self._error_cb(error)

    def guarded(self, name: str, callback: Callable[[Any], object]) -> Callable[[Any], object]:
        """Return a user's callback of that name; what it raises is logged."""

        def call(argument: Any) -> None:
            try:
                callback(argument)
            except KeyboardInterrupt:
                raise
            except:  # noqa: E722 - see `raised`; the library would raise it out of a call on a shared thread
                said = once_in(EVERY_S, (self, name), self._clock())
                _kafka_log.error("%s of the config failed", name, exc_info=raised(), extra=said)

        return call

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line. The arguments are its kind, the client's name and its text."""
        if arguments and arguments[0] == "CONFWARN" and _OF_ANOTHER_KIND in str(arguments[-1]):
            # One configuration serves clients of all kinds.
            return
        if arguments and arguments[0] in {"FAIL", "REQTMOUT"} and level > logging.DEBUG:  # about a connection
            self._note(THREAD.sub("", str(arguments[-1])))
            if self.has_worked:
                arguments = (*arguments[:-1], str(arguments[-1]).replace(_BOOTSTRAP, ""))
        self._log.log(level, text, *arguments)

    def clear(self) -> None:
        """Forget all causes: a broker has answered."""
        self._said, self._refused, self.has_worked = None, frozenset(), True

    def refused_by_all(self, bootstrap_servers: str) -> bool:
        """Tell whether every address refused for a permanent cause."""
        return len(self._refused) >= len([address for address in bootstrap_servers.split(",") if address.strip()])

    def _note(self, said: str) -> None:
        self.has_worked = self.has_worked or _NODE.search(said) is not None
        # When all brokers are away, the library returns to the bootstrap addresses.
        cause, last = cause_of(said.replace(_BOOTSTRAP, "") if self.has_worked else said), self.cause
        if not cause.may_pass:
            found = BROKER.search(said)
            self._refused |= {found[0] if found else ""}
        if last is None or last.may_pass or not cause.may_pass:
            self._said = cause, self._clock()


def cause_of(said: str) -> Cause:
    """Return the cause that a text of the library names."""
    is_first = _BOOTSTRAP in said
    words = _OLD_BROKER.sub("", _UNANSWERED.sub(": it did not answer in time", AFTER.sub("", said)))
    if not is_first:
        words = _SETTINGS_GUESS.sub("", words)
    for pattern, remedy, may_pass in _CAUSES:
        if (is_first or not may_pass) and re.search(pattern, said):
            return Cause(words, remedy, may_pass)
    return Cause(words)


#: Seconds between two equal lines.
EVERY_S = 10.0

#: Numbers differ between lines that are otherwise equal.
_NUMBER = re.compile(r"\d+")
#: Kinds of lines about a connection: the client makes it again by itself.
_CONNECTION = frozenset({"FAIL", "ERROR"})
#: The end of a line about a transaction that a rebalance refused. The transaction is repeated.
_REFUSED_BY_REBALANCE = re.compile(rf"\(({'|'.join(KafkaError(code).name() for code in REBALANCING)})\b")


class ClientLog:
    """The logger of all clients of a process. Thread-safe. It writes to a logger made by `rationed`."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line. The arguments are its kind, the client's name and its text."""
        if level <= logging.DEBUG:
            # Debug lines were asked for.
            self._log.log(level, text, *arguments)
            return
        said = THREAD.sub("", str(arguments[-1])) if arguments else text
        broker = BROKER.search(said)
        kind = arguments[0] if arguments else None
        same = self, kind, broker[0] if broker else "", _NUMBER.sub("#", AFTER.sub("", said))
        if kind == "TXNERR" and _REFUSED_BY_REBALANCE.search(said):
            level = logging.INFO
        if level >= logging.WARNING:
            cause, is_connection = cause_of(said), kind in _CONNECTION
            remedy = cause.remedy or ("it tries again" if is_connection else "")
            level = logging.WARNING if is_connection else level
            text, arguments = "a Kafka client says: %s", (f"{cause.words}; {remedy}" if remedy else cause.words,)
        self._log.log(level, text, *arguments, extra=once_in(EVERY_S, same, self._clock()))


_kafka_log = rationed("penstock.kafka")
#: Shared by all clients: they report the same about one broker.
client_log = ClientLog(_kafka_log)
