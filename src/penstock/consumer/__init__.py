"""The consumer engine: poll loop, lanes' workers, retries, dead letters, rebalance and drain."""

from penstock.consumer.engine import LitePushConsumer
from penstock.consumer.ordering import Keyless, Order
from penstock.consumer.retries import RetryPolicy, retry
from penstock.consumer.settings import ConsumerSettings, Handler, HandlerFunction, OnFailure, handler
from penstock.consumer.statistics import ConsumerStatistics, PartitionStatistics

__all__ = [
    "ConsumerSettings",
    "ConsumerStatistics",
    "Handler",
    "HandlerFunction",
    "Keyless",
    "LitePushConsumer",
    "OnFailure",
    "Order",
    "PartitionStatistics",
    "RetryPolicy",
    "handler",
    "retry",
]
