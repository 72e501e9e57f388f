"""Whether a log is the one that was read: by topic ids, and by bounds where those are not known."""

from __future__ import annotations

import pytest

from penstock.transactions.stores.kafka.logs.log_identity import (
    DONE,
    HALF,
    OP,
    Committed,
    Fate,
    Start,
    decode_ids,
    encode_ids,
    starts_of,
)

IDS = {HALF: "h", OP: "o", DONE: "d"}


def logs(ids: dict[str, str], **changed: Committed) -> dict[str, Committed]:
    return {log: changed.get(log, Committed(5, 2, 9, ids)) for log in (HALF, OP, DONE)}


def test_a_log_is_read_on_from_its_position() -> None:
    assert starts_of(logs(IDS), IDS) == dict.fromkeys(IDS, Start(5, Fate.INTACT, 0))
    assert starts_of(logs({}), IDS)[HALF] == Start(5, Fate.INTACT, 0)


@pytest.mark.parametrize("log", [HALF, OP, DONE])
def test_another_topic_is_seen_by_its_id_though_its_end_is_past_the_position(log: str) -> None:
    starts = starts_of(logs(IDS), {**IDS, log: "other"})

    assert starts.pop(log) == Start(2, Fate.ANEW, 1)
    assert {start.fate for start in starts.values()} == {Fate.INTACT}


@pytest.mark.parametrize("log", [HALF, OP, DONE])
def test_the_position_of_a_topic_that_was_deleted_is_gone_and_its_id_stands_beside_the_others(log: str) -> None:
    committed = logs(IDS, **{log: Committed(None, 0, 9, {})})

    assert starts_of(committed, {**IDS, log: "other"})[log] == Start(0, Fate.ANEW, 1)
    assert starts_of(committed, IDS)[log] == Start(0, Fate.INTACT, 0), "the broker forgot it for its age"


@pytest.mark.parametrize("log", [HALF, OP])
def test_without_ids_the_bounds_tell(log: str) -> None:
    assert starts_of(logs({}, **{log: Committed(10, 0, 9, {})}), IDS)[log] == Start(0, Fate.ANEW, 1)
    assert starts_of(logs({}, **{log: Committed(5, 7, 9, {})}), IDS)[log] == Start(7, Fate.CUT, 2)


def test_without_ids_a_half_position_that_is_missing_beside_that_of_op_tells() -> None:
    assert starts_of(logs({}, half=Committed(None, 0, 9, {})), IDS)[HALF].fate is Fate.ANEW
    new = Committed(None, 0, 9, {})
    assert {one.fate for one in starts_of({HALF: new, OP: new, DONE: new}, IDS).values()} == {Fate.INTACT}


def test_a_done_position_that_an_older_version_left_behind_tells_nothing() -> None:
    committed = logs({}, done=Committed(1, 4, 9, IDS))

    assert starts_of(committed, IDS)[DONE] == Start(4, Fate.INTACT, 0)


def test_ids_stand_beside_names_of_producers() -> None:
    text = encode_ids(IDS)

    assert decode_ids(f"store.coordinator.x.a store.coordinator.x.b {text}") == IDS
    assert decode_ids(None) == decode_ids("") == decode_ids("half= other=1 half") == {}
