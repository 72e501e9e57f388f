"""Whether a log is the one that was read: by topic ids, and by bounds if ids are unknown."""

from __future__ import annotations

import pytest

from penstock.transactions.stores.kafka.logs.recovered_partition import (
    DONE,
    HALF,
    OP,
    Committed,
    Fate,
    decode_ids,
    encode_ids,
    fates_of,
)

IDS = {HALF: "h", OP: "o", DONE: "d"}


def logs(ids: dict[str, str], **changed: Committed) -> dict[str, Committed]:
    return {log: changed.get(log, Committed(5, 2, 9, ids)) for log in (HALF, OP, DONE)}


def test_logs_that_are_as_they_were_are_intact() -> None:
    assert fates_of(logs(IDS), IDS) == fates_of(logs({}), IDS) == dict.fromkeys(IDS, Fate.INTACT)


@pytest.mark.parametrize("log", [HALF, OP, DONE])
def test_another_topic_is_seen_by_its_id_though_its_end_is_past_the_position(log: str) -> None:
    assert fates_of(logs(IDS), {**IDS, log: "other"}) == {**dict.fromkeys(IDS, Fate.INTACT), log: Fate.REPLACED}


@pytest.mark.parametrize("log", [HALF, OP, DONE])
def test_the_position_of_a_deleted_topic_is_gone_and_its_id_is_committed_with_the_others(log: str) -> None:
    committed = logs(IDS, **{log: Committed(None, 0, 9, {})})

    assert fates_of(committed, {**IDS, log: "other"})[log] is Fate.REPLACED
    assert fates_of(committed, IDS)[log] is Fate.INTACT, "the broker forgot it for its age"


@pytest.mark.parametrize("log", [HALF, OP])
def test_without_ids_the_bounds_tell(log: str) -> None:
    assert fates_of(logs({}, **{log: Committed(10, 0, 9, {})}), IDS)[log] is Fate.REPLACED
    assert fates_of(logs({}, **{log: Committed(5, 7, 9, {})}), IDS)[log] is Fate.CUT


def test_ids_are_committed_with_names_of_producers() -> None:
    text = encode_ids(IDS)

    assert decode_ids(f"store.coordinator.x.a store.coordinator.x.b {text}") == IDS
    assert decode_ids(None) == decode_ids("") == decode_ids("half= other=1 half") == {}
