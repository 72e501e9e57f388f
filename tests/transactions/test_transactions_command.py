"""`penstock tx`: looking, deciding, bringing back, and the audit record of each."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import NewPartitions
from transaction_tools import Bench, decide, prepared, unknown

from commands import Command, Outcome, commands
from penstock.transactions import HalfMessage, TransactionState, new_id
from penstock.transactions.operator.administration import Act
from penstock.transactions.operator.audit import AuditLog
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Op, Verdict
from waiting import wait_until


@pytest.fixture
def tx(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `penstock tx ARGUMENTS...` on the bench's store."""
    penstock = commands(monkeypatch, capsys)
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP_SERVERS", bench.servers)
    # The machine may be busy: a list is given more than the time that an operator's patience has.
    waits = {"ls": ("--connect-timeout", "60")}
    return lambda *given: penstock("tx", *given, *waits.get(given[0], ()), "--prefix", bench.topics.prefix)


def row_of(listed: Outcome, transaction_id: str) -> str:
    """Return the line of a table that begins with an id."""
    (row,) = [line for line in listed.out.splitlines() if line.strip().startswith(transaction_id)]
    return row


def test_what_is_pending_is_listed_without_a_coordinator_and_without_payloads(bench: Bench, tx: Command) -> None:
    first = prepared(bench.producer(), bench.topic, b"a secret").halves[0].transaction_id
    second = prepared(bench.producer("others"), bench.topic).halves[0].transaction_id
    bench.producer().send(bench.topic, value=b"decided")

    listed = tx("ls")
    of_others = tx("ls", "--group", "others")
    old_ones = tx("ls", "--older-than", "3600")
    shown, with_payload = tx("show", first), tx("show", first, "--payload")

    assert (listed.code, of_others.code, shown.code) == (0, 0, 0), listed.err
    assert "3 pending transactions" in listed.out
    assert "orders" in row_of(listed, first)
    assert "a decision" in row_of(listed, first)
    assert [line for line in listed.out.splitlines() if "COMMIT" in line and "a coordinator" in line]
    assert "1 pending transaction in" in of_others.out
    assert second in of_others.out
    assert "0 pending transactions" in old_ones.out
    assert "waits for   a decision" in shown.out
    assert "a secret" in with_payload.out
    assert "a secret" not in listed.out + shown.out


def test_a_group_without_a_living_producer_that_answers_checks_is_named(bench: Bench, tx: Command) -> None:
    prepared(bench.producer("alone"), bench.topic)
    prepared(bench.producer("answers", check=lambda _half: TransactionState.UNKNOWN), bench.topic)

    listed = wait_until(lambda: next((it for it in [tx("ls")] if "of group answers" not in it.out), None))

    assert "2 pending transactions" in listed.out
    assert "no producer of group alone is alive that answers checks" in listed.out


@pytest.mark.thorough
def test_what_waits_behind_its_key_or_for_a_topic_or_its_time_is_reported(bench: Bench, tx: Command) -> None:
    by_half = bench.producer(order="half")
    with by_half.transaction(bench.topic, key=b"k", value=b"1") as head:
        head.unknown()
    behind = by_half.send(bench.topic, key=b"k", value=b"2").transaction_id
    later = bench.producer().send(bench.topic, value=b"3", deliver_at=4e9).transaction_id
    gone = Half(new_id(), "orders", "there.is.no.such.topic", None, None, b"4", (), None)
    bench.write(bench.topics.half, 0, None, b"4", encode_half(gone))
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        waits = store.decide(gone.transaction_id, Verdict.COMMIT, "me", timeout_s=0.1)
    coordinator = bench.coordinator(transaction_timeout=600)
    bench.counted(coordinator, partitions=2)

    listed = wait_until(lambda: next((it for it in [tx("ls")] if "does not exist" in it.out), None))

    assert waits == "a coordinator"
    assert f"{head.transaction_id}, before it in its key" in row_of(listed, behind)
    assert "2096-10-02" in row_of(listed, later)
    assert "topic there.is.no.such.topic to take it: does not exist" in row_of(listed, gone.transaction_id)


@pytest.mark.parametrize(
    ("command", "printed", "counted"),
    [
        ("commit", "committed: visible", "committed"),
        ("rollback", "rolled back", "rolled_back"),
        ("discard", "moved to the discarded topic", "discarded"),
    ],
)
def test_a_decision_takes_effect_and_is_in_the_audit_log(
    bench: Bench, tx: Command, command: str, printed: str, counted: str
) -> None:
    coordinator = bench.coordinator(transaction_timeout=600)
    identity = prepared(bench.producer(), bench.topic).halves[0].transaction_id

    done = tx(command, identity, "--reason", "told so by phone")
    again = tx(command, identity)

    assert (done.code, again.code) == (0, 1), done.err
    assert printed in done.out
    assert "is not pending" in again.out
    bench.settled(coordinator, **{counted: 1})
    assert bench.visible() == ([(None, b"v")] if command == "commit" else [])
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        (audited,) = store.acts(identity)
    assert (audited.what, audited.group, audited.why) == (command, "orders", "told so by phone")
    assert "@" in audited.who
    assert [command, audited.who, "told", "so"] in [line.split()[3:7] for line in tx("show", identity).out.splitlines()]


@pytest.mark.thorough
def test_what_an_operator_discarded_is_listed_with_that_reason_and_not_as_exhausted(bench: Bench, tx: Command) -> None:
    coordinator = bench.coordinator(transaction_timeout=600)
    identity = prepared(bench.producer(), bench.topic).halves[0].transaction_id
    assert tx("discard", identity).code == 0
    bench.settled(coordinator, discarded=1)

    listed, shown = tx("ls", "--discarded"), tx("show", identity)

    assert "by an operator" in row_of(listed, identity)
    assert "reason      by an operator\n  check count 0\n" in shown.out
    assert "checks exhausted" not in listed.out + shown.out


def test_a_decision_that_comes_second_is_refused_and_says_so(
    bench: Bench, tx: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = bench.coordinator(transaction_timeout=600)
    stored = prepared(bench.producer(), bench.topic)
    identity = stored.halves[0].transaction_id
    store = KafkaAdministration._store_op

    def overtaken(self: KafkaAdministration, op: Op) -> None:
        # The producer decides between the operator's look and the operator's decision.
        decide(bench, stored, Verdict.ROLLBACK)
        store(self, op)

    monkeypatch.setattr(KafkaAdministration, "_store_op", overtaken)
    refused = tx("commit", identity)

    assert refused.code == 1
    assert "refused: ROLLBACK was decided before" in refused.out
    bench.settled(coordinator, rolled_back=1, refused=1)
    assert bench.visible() == []


@pytest.mark.thorough
def test_a_discarded_transaction_comes_back_once_with_a_fresh_count(bench: Bench, tx: Command) -> None:
    answers = [TransactionState.UNKNOWN]
    counts: list[int] = []

    def check(half: HalfMessage) -> TransactionState:
        counts.append(half.check_count)
        return answers[-1]

    coordinator, producer = bench.coordinator(check_max=2), bench.producer(check=check)
    result = producer.send(bench.topic, key=b"k", value=b"v", headers={"h": b"1"}, execute=unknown)
    bench.settled(coordinator, discarded=1)
    listed = tx("ls", "--discarded")
    shown = tx("show", result.transaction_id)
    counts.clear()
    answers.append(TransactionState.COMMIT)

    resumed = tx("resume", result.transaction_id, "--reason", "the database is back")
    second = tx("resume", result.transaction_id)
    bench.settled(coordinator, committed=1)

    afterwards, all_of_them = tx("ls", "--discarded"), tx("ls", "--discarded", "--all")

    assert "checks exhausted" in row_of(listed, result.transaction_id)
    assert result.transaction_id not in afterwards.out
    assert "1 more were brought back; see them with --all" in afterwards.out
    assert "checks exhausted; brought back by " in row_of(all_of_them, result.transaction_id)
    assert "reason      checks exhausted\n  check count 2\n" in shown.out
    assert (resumed.code, second.code) == (0, 1)
    assert "was brought back before" in second.err
    # A check of before may be answered late; its number is not the fresh one's.
    assert counts[-1] == 0
    (message,) = bench.messages()
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("h", b"1")])
    assert "  resume  " in tx("show", result.transaction_id).out


@pytest.mark.thorough
def test_of_two_who_bring_the_same_back_at_once_the_first_in_the_audit_log_does(
    bench: Bench, tx: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = bench.coordinator(check_max=1)
    producer = bench.producer(check=lambda _: TransactionState.UNKNOWN)
    result = producer.send(bench.topic, value=b"v", execute=unknown)
    bench.settled(coordinator, discarded=1)
    coordinator.stop()
    write, others = AuditLog.write, []

    def slow(self: AuditLog, act: Act) -> int:
        if not others:
            # Another operator comes in after this one has looked.
            others.append(1)
            with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
                store.resume(result.transaction_id, "another")
        return write(self, act)

    monkeypatch.setattr(AuditLog, "write", slow)
    refused = tx("resume", result.transaction_id)

    assert others == [1]
    assert refused.code == 1
    assert "by another" in refused.err
    assert len([m for m in bench.messages(bench.topics.half) if dict(m.headers()).get("penstock-resumed")]) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (("show", "nonsense"), 2, "no transaction id"),
        (("commit", "nonsense"), 2, "no transaction id"),
        (("show", "018f4e9c-5c1e-7abc-8def-0123456789ab"), 1, "neither pending nor discarded"),
        (("resume", "018f4e9c-5c1e-7abc-8def-0123456789ab"), 1, "is not in"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    tx: Command, arguments: tuple[str, ...], code: int, printed: str
) -> None:
    outcome = tx(*arguments)

    assert outcome.code == code
    assert printed in outcome.err


def test_a_store_that_is_not_there_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch, tx: Command) -> None:
    monkeypatch.setattr(bench, "topics", type(bench.topics)("no.such.store"))

    outcome = tx("ls")

    assert outcome.code == 1
    assert "there is no topic no.such.store.half" in outcome.err


def test_logs_with_different_partition_counts_are_named(bench: Bench, tx: Command) -> None:
    half = bench.topics.half
    bench.admin.create_partitions([NewPartitions(half, 3)])[half].result(30)

    wait_until(lambda: (outcome := tx("ls")).code == 2 and "give all of them 3" in outcome.err)
