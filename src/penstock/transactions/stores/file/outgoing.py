"""What a file store publishes of a decided transaction, and under which name the done log has it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_128_digest

from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.wire.discarded import BY_OPERATOR, EXHAUSTED, encode_discarded
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_text
from penstock.transactions.wire.ops import Author, Verdict


def name_of(stored: StoredTransaction) -> str:
    """Return what stands in the done log for a transaction: its id, or where one can be settled twice, a name for each.

    One that was discarded, is resumed and commits is not taken for published because the done log has it as discarded.
    """
    return _name(stored, Verdict.COMMIT if stored.verdict is Verdict.COMMIT else Verdict.DISCARD)


def _name(stored: StoredTransaction, what: Verdict) -> str:
    if what is Verdict.COMMIT and stored.resumed is None:
        return stored.transaction_id
    return id_text(xxh3_128_digest(f"{stored.transaction_id} {what.name} {stored.resumed or ''}".encode()))


def publishable(stored: StoredTransaction, halves: Sequence[Half], discarded: str) -> Publishable:
    """Return what is published of a transaction that is decided COMMIT or DISCARD (then to the topic `discarded`)."""
    if stored.verdict is Verdict.DISCARD:
        messages = []
        for half in halves:
            why = BY_OPERATOR if stored.author is Author.OPERATOR else EXHAUSTED
            headers = encode_discarded(half, why, stored.check_count)
            messages.append(OutboundMessage(discarded, None, half.key, half.value, headers))
        return Publishable(name_of(stored), messages, None, discards=_name(stored, Verdict.COMMIT))
    messages = [OutboundMessage(half.topic, half.partition, half.key, half.value, half.headers) for half in halves]
    return Publishable(name_of(stored), messages, stored.line)
