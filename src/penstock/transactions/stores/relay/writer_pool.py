"""The transactional ids that stand for one: whoever opens takes all that can be had, and so shuts all others out.

An id cannot be had while a target takes not even the markers that end its last transaction: nobody can. And a writer
whose transaction failed is not used again. So there are several, each with a writer that is ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from penstock.clients.rights import Right
from penstock.clients.transactional.errors import IdLostError, NotOpenedError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.writer import PublicationSpans, TransactionalWriter
from penstock.options import ClientConfig

_log = logging.getLogger("penstock.transactions")

#: Seconds for a transactional id whose last transaction may wait for its markers, and for one that brokers do not give.
_ID_TIMEOUT_S = 2.0
_OPEN_TIMEOUT_S = 5.0
#: Transactional ids that stand for one.
_IDS = 3


class WriterPool:
    """Makes the writers of one shard. Used by one thread at a time; takes the arguments of `TransactionalWriter`."""

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        *,
        log_topic: str,
        ids_right: Right,
        rights: MissingRights,
        apart: bool,
        step: Callable[[str], object],
        spans: PublicationSpans | None = None,
    ) -> None:
        self._make = partial(
            TransactionalWriter,
            bootstrap_servers,
            config,
            log_topic=log_topic,
            ids_right=ids_right,
            rights=rights,
            apart=apart,
            reports_all=True,
            step=step,
            spans=spans,
        )

    def take(self, name: str) -> list[TransactionalWriter]:
        """Shut out whoever has one of the ids that stand for a name; return writers that have them.

        Raises `NotOpenedError` where the broker did not answer in time, or none can be had.
        """
        ids = [name, *(f"{name}.{number}" for number in range(2, _IDS + 1))]
        made: list[TransactionalWriter] = []
        try:
            for transactional_id in ids:
                made.append(self._make(transactional_id))
                try:
                    made[-1].open(_OPEN_TIMEOUT_S, _ID_TIMEOUT_S)
                except IdLostError as error:
                    made.pop().close()
                    _log.warning("%s", error)
        except BaseException:
            close_all(made)
            raise
        if not made:
            raise NotOpenedError(f"{name} cannot open: the last transactions of all its ids wait for their markers")
        return made


def close_all(writers: Iterable[TransactionalWriter]) -> None:
    """Discard what writers hold."""
    for writer in writers:
        writer.close()
