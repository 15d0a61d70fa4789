"""Calls: verbs that every replica's engine runs, and the changes that a replica has missed.

If a replica misses a change (a reset, a smaller share, an entry's end), it makes the change before it takes requests
again.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Collection
from typing import Any

from foreword import __version__
from foreword.fleet.link import Link, ReplicaLostError
from foreword.fleet.messages import UNKNOWN_VERB, Refused, asking, unknown_verb
from foreword.server.api_errors import APIError
from foreword.server.verbs import T, Ts, Verb

logger = logging.getLogger(__name__)

CALL_S = 60.0
"""Seconds that one replica may take for a verb. After that, the replica's result is left out."""
AGAIN_S = 0.2
"""Seconds between two attempts to make a missed change."""
MAKE_UP_S = 60.0
"""Seconds for which a missed change is tried again while the replica refuses it."""
MOST_MISSED = 1_000
"""The most missed changes to remember for one replica. Beyond that, the oldest are dropped and an error is logged."""
ENGINE_FAILED = "engine_failed"
"""Code of a refusal by a replica whose engine takes no requests any more."""


class Calls:
    """Runs verbs on replicas. Belongs to the event loop."""

    def __init__(
        self,
        link: Link,
        names: Callable[[], Collection[str]],
        still: Collection[str],
        then: Callable[[str], None],
    ) -> None:
        """`names` returns the replicas. `still` is the set of replicas that stand still; its owner changes it. `then`
        is called with the name of a replica that has made all missed changes.
        """
        self._link, self._names, self._still, self._then = link, names, still, then
        self._missed: dict[str, list[bytes]] = {}
        self._making_up: dict[str, asyncio.Task[None]] = {}

    async def read(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Run a verb on every replica that does not stand still.

        Raises APIError 503 if no replica is reached, 501 if no replica knows the verb.
        """
        data = asking(verb, arguments)
        names = [name for name in self._names() if name not in self._still]
        results = await asyncio.gather(*(self._call(name, data) for name in names), return_exceptions=True)
        return _merged(results, verb.merge)

    async def change(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Run a verb that changes something. A replica that cannot be reached runs the verb later.

        Raises APIError 501 if a replica can be reached but does not know the verb.
        """
        data, names = asking(verb, arguments), self._names()
        results = await asyncio.gather(*(self._change(name, data) for name in names), return_exceptions=True)
        return _merged(results, verb.merge, by_all=True)

    def catch_up(self, name: str) -> bool:
        """Have a replica make the changes that it missed, and then call `then`. Returns False if it has missed none."""
        if name not in self._missed:
            return False
        if name not in self._making_up:
            task = self._making_up[name] = asyncio.create_task(self._make_up(name))
            task.add_done_callback(lambda task: self._end(name, task))
        return True

    def leave(self, name: str) -> None:
        """Forget the missed changes of a replica that is gone."""
        self._missed.pop(name, None)
        if (task := self._making_up.pop(name, None)) is not None:
            task.cancel()

    def stop(self) -> None:
        for name in list(self._making_up):
            self.leave(name)

    async def _change(self, name: str, data: bytes) -> Any:
        missed = self._missed.get(name)
        if missed is None and name not in self._still:
            try:
                return await self._call(name, data)
            except (ReplicaLostError, asyncio.CancelledError):  # the caller may have left
                self._miss(name, data)
                if name not in self._still:
                    self.catch_up(name)
                raise
        self._miss(name, data)  # the replica makes its missed changes in order
        raise ReplicaLostError(f"replica {name} stands still", died=False)

    def _miss(self, name: str, data: bytes) -> None:
        if name not in self._names():
            return
        missed = self._missed.setdefault(name, [])
        missed.append(data)
        if len(missed) > MOST_MISSED:
            del missed[0]
            logger.error("replica %s has missed more than %d changes; the oldest is forgotten", name, MOST_MISSED)

    async def _make_up(self, name: str) -> None:
        missed = self._missed[name]
        logger.info("replica %s makes up for %d changes that it missed", name, len(missed))
        while missed and name not in self._still:
            data, limit = missed[0], time.monotonic() + MAKE_UP_S
            while name not in self._still:
                try:
                    await self._call(name, data)
                except ReplicaLostError:
                    await asyncio.sleep(AGAIN_S)
                    continue
                except Exception as error:
                    if (
                        isinstance(error, APIError) and error.code != UNKNOWN_VERB and time.monotonic() < limit
                    ):  # the change may need blocks of requests that are about to end
                        await asyncio.sleep(AGAIN_S)
                        continue
                    logger.error("replica %s did not make up for a change that it missed: %s", name, error)
                if missed and missed[0] is data:
                    del missed[0]
                break

    def _end(self, name: str, task: asyncio.Task[None]) -> None:
        if self._making_up.get(name) is not task:
            return
        del self._making_up[name]
        if not self._missed.get(name):
            self._missed.pop(name, None)
            self._then(name)
        elif name not in self._still:
            self.catch_up(name)

    async def _call(self, name: str, data: bytes) -> Any:
        """Get one replica's result. Raises ReplicaLostError if it does not answer, or if its engine has failed."""
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._link.call(name, data)
        except TimeoutError as error:
            raise ReplicaLostError(f"replica {name} has not answered for {CALL_S:.0f} s", died=False) from error
        try:
            result = pickle.loads(answer)
        except Exception as error:  # the replica's classes are of another version
            logger.warning("replica %s is left out, because its answer cannot be read: %r", name, error)
            message = f"What replica {name} answers to foreword {__version__} is of another version, and cannot be read"
            raise unknown_verb(message) from error
        if not isinstance(result, Refused):
            return result
        if result.code == ENGINE_FAILED:
            raise ReplicaLostError(result.message, died=True)
        if result.code == UNKNOWN_VERB:
            logger.warning("replica %s is left out: %s", name, result.message)
        raise result.error()


def _merged(results: list[Any], merge: Callable[[list[T]], T], *, by_all: bool = False) -> T:
    """Merge the answers of the replicas that were reached and know the verb. An error among the answers is raised.

    Raises APIError 503 if no replica was reached, and 501 if no replica knows the verb; with `by_all`, 501 if any
    replica does not know the verb.
    """
    answers: list[T] = []
    refused: APIError | None = None
    for result in results:
        if not isinstance(result, BaseException):
            answers.append(result)
        elif isinstance(result, APIError) and result.code == UNKNOWN_VERB:
            refused = result
        elif not isinstance(result, ReplicaLostError):
            raise result
    if not answers:
        raise refused or none_ready()
    if by_all and refused is not None:
        message = f"{refused} Other replicas have made the change."
        raise APIError(refused.status, message, kind=refused.kind, code=refused.code)
    return merge(answers)


def none_ready() -> APIError:
    """The error of a call that no replica takes."""
    return APIError(
        503,
        "No replica takes requests now; try again in 5 s.",
        kind="server_error",
        code="no_replica",
        headers={"Retry-After": "5"},
    )
