"""The consumer engine: poll loop, lanes' workers and tasks, retries, dead letters, rebalance and drain."""

from penstock.consumer.deferred import DeferredCompletion
from penstock.consumer.explain import Explanation
from penstock.consumer.handlers import Handler, HandlerFunction, Kind, OnFailure, handler
from penstock.consumer.limits import DeadLetterLimit
from penstock.consumer.lite_push import UNCHANGED, LitePushConsumer, Unchanged
from penstock.consumer.ordering import Keyless, Order
from penstock.consumer.retries import RetryPolicy, retry
from penstock.consumer.settings import ConsumerSettings
from penstock.consumer.statistics import ConsumerStatistics, PartitionStatistics
from penstock.consumer.surroundings import Middleware, WorkerResource
from penstock.dead_letter_headers import DeadLetterFormat

__all__ = [
    "UNCHANGED",
    "ConsumerSettings",
    "ConsumerStatistics",
    "DeadLetterFormat",
    "DeadLetterLimit",
    "DeferredCompletion",
    "Explanation",
    "Handler",
    "HandlerFunction",
    "Keyless",
    "Kind",
    "LitePushConsumer",
    "Middleware",
    "OnFailure",
    "Order",
    "PartitionStatistics",
    "RetryPolicy",
    "Unchanged",
    "WorkerResource",
    "handler",
    "retry",
]
