"""The bank's readers see no account below zero, and RocketMQ's example ends as it does there."""

from __future__ import annotations

from collections import Counter

import pytest
from example_programs import Examples

from penstock.devbroker import DevBroker

pytestmark = pytest.mark.thorough


def test_readers_of_the_bank_never_see_an_account_below_zero(examples: Examples, broker: DevBroker) -> None:
    lines = examples.python("bank_transfer.py", broker.bootstrap_servers).splitlines()

    assert [line.split() for line in lines[:-1]] == [
        ["bank", "-5000", "5000"],
        ["ann", "5000", "5000"],
        ["ann", "-4000", "1000"],
        ["bob", "4000", "4000"],
        ["bob", "-3500", "500"],
        ["bank", "3500", "8500"],
    ]
    assert lines[-1] == "the same in the bank: yes"


def test_the_example_of_rocketmq_ends_as_it_does_there(examples: Examples, broker: DevBroker) -> None:
    *sent, ended = examples.python("rocketmq_transaction.py", broker.bootstrap_servers).splitlines()

    assert Counter(line.split(" ", 1)[0] for line in sent) == {"UNKNOWN": 10}
    assert ended == "committed 3, rolled back 3, discarded 4"
