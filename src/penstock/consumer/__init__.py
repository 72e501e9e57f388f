"""The consumer engine: poll loop, lanes, workers and tasks, retries, dead letters, rebalance and drain."""

from penstock.clients.cluster import Clock, Cluster
from penstock.clients.rights import Operation, Resource, Right, Rights
from penstock.consumer.handlers.environment import (
    AsyncMiddleware,
    CallNext,
    Middleware,
    MiddlewareSpec,
    PlainMiddleware,
    WorkerResource,
)
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler, HandlerFunction, Kind, handler
from penstock.consumer.handlers.options import (
    Filter,
    HandlerOptions,
    OnFailure,
    RetryFunction,
    RetryPolicy,
    StopFunction,
    WaitFunction,
    retry,
)
from penstock.consumer.handlers.ordering import KeyFunction, Keyless, Order
from penstock.consumer.handlers.results import DeferredCompletion
from penstock.consumer.handlers.serialization import Decoder, DecoderSpec, Encoder, EncoderSpec
from penstock.consumer.inspect.details import ConsumerDetails, ParkedMessage
from penstock.consumer.inspect.statistics import ConsumerStatistics, InHandler, Liveness, PartitionStatistics
from penstock.consumer.lite_push import LitePushConsumer
from penstock.consumer.outbox.dead_letters import DeadLetterLimit, DeadLetterReason
from penstock.consumer.poll.explain import Explanation
from penstock.consumer.poll.topics import Needs
from penstock.consumer.settings import UNCHANGED, ConsumerSettings, LiveSettings, Unchanged
from penstock.dead_letters.headers import DeadLetterFormat
from penstock.options import ClientConfig

__all__ = [
    "UNCHANGED",
    "AsyncMiddleware",
    "CallNext",
    "ClientConfig",
    "Clock",
    "Cluster",
    "ConsumerDetails",
    "ConsumerSettings",
    "ConsumerStatistics",
    "Context",
    "DeadLetterFormat",
    "DeadLetterLimit",
    "DeadLetterReason",
    "Decoder",
    "DecoderSpec",
    "DeferredCompletion",
    "Encoder",
    "EncoderSpec",
    "Explanation",
    "Filter",
    "Handler",
    "HandlerFunction",
    "HandlerOptions",
    "InHandler",
    "KeyFunction",
    "Keyless",
    "Kind",
    "LitePushConsumer",
    "LiveSettings",
    "Liveness",
    "Middleware",
    "MiddlewareSpec",
    "Needs",
    "OnFailure",
    "Operation",
    "Order",
    "ParkedMessage",
    "PartitionStatistics",
    "PlainMiddleware",
    "Resource",
    "RetryFunction",
    "RetryPolicy",
    "Right",
    "Rights",
    "StopFunction",
    "Unchanged",
    "WaitFunction",
    "WorkerResource",
    "handler",
    "retry",
]
