"""What a client says in its log: in a sentence, no faster than somebody can read; and why it reaches no broker.

The client library tells why it reaches no broker in its log and to `error_cb`, while the question that was asked ends
in a time-out.

While a broker is away, each client says so at every try to reach it, many times a second. Of lines that say the same of
the same broker the first goes on at once, and then one every few seconds, with the number of those that were left out.
Where a program has set no logging up, Python shows these warnings on its screen: so they say what to change, where that
is known, and name nothing that is the library's own business.
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

#: What the library puts around its words: the client's thread, for how long, how often.
THREAD = re.compile(r"\[thrd:[^\]]*\]:? ?")
AFTER = re.compile(r" ?\(after (?:[^()]|\([^)]*\))*\)")
#: A connection is called `host:port/bootstrap` until brokers have named their nodes, and then `host:port/node`.
_BOOTSTRAP = "/bootstrap"
_NODE = re.compile(r":\d+/\d+: ")
#: Guesses of the library at the security settings: wrong of a connection to a known node.
_SETTINGS_GUESS = re.compile(
    r":? ?(?:verify that security\.protocol .*SASL authentication|connecting to a PLAINTEXT broker listener\?"
    r"|requesting ApiVersion: might be caused by incorrect security\.protocol configuration \([^)]*\))"
)
#: What it says of a broker that is connected and gives no answer.
_UNANSWERED = re.compile(r": Timed out (?:\w+Request|\d+ in-flight).*")
#: Seconds after which what was said counts no more: of a broker that stays away, the library says the same every 30 s.
_SAID_AGAIN_S = 35.0
#: A guess of the library that is wrong: there are no such brokers any more.
_OLD_BROKER = re.compile(
    r":? ?(?:might be caused by|probably due to|or) broker version(?: is)? < 0\.10 \(see api\.version\.request[^)]*\)"
)
#: What it says of a setting that only producers or only consumers take.
_OF_ANOTHER_KIND = "will be ignored by this"
BROKER = re.compile(r"[\w.-]+:\d+")

#: By what the library says (2.16, seen): what to change, and whether waiting may help. A connection that ends early
#: tells of a wrong protocol, but also of a broker that is just starting behind a proxy; so where waiting may help, the
#: remedy is a guess, and only made of an address from which no answer ever came.
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

    #: The client's own.
    words: str
    #: What to change; empty where it is not known.
    remedy: str = ""
    #: Whether waiting may help.
    may_pass: bool = True

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"the client says: {self.words}" + (f"; {self.remedy}" if self.remedy else "")


class ClientWords:
    """Hears one client: stands where the library expects a logger, and an `error_cb`. Passes all on.

    Written by the thread that serves the client, read by any: each field is replaced as a whole.
    """

    def __init__(self, config: ClientConfig, log: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._error_cb: Callable[[KafkaError], object] | None = config.get("error_cb")
        self._log = log
        self._clock = clock
        # What was said last, or the last refusal, which says more than the attempts that follow it; and when.
        self._said: tuple[Cause, float] | None = None
        #: Whether brokers have let this client in: its settings are right.
        self.has_worked = False
        # Addresses that refused for good.
        self._refused: frozenset[str] = frozenset()

    @property
    def cause(self) -> Cause | None:
        """Why no broker answers now, as far as was said; what was not said again is past."""
        said = self._said
        return said[0] if said is not None and self._clock() - said[1] < _SAID_AGAIN_S else None

    def hear(self, error: KafkaError) -> None:
        """Take an error."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - the client library's public constants look so
            self._note(error.str())
        if self._error_cb is None:
            return
        try:
            self._error_cb(error)
        except KeyboardInterrupt:
            raise
        except:  # noqa: E722 - see `raised`; the library would raise it out of a call on a thread that serves everybody
            self._log.log(logging.ERROR, "error_cb of the config failed", exc_info=raised())

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line: its kind, the client's name and what it says are the arguments."""
        if arguments and arguments[0] == "CONFWARN" and _OF_ANOTHER_KIND in str(arguments[-1]):
            # One configuration serves clients of all kinds.
            return
        if arguments and arguments[0] in {"FAIL", "REQTMOUT"} and level > logging.DEBUG:  # it is about a connection
            self._note(THREAD.sub("", str(arguments[-1])))
            if self.has_worked:
                arguments = (*arguments[:-1], str(arguments[-1]).replace(_BOOTSTRAP, ""))
        self._log.log(level, text, *arguments)

    def clear(self) -> None:
        """A broker has answered: what was said before is past."""
        self._said, self._refused, self.has_worked = None, frozenset(), True

    def refused_by_all(self, bootstrap_servers: str) -> bool:
        """Tell whether every address refused for a cause that does not pass by itself."""
        return len(self._refused) >= len([address for address in bootstrap_servers.split(",") if address.strip()])

    def _note(self, said: str) -> None:
        self.has_worked = self.has_worked or _NODE.search(said) is not None
        # The library goes back to the addresses that it was given once all brokers are away.
        cause, last = cause_of(said.replace(_BOOTSTRAP, "") if self.has_worked else said), self.cause
        if not cause.may_pass:
            found = BROKER.search(said)
            self._refused |= {found[0] if found else ""}
        if last is None or last.may_pass or not cause.may_pass:
            self._said = cause, self._clock()


def cause_of(said: str) -> Cause:
    """Return what words of the library mean."""
    is_first = _BOOTSTRAP in said
    words = _OLD_BROKER.sub("", _UNANSWERED.sub(": it did not answer in time", AFTER.sub("", said)))
    if not is_first:
        words = _SETTINGS_GUESS.sub("", words)
    for pattern, remedy, may_pass in _CAUSES:
        if (is_first or not may_pass) and re.search(pattern, said):
            return Cause(words, remedy, may_pass)
    return Cause(words)


#: Seconds between two lines that say the same.
EVERY_S = 10.0

#: What differs between lines that say the same, save for what `causes` takes off.
_NUMBER = re.compile(r"\d+")
#: Kinds of lines about a connection: the client makes it again by itself.
_CONNECTION = frozenset({"FAIL", "ERROR"})
#: How a line ends of a transaction that a rebalance has refused: it is done again.
_REFUSED_BY_REBALANCE = re.compile(rf"\(({'|'.join(KafkaError(code).name() for code in REBALANCING)})\b")


class ClientLog:
    """Stands where the client library expects a `logging.Logger`. Thread-safe: all clients of a process share one.

    The logger is one of `rationed`.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line: its kind, the client's name and what it says are the arguments."""
        if level <= logging.DEBUG:
            # Whoever asked for those wants to see them.
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


#: Shared by all clients: what they say of one broker is the same.
client_log = ClientLog(rationed("penstock.kafka"))
