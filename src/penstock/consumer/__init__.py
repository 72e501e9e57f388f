"""The consumer engine: poll loop, lanes' workers and tasks, retries, dead letters, rebalance and drain."""

from penstock.consumer.failures.limits import DeadLetterLimit
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.handler import Handler, HandlerFunction, Kind, OnFailure, handler
from penstock.consumer.handlers.middleware import (
    AsyncMiddleware,
    CallNext,
    Middleware,
    MiddlewareSpec,
    PlainMiddleware,
)
from penstock.consumer.handlers.ordering import Keyless, Order
from penstock.consumer.handlers.retry_policy import RetryPolicy, retry
from penstock.consumer.handlers.worker_resource import WorkerResource
from penstock.consumer.inspection.explain import Explanation
from penstock.consumer.inspection.statistics import ConsumerStatistics, PartitionStatistics
from penstock.consumer.lite_push import UNCHANGED, LitePushConsumer, Unchanged
from penstock.consumer.settings import ConsumerSettings
from penstock.dead_letters.headers import DeadLetterFormat

__all__ = [
    "UNCHANGED",
    "AsyncMiddleware",
    "CallNext",
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
    "MiddlewareSpec",
    "OnFailure",
    "Order",
    "PartitionStatistics",
    "PlainMiddleware",
    "RetryPolicy",
    "Unchanged",
    "WorkerResource",
    "handler",
    "retry",
]
