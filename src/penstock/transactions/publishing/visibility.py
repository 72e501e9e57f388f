"""When a committed reader sees what was published: a broker answers the end of a transaction before it is there to see.

The markers that end a transaction are written a little later, in each of its partitions. Where a reader of committed
records may read past what was written, it is over for him.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.clients.requests.log_ends import log_ends

_ANSWER_S = 2.0
_LOOK_S = 0.002
_LONGEST_S = 5.0
#: A partition where somebody else's transaction stays open is waited for so long, and then not for a while.
_OTHERS_S = 0.1
_SKIPPED_S = 30.0

#: Topic and partition.
Place = tuple[str, int]


class Visibility:
    """Waits until readers of committed records see what one producer published. Used by one thread.

    `own` is the place that nobody else holds up.
    """

    def __init__(self, admin: AdminClient, own: Place) -> None:
        self._admin = admin
        self._own = own
        # Places that were held up by others, each with the monotonic second at which it is waited for again.
        self._skipped: dict[Place, float] = {}

    def wait(self, written: Mapping[Place, int]) -> None:
        """Wait until all is visible, given the last offset that was written in each place.

        It waits no longer than some seconds: where brokers do not answer, that it was committed is all there is to
        tell. Nor does it wait for the end of transactions of others in the same partitions.
        """
        begun = time.monotonic()
        self._skipped = {place: until for place, until in self._skipped.items() if until > begun}
        left = {place: offset for place, offset in written.items() if place not in self._skipped}
        while left and (waited_s := time.monotonic() - begun) < _LONGEST_S:
            try:
                left = self._unseen(left)
            except KafkaException:
                pass
            else:
                if self._own not in left and waited_s > _OTHERS_S:
                    self._skipped.update(dict.fromkeys(left, time.monotonic() + _SKIPPED_S))
                    return
            if left:
                time.sleep(_LOOK_S)

    def _unseen(self, written: Mapping[Place, int]) -> dict[Place, int]:
        ends = log_ends(self._admin, list(written), _ANSWER_S)
        return {place: offset for place, offset in written.items() if ends[place] <= offset}
