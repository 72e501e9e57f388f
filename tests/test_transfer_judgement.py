"""The judge of the coordinators' chaos finds planted faults."""

from __future__ import annotations

import pytest

from chaos.transfer import Sent, judge

A1, A2, A3, B1 = b"a-1", b"a-2", b"a-3", b"b-1"
ALL = [(b"a", A1), (b"a", A2), (b"b", B1)]


def sent() -> Sent:
    made = Sent(rolled_back={A3})
    made.committed[b"a"] += [A1, A2]
    made.committed[b"b"] += [B1]
    return made


def test_what_was_sent_is_well_if_all_of_it_is_seen_once_and_per_key_in_order() -> None:
    assert judge(ALL, sent()) == []
    assert judge([(b"a", A1), (b"b", B1), (b"a", A2)], sent()) == []


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (ALL[1:], "1 lost"),
        ([*ALL, (b"b", B1)], "1 seen more than once"),
        ([*ALL, (b"a", A3)], "1 rolled back and seen"),
        ([*ALL, (b"a", b"strange")], "1 never sent"),
        ([ALL[1], ALL[0], ALL[2]], "1 of keys out of order"),
    ],
)
def test_each_fault_is_found_and_named(seen: list[tuple[bytes, bytes]], fault: str) -> None:
    assert [one.split(":")[0] for one in judge(seen, sent())] == [fault]
