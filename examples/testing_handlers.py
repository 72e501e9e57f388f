"""How to test handlers and their order without Kafka: a Kafka in memory, in one thread, on a clock that you move.

Run with: .venv/bin/python -m pytest examples/testing_handlers.py
"""

# ruff: noqa: S101, PLR2004 - tests are made of asserts and of the values they expect

import penstock
from penstock.testing import TestApp

balances: dict[bytes, int] = {}
refused: list[bytes] = []


def shop() -> penstock.App:
    """Make the app: in your project, import it."""
    app = penstock.App("shop", bootstrap_servers="kafka:9092")  # nobody is asked here

    @app.handler("payments", retry=penstock.retry(attempts=3, wait=lambda _: 10.0), on_failure="dead_letter")
    def book(message: penstock.Message) -> None:
        account, amount = message.key or b"", int(message.value or b"0")
        if balances.get(account, 0) + amount < 0:
            refused.append(account)
            raise ValueError("not enough")
        balances[account] = balances.get(account, 0) + amount

    return app


def test_payments_of_an_account_are_booked_in_order_and_others_need_not_wait() -> None:
    """A payment that fails holds back its own account only, until it is tried again."""
    balances.clear()
    refused.clear()
    with TestApp(shop()) as test:
        test.send("payments", "-5", key="alice")
        test.send("payments", "7", key="alice")
        test.send("payments", "1", key="bob")
        test.settle()  # everything that can be done now

        assert balances == {b"bob": 1}
        assert "parked" in str(test.explain()[0])

        test.advance(25)  # two more tries, ten seconds apart

        assert len(refused) == 3
        assert [letter.value for letter in test.dead_letters("payments")] == [b"-5"]
        assert balances == {b"bob": 1, b"alice": 7}
        assert test.committed("payments") == {0: 3}


def test_what_was_not_committed_is_handled_again_after_a_crash() -> None:
    """Handlers see a message again when the process dies before its commit: here that is once too often."""
    balances.clear()
    with TestApp(shop()) as test:
        test.send("payments", "5", key="alice")
        test.settle()
        test.crash()
        test.restart()
        test.settle()

        assert balances == {b"alice": 10}  # so make what a handler does idempotent


if __name__ == "__main__":
    test_payments_of_an_account_are_booked_in_order_and_others_need_not_wait()
    test_what_was_not_committed_is_handled_again_after_a_crash()
    print("both hold")
