"""How to test handlers and their order without Kafka: a Kafka in memory, in one thread, on a clock that you move.

Run with: .venv/bin/python -m pytest examples/testing_handlers.py
"""

# ruff: noqa: S101, PLR2004 - tests consist of asserts and expected values

import penstock
from penstock.testing import TestApp

balances: dict[bytes, int] = {}
refused: list[bytes] = []


def shop() -> penstock.App:
    """Make the app: in your project, import it."""
    app = penstock.App("shop", bootstrap_servers="kafka:9092")  # never connected here

    @app.handler("payments", retry=penstock.retry(attempts=3, wait=lambda _: 10.0), on_failure="dead_letter")
    def book(message: penstock.Message) -> None:
        account, amount = message.key or b"", int(message.value or b"0")
        if balances.get(account, 0) + amount < 0:
            refused.append(account)
            raise ValueError("not enough")
        balances[account] = balances.get(account, 0) + amount

    return app


def test_payments_of_an_account_are_booked_in_order_and_others_do_not_wait() -> None:
    """A failed payment blocks only its own account, until its retry."""
    balances.clear()
    refused.clear()
    with TestApp(shop()) as test:
        test.send("payments", "-5", key="alice")
        test.send("payments", "7", key="alice")
        test.send("payments", "1", key="bob")
        test.settle()  # the app does all that it can do now

        assert balances == {b"bob": 1}
        assert "parked" in str(test.explain()[0])

        test.advance(25)  # two more tries, ten seconds apart

        assert len(refused) == 3
        assert [letter.value for letter in test.dead_letters("payments")] == [b"-5"]
        assert balances == {b"bob": 1, b"alice": 7}
        assert test.committed("payments") == {0: 3}


def test_uncommitted_messages_are_handled_again_after_a_crash() -> None:
    """A handler gets a message again if the process dies before its commit: here it books the payment twice."""
    balances.clear()
    with TestApp(shop()) as test:
        test.send("payments", "5", key="alice")
        test.settle()
        test.crash()
        test.restart()
        test.settle()

        assert balances == {b"alice": 10}  # so make the effects of handlers idempotent


if __name__ == "__main__":
    test_payments_of_an_account_are_booked_in_order_and_others_do_not_wait()
    test_uncommitted_messages_are_handled_again_after_a_crash()
    print("both hold")
