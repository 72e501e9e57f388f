"""The options of a handler, as users give them: the one list, for `App.handler` and for `penstock.consumer.handler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypedDict

from penstock.consumer.handlers.options.ordering import KeyFunction, Keyless, Order
from penstock.consumer.handlers.options.retry_policy import RetryPolicy
from penstock.consumer.handlers.serialization.decoding import DecoderSpec
from penstock.consumer.handlers.serialization.encoding import EncoderSpec
from penstock.dead_letters.headers import DeadLetterFormat
from penstock.message import Message

#: Says whether a message is to be handled; where not, it is done at once.
Filter = Callable[[Message], bool]


class OnFailure(Enum):
    """What becomes of a message whose retries are exhausted."""

    #: It is written to the dead-letter topic; then its offset is done.
    DEAD_LETTER = "dead_letter"
    #: It is logged and counted; then its offset is done.
    DROP = "drop"
    #: Its key stays parked and its offset open, and everything else goes on. The log, `statistics().held_keys` and
    #: `explain()` say so. The next owner of its partition tries it again.
    HOLD = "hold"
    #: The app stops, and the offset stays open.
    STOP = "stop"


class HandlerOptions(TypedDict, total=False):
    """The options of a handler: `App.handler` explains them. A function of yours that hands them on can take them so.

    With `**options: Unpack[HandlerOptions]` a type checker knows their names and types there, too.
    """

    order: str | Order
    keyless: str | Keyless
    key: str | KeyFunction | None
    key_space: str | None
    filter: Filter | None
    decoder: DecoderSpec
    to: str | None
    encoder: EncoderSpec
    batch: int
    linger: float
    retry: RetryPolicy | None
    retry_delays: Sequence[float]
    on_failure: str | OnFailure
    dead_letter_topic: str | None
    dead_letter_format: str | DeadLetterFormat
    rate: float | None
    key_rate: float | None
    time_limit: float | None


#: What counts for an option that is left out.
DEFAULTS: Final = HandlerOptions(
    order=Order.KEY,
    keyless=Keyless.PARTITION,
    key=None,
    key_space=None,
    filter=None,
    decoder=None,
    to=None,
    encoder=None,
    batch=1,
    linger=0.0,
    retry=None,
    retry_delays=(),
    on_failure=OnFailure.STOP,
    dead_letter_topic=None,
    dead_letter_format=DeadLetterFormat.KAFKA,
    rate=None,
    key_rate=None,
    time_limit=None,
)
