"""What a coordinator does to its store by command: settle and resume, as an operator, in the store's own audit, too."""

from __future__ import annotations

from collections.abc import Callable

from penstock.fleet_member import Outcome, StoreOperator
from penstock.options import ClientConfig
from penstock.transactions.operator.effects import Decided, Effect, await_effect
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.stores.relay.store import RelayedStore
from penstock.transactions.wire.ops import Verdict

#: Seconds to wait until a decision takes effect: whoever asked waits for an answer, and not for ever.
_EFFECT_S = 8.0
_DECISIONS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "discard": Verdict.DISCARD}
_OUTCOMES = {Effect.DONE: Outcome.DONE, Effect.REFUSED: Outcome.REFUSED, Effect.WAITS: Outcome.SENT}

#: Decides a transaction and waits for the effect: its id, the verdict, who and why.
_Decide = Callable[[str, Verdict, str, str], Decided]


def operator_of(store: RelayedStore) -> StoreOperator:
    """Return what is done to a store in a database or in files."""

    def decide(transaction_id: str, verdict: Verdict, actor: str, why: str) -> Decided:
        administration = store.administration()
        administration.decide(transaction_id, verdict, actor, why)
        return await_effect(administration.show, transaction_id, verdict, _EFFECT_S)

    def resume(transaction_id: str, actor: str, why: str) -> str:
        store.administration().resume(transaction_id, actor, why)
        return _resumed(transaction_id)

    return StoreOperator(_settling(decide), resume)


def operator_in_kafka(bootstrap_servers: str, prefix: str, config: ClientConfig) -> StoreOperator:
    """Return what is done to a store in Kafka."""

    def decide(transaction_id: str, verdict: Verdict, actor: str, why: str) -> Decided:
        with KafkaAdministration(bootstrap_servers, prefix, config) as store:
            return store.decide(transaction_id, verdict, actor, why, _EFFECT_S)

    def resume(transaction_id: str, actor: str, why: str) -> str:
        with KafkaAdministration(bootstrap_servers, prefix, config) as store:
            store.resume(transaction_id, actor, why)
        return _resumed(transaction_id)

    return StoreOperator(_settling(decide), resume)


def _settling(decide: _Decide) -> Callable[[str, str, str, str], tuple[Outcome, str]]:
    def settle(transaction_id: str, decision: str, actor: str, why: str) -> tuple[Outcome, str]:
        verdict = _DECISIONS[decision]
        decided = decide(transaction_id, verdict, actor, why)
        return _OUTCOMES[decided.effect], f"transaction {transaction_id}: {decided.text(verdict)}"

    return settle


def _resumed(transaction_id: str) -> str:
    return f"transaction {transaction_id} was brought back, undecided; its group is asked again"
