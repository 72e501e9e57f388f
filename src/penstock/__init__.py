"""penstock: ordered, concurrent consumption of Kafka with transactional messages and Spark sinks.

`App` runs handlers and sinks, `TransactionalProducer` and `Coordinator` make messages transactional, and
`penstock.spark_sink` has the source and sinks for Spark. Names are loaded on first use (PEP 562): a Spark worker that
imports the source does not load the consumer, and a command's help loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.clients.rights import MissingRightError
    from penstock.consumer import (
        CallNext,
        ConsumerStatistics,
        Context,
        DeadLetterLimit,
        DeferredCompletion,
        Explanation,
        Keyless,
        LitePushConsumer,
        Middleware,
        OnFailure,
        Order,
        ParkedMessage,
        RetryPolicy,
        WorkerResource,
        retry,
    )
    from penstock.errors import (
        BatchError,
        BrokerConnectionError,
        BufferFullError,
        ConfigurationError,
        DecisionNotStoredError,
        HalfNotStoredError,
        HandlerTimeLimitError,
        NotGivenUpError,
        PenstockError,
        PublicationNotSeenError,
        RegistryConnectionError,
        RetryLater,
        SinkError,
        StoppedError,
        StoreConnectionError,
        StoreDamagedError,
        StoreInUseError,
        TopicNotFoundError,
        TransactionError,
        TransactionRefusedError,
    )
    from penstock.fleet_member import CommandSettings, ReportSettings
    from penstock.message import Message
    from penstock.outgoing import Outgoing
    from penstock.running import RunningApp
    from penstock.telemetry import Telemetry
    from penstock.transactions import (
        Coordinator,
        FileStore,
        HalfMessage,
        SqlStore,
        TransactionalProducer,
        TransactionResult,
        TransactionState,
        create_inbox_table,
        inbox,
    )

__version__ = "0.2.0"

_HOMES = {
    "penstock.app": ("App",),
    "penstock.running": ("RunningApp",),
    "penstock.clients.rights": ("MissingRightError",),
    "penstock.consumer": (
        "CallNext",
        "ConsumerStatistics",
        "Context",
        "DeadLetterLimit",
        "DeferredCompletion",
        "Explanation",
        "Keyless",
        "LitePushConsumer",
        "Middleware",
        "OnFailure",
        "Order",
        "ParkedMessage",
        "RetryPolicy",
        "WorkerResource",
        "retry",
    ),
    "penstock.errors": (
        "BatchError",
        "BrokerConnectionError",
        "BufferFullError",
        "ConfigurationError",
        "DecisionNotStoredError",
        "HalfNotStoredError",
        "HandlerTimeLimitError",
        "NotGivenUpError",
        "PenstockError",
        "PublicationNotSeenError",
        "RegistryConnectionError",
        "RetryLater",
        "SinkError",
        "StoppedError",
        "StoreConnectionError",
        "StoreDamagedError",
        "StoreInUseError",
        "TopicNotFoundError",
        "TransactionError",
        "TransactionRefusedError",
    ),
    "penstock.fleet_member": ("CommandSettings", "ReportSettings"),
    "penstock.message": ("Message",),
    "penstock.outgoing": ("Outgoing",),
    "penstock.telemetry": ("Telemetry",),
    "penstock.transactions": (
        "Coordinator",
        "FileStore",
        "HalfMessage",
        "SqlStore",
        "TransactionResult",
        "TransactionState",
        "TransactionalProducer",
        "create_inbox_table",
        "inbox",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "App",
    "BatchError",
    "BrokerConnectionError",
    "BufferFullError",
    "CallNext",
    "CommandSettings",
    "ConfigurationError",
    "ConsumerStatistics",
    "Context",
    "Coordinator",
    "DeadLetterLimit",
    "DecisionNotStoredError",
    "DeferredCompletion",
    "Explanation",
    "FileStore",
    "HalfMessage",
    "HalfNotStoredError",
    "HandlerTimeLimitError",
    "Keyless",
    "LitePushConsumer",
    "Message",
    "Middleware",
    "MissingRightError",
    "NotGivenUpError",
    "OnFailure",
    "Order",
    "Outgoing",
    "ParkedMessage",
    "PenstockError",
    "PublicationNotSeenError",
    "RegistryConnectionError",
    "ReportSettings",
    "RetryLater",
    "RetryPolicy",
    "RunningApp",
    "SinkError",
    "SqlStore",
    "StoppedError",
    "StoreConnectionError",
    "StoreDamagedError",
    "StoreInUseError",
    "Telemetry",
    "TopicNotFoundError",
    "TransactionError",
    "TransactionRefusedError",
    "TransactionResult",
    "TransactionState",
    "TransactionalProducer",
    "WorkerResource",
    "__version__",
    "create_inbox_table",
    "inbox",
    "retry",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
