"""The consumer engine: poll loop, lanes' workers and tasks, retries, dead letters, rebalance and drain."""

from penstock.clients.cluster import Clock, Cluster
from penstock.clients.requests.granted_rights import Rights
from penstock.clients.rights import Grantable, Operation, Resource, Right
from penstock.consumer.failures.dead_letter_reasons import DeadLetterReason
from penstock.consumer.failures.limits import DeadLetterLimit
from penstock.consumer.handlers.context import Context
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.environment.middleware import (
    AsyncMiddleware,
    CallNext,
    Middleware,
    MiddlewareSpec,
    PlainMiddleware,
)
from penstock.consumer.handlers.environment.worker_resource import WorkerResource
from penstock.consumer.handlers.handler import Handler, HandlerFunction, Kind, handler
from penstock.consumer.handlers.options.handler_options import Filter, HandlerOptions, OnFailure
from penstock.consumer.handlers.options.ordering import KeyFunction, Keyless, Order
from penstock.consumer.handlers.options.retry_policy import (
    RetryFunction,
    RetryPolicy,
    StopFunction,
    WaitFunction,
    retry,
)
from penstock.consumer.handlers.serialization.decoding import Decoder, DecoderSpec
from penstock.consumer.handlers.serialization.encoding import Encoder, EncoderSpec
from penstock.consumer.inspection.details import ConsumerDetails
from penstock.consumer.inspection.explain import Explanation
from penstock.consumer.inspection.liveness import InHandler, Liveness
from penstock.consumer.inspection.parked_keys import ParkedMessage
from penstock.consumer.inspection.statistics import ConsumerStatistics, PartitionStatistics
from penstock.consumer.lite_push import LitePushConsumer
from penstock.consumer.polling.health.startup_checks import Needs
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
    "Grantable",
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
