"""Rights of coordinators, producers and operators of a store in Kafka: the fewest do, and each that lacks is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from secured_store import (
    ANSWER_S,
    TOLD_S,
    KafkaSecured,
    NewTopic,
    NewUser,
    checker_rights,
    committed,
    coordinator_rights,
    decider_rights,
    producer_rights,
    reader_rights,
    told,
)
from transaction_tools import unknown

from canary import MESSAGE
from penstock.clients.rights import MissingRightError
from penstock.devbroker import DevBroker, User
from penstock.errors import DecisionNotStoredError, HalfNotStoredError, PenstockError, PublicationNotSeenError
from penstock.transactions import HalfMessage, TransactionalProducer, TransactionState
from penstock.transactions.coordinator.partitions import log_upkeep
from penstock.transactions.operator.audit import Act
from penstock.transactions.operator.kafka_operator import Effect, KafkaAdministration
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing import acked_producer as delivery
from rights import Right, give, on_group, on_topic, on_transactional_id, take
from waiting import wait_until

COMMIT = TransactionState.COMMIT
Rights = Callable[[StoreTopics], list[Right]]


def commit(_: HalfMessage) -> TransactionState:
    return COMMIT


@pytest.fixture(scope="module")
def store(secured: DevBroker) -> Iterator[KafkaSecured]:
    """A store whose coordinator has what it needs and no more, with a producer that answers checks."""
    name = f"rights-{time.time_ns()}"
    secured.create_topic(name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_upkeep, "UPKEEP_S", 0.5)
        made = KafkaSecured(secured, secured.user(name), f"store.{name}", name)
        # An operator's first decision would make it.
        secured.create_topic(made.topics.audit)
        made.open.enter_context(made.made_producer(secured.admin_config, commit))
        made.send(name, b"k", b"first")
        wait_until(lambda: made.statistics().committed == 1, ANSWER_S)
        yield made
        made.open.close()


@pytest.mark.parametrize(
    ("rights", "named"),
    [
        (lambda t: on_topic(t.half, "read"), "Read on topic {t.half}"),
        pytest.param(lambda t: on_topic(t.done, "read"), "Read on topic {t.done}", marks=pytest.mark.chaos),
        pytest.param(lambda t: on_topic(t.op, "write"), "Write on topic {t.op}", marks=pytest.mark.chaos),
        (lambda t: on_topic(t.done, "write"), "Write on topic {t.done}"),
        pytest.param(lambda t: on_topic(t.check, "write"), "Write on topic {t.check}", marks=pytest.mark.chaos),
        pytest.param(lambda t: on_topic(t.status, "write"), "Write on topic {t.status}", marks=pytest.mark.chaos),
        (lambda t: on_topic(t.done, "delete"), "Delete on topic {t.done}"),
        (lambda t: on_group(t.coordinators, "read"), "Read on group {t.coordinators}"),
        pytest.param(
            lambda t: on_group(t.checkers(""), "describe", prefix=True),
            "Describe on group {t.prefix}.check.orders",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            lambda t: on_transactional_id(f"{t.coordinators}.", "write", prefix=True),
            "Write on transactional-id {t.coordinators}.*",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_a_coordinator_tells_what_it_lacks_keeps_all_and_goes_on_when_it_is_given(
    store: KafkaSecured, rights: Rights, named: str
) -> None:
    before, named = store.statistics().committed, named.format(t=store.topics)
    if "status" in named:
        # Something to tell: what is lacking here is told where the rest is.
        take(store.broker, store.user, on_topic(store.topics.check, "write"))
    take(store.broker, store.user, rights(store.topics))

    store.send(store.target, b"k", named.encode())
    store.producer.send(store.target, key=b"k", value=named.encode(), execute=unknown)
    told(store, f"lacks the right {named}")
    give(store.broker, store.user, [*rights(store.topics), *on_topic(store.topics.check, "write")])

    wait_until(lambda: store.statistics().committed == before + 2, ANSWER_S)
    values = committed(store.broker, store.target)[b"k"]
    assert values.count(named.encode()) == 2
    assert len(values) == store.statistics().committed


def test_what_a_coordinator_lacks_is_told_to_whoever_lists_what_waits(store: KafkaSecured) -> None:
    lacking = on_topic(store.topics.done, "write")
    take(store.broker, store.user, lacking)
    held = store.send(store.target, b"k", b"listed")

    def waits_for() -> str:
        return next((one.waits_for for one in store.pending() if "lacks" in one.waits_for), "")

    text = wait_until(waits_for, ANSWER_S)
    with KafkaAdministration(store.broker.bootstrap_servers, store.prefix, store.broker.admin_config) as seen:
        lines = seen.coordinator_notices()
    give(store.broker, store.user, lacking)

    assert text.startswith("a right of its coordinator: ")
    assert f"User:{store.user.name} lacks the right Write on topic {store.topics.done}" in text
    assert any("lacks the right" in line and store.topics.done in line for line in lines)
    wait_until(lambda: held not in {one.transaction_id for one in store.pending()}, ANSWER_S)


def test_a_coordinator_that_starts_without_its_group_tells_it_and_goes_on_when_it_is_given(
    secured: DevBroker, new_user: NewUser, new_secured_topic: NewTopic
) -> None:
    target, user = new_secured_topic(), new_user()
    topics = StoreTopics(f"store.{target}")
    made = KafkaSecured(secured, user, topics.prefix, target)
    with made.open:
        made.coordinator.stop()
        take(secured, user, on_group(topics.coordinators, "read"))
        made.coordinator = made.made_coordinator()
        with made.coordinator:
            told(made, f"Read on group {topics.coordinators}")
            give(secured, user, on_group(topics.coordinators, "read"))
            made.send(target, b"k", b"v")
            wait_until(lambda: made.statistics().committed == 1, ANSWER_S)


def test_a_coordinator_that_may_not_see_its_topics_names_all_that_it_needs_there(
    secured: DevBroker, new_user: NewUser, store: KafkaSecured
) -> None:
    with pytest.raises(MissingRightError) as caught:
        KafkaSecured.coordinator_of(secured, store.prefix, new_user().config).start()
    assert {str(right) for right in caught.value.rights} == {
        f"{operation} on topic {store.topics.half}" for operation in ("Read", "Delete", "DescribeConfigs")
    }


@pytest.fixture
def sender(store: KafkaSecured, new_user: NewUser) -> Iterator[tuple[User, TransactionalProducer]]:
    """A producer of the store with all that it needs."""
    user = new_user(*producer_rights(store.topics, store.target))
    with store.made_producer(user.config) as producer:
        producer.send(store.target, key=b"p", value=MESSAGE)
        yield user, producer


@pytest.mark.parametrize("log", ["half", "op"])
def test_a_producer_is_told_what_it_may_not_write_and_goes_on_when_it_may(
    store: KafkaSecured, sender: tuple[User, TransactionalProducer], log: str
) -> None:
    user, producer = sender
    topic = getattr(store.topics, log)
    take(store.broker, user, on_topic(topic, "write"))
    give(store.broker, user, on_topic(topic, "describe"))

    begun = time.monotonic()
    with pytest.raises(HalfNotStoredError if log == "half" else DecisionNotStoredError) as caught:
        producer.send(store.target, key=b"p", value=MESSAGE)
    assert time.monotonic() - begun < TOLD_S
    assert f"User:{user.name} lacks the right Write on topic {topic}" in str(caught.value)
    assert f"--operation Write --topic '{topic}'" in str(caught.value)

    give(store.broker, user, on_topic(topic, "write"))
    wait_until(lambda: is_sent(producer, store.target), ANSWER_S, 0.2)


def is_sent(producer: TransactionalProducer, topic: str) -> bool:
    """Send a message, and tell whether it was taken: a client may remember for a second that it was forbidden."""
    try:
        producer.send(topic, key=b"p", value=MESSAGE)
    except (HalfNotStoredError, DecisionNotStoredError) as error:
        assert "lacks the right Write" in str(error)  # noqa: PT017 - it may be raised, or not
        return False
    return True


def test_a_producer_that_a_fatal_refusal_ended_is_replaced(
    store: KafkaSecured, new_user: NewUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_RENEW_EVERY_S", 0.1)
    # Who may write nowhere may not even be an idempotent producer.
    user = new_user(*(right for right in producer_rights(store.topics, store.target) if right.operation == "describe"))
    logs = [*on_topic(store.topics.half, "describe"), *on_topic(store.topics.op, "describe")]
    give(store.broker, user, logs)
    with store.made_producer(user.config) as producer:
        for _ in range(3):
            with pytest.raises(HalfNotStoredError, match=f"lacks the right Write on topic {store.topics.half}"):
                producer.send(store.target, key=b"p", value=MESSAGE)
        give(store.broker, user, producer_rights(store.topics, store.target))
        wait_until(lambda: is_sent(producer, store.target), ANSWER_S, 0.2)


def test_a_producer_is_told_that_it_may_not_see_a_target(
    store: KafkaSecured, sender: tuple[User, TransactionalProducer], new_secured_topic: NewTopic
) -> None:
    user, producer = sender
    target = new_secured_topic()

    with pytest.raises(MissingRightError, match=f"User:{user.name} lacks the right Describe on topic {target}"):
        producer.send(target, key=b"p", value=MESSAGE)

    give(store.broker, user, on_topic(target, "describe"))
    producer.send(target, key=b"p", value=MESSAGE)


def test_who_may_not_see_publications_is_told_so(
    store: KafkaSecured, sender: tuple[User, TransactionalProducer], caplog: pytest.LogCaptureFixture
) -> None:
    user, producer = sender

    impatient = store.made_producer(user.config, publish_timeout=3.0)
    with impatient, pytest.raises(PublicationNotSeenError, match=f"lacks the right Read on topic {store.topics.done}"):
        impatient.send(store.target, key=b"p", value=MESSAGE, wait="published")

    give(store.broker, user, on_topic(store.topics.done, "read"))
    producer.send(store.target, key=b"p", value=MESSAGE, wait="published")
    assert f"User:{user.name} lacks the right" in caplog.text


def test_an_operator_who_only_looks_needs_no_right_to_write(store: KafkaSecured, new_user: NewUser) -> None:
    with KafkaAdministration(store.broker.bootstrap_servers, store.prefix, store.broker.admin_config) as operator:
        operator._audit.write(Act("test", "commit", "none", "orders", "nowhere"))
    user = new_user(*reader_rights(store.topics), *on_topic(store.target, "describe"))
    with KafkaAdministration(store.broker.bootstrap_servers, store.prefix, user.config) as seen:
        assert seen.coordinator_notices() is not None
        seen.pending()
        seen.discarded()
        assert len(seen.acts()) >= 1
    asked = store.broker.asked(user)
    assert {one.operation for one in asked} == {"READ", "DESCRIBE"}
    # Targets of what other tests left there may be hidden.
    assert [one for one in asked if not one.allowed and one.name.startswith(f"{store.prefix}.")] == []


@pytest.mark.parametrize("missing", ["half", "done", "group", "discarded", "audit"])
def test_an_operator_is_told_at_once_what_may_not_be_read(store: KafkaSecured, new_user: NewUser, missing: str) -> None:
    name = store.topics.coordinators if missing == "group" else getattr(store.topics, missing)
    rights = [right for right in reader_rights(store.topics) if right.name != name]
    user = new_user(*rights)

    begun = time.monotonic()

    def look() -> None:
        with KafkaAdministration(store.broker.bootstrap_servers, store.prefix, user.config) as seen:
            seen.pending()
            seen.discarded()
            seen.acts()

    with pytest.raises(MissingRightError) as caught:
        look()

    assert time.monotonic() - begun < TOLD_S
    wanted = f"Describe on group {name}" if missing == "group" else f"Read on topic {name}"
    assert f"User:{user.name} lacks the right {wanted}" in str(caught.value)


def test_an_operator_who_may_look_is_told_what_a_decision_needs(store: KafkaSecured, new_user: NewUser) -> None:
    user = new_user(*reader_rights(store.topics))
    take(store.broker, store.user, on_topic(store.topics.check, "write"))
    waiting = store.producer.send(store.target, key=b"o", value=MESSAGE, execute=unknown).transaction_id

    def decide() -> Effect:
        with KafkaAdministration(store.broker.bootstrap_servers, store.prefix, user.config) as operator:
            return operator.decide(waiting, Verdict.COMMIT, "test", timeout_s=ANSWER_S).effect

    with pytest.raises(PenstockError, match=f"lacks the right Write on topic {store.topics.audit}"):
        decide()
    give(store.broker, user, on_topic(store.topics.audit, "write"))
    with pytest.raises(DecisionNotStoredError, match=f"lacks the right Write on topic {store.topics.op}"):
        decide()
    give(store.broker, user, decider_rights(store.topics))
    assert decide() is Effect.DONE
    give(store.broker, store.user, on_topic(store.topics.check, "write"))


def test_who_answers_checks_tells_what_it_lacks_and_answers_when_it_is_given(
    secured: DevBroker, new_user: NewUser, new_secured_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    target = new_secured_topic()
    made = KafkaSecured(secured, new_user(), f"store.{target}", target)
    with made.open:
        for lacking in checker_rights(made.topics, "orders"):
            user = new_user(*producer_rights(made.topics, target), *checker_rights(made.topics, "orders"))
            take(secured, user, [lacking])
            before = made.statistics().committed
            with made.made_producer(user.config, commit) as producer:
                producer.send(target, key=b"k", value=MESSAGE, execute=unknown)
                named = f"User:{user.name} lacks the right Read on {lacking.resource} {lacking.name}"
                wait_until(lambda named=named: named in caplog.text, ANSWER_S)
                give(secured, user, [lacking])
                wait_until(lambda before=before: made.statistics().committed == before + 1, ANSWER_S)


def test_the_rights_given_to_a_coordinator_are_those_that_it_asks_for(store: KafkaSecured) -> None:
    """The table in `docs/security.md` comes from here: `pytest -s` prints it."""
    given = {(one.resource, one.name, one.operation.upper()) for one in coordinator_rights(store.topics, store.target)}
    asked = {(one.resource, one.name, one.operation) for one in store.broker.asked(store.user)}
    for resource, name, operation in sorted(asked):
        print(f"{operation:16} {resource} {name.replace(store.prefix, '<prefix>')}")  # noqa: T201 - what it is for
    # By a prefix: names are made anew.
    plain = {one for one in given if one[0] != "transactional_id" and not one[1].endswith(".check.")}
    # Nothing was discarded here, and nothing tried apart.
    unused = {("topic", store.topics.discarded, operation) for operation in ("READ", "WRITE")}
    assert plain - unused <= asked
