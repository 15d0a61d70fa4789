"""The methods that a server offers for linking (reuse of a text's KV at another position, which is approximate).

A gate refuses a method that lost too many right answers in the measurement of the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from foreword.config import user_path
from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import EXACT, Gate, MeasuredLinks, Method
from foreword.pml.composition import Composition
from foreword.server.options import ServerConfig

if TYPE_CHECKING:
    from foreword.server.service import Service

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_SHARE = 0.95
"""Default of `link_gate`: the share of the plain prompt's right answers that a method must still get right. The
measurement must show this share with 95% confidence."""
MOST_SOURCES = 1024
"""Limit of a prompt's sources, because the engine looks for each source in every step until all are cached."""


def read_gate(config: ServerConfig, *, allows_links: bool) -> Gate | None:
    """Read the gate that methods must pass; None if nothing may be linked. Raises ConfigError.

    This needs no model, so that mistakes are reported before a model is loaded.
    """
    if not allows_links:
        for name in ("link_measurements", "link_gate"):
            value = getattr(config, name)
            if value is not None:
                raise ConfigError(f"{name}={value} needs allow_links; give --allow-links too, or leave it out")
        return None
    measured = None if config.link_measurements is None else MeasuredLinks.read(user_path(config.link_measurements))
    return Gate(LEAST_SHARE if config.link_gate is None else config.link_gate, measured)


@dataclass(frozen=True, slots=True)
class ServedLinks:
    """The methods that clients of one server may ask for."""

    gate: Gate | None
    """Decides which methods are served; None: clients may ask for no method."""
    max_source_tokens: int
    """Limit of the tokens of one prompt's sources. More tokens do not fit into the pool together."""
    choosing: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)
    """Held during a pass through the model's first layers, by which some methods choose tokens. So only one such pass
    runs at a time while the engine works."""

    @classmethod
    def of(cls, config: ServerConfig, *, allows_links: bool, model_id: str, max_source_tokens: int) -> ServedLinks:
        """Make the methods that the options allow for this model. Raises ConfigError if another model was measured."""
        gate = read_gate(config, allows_links=allows_links)
        if gate is not None:
            gate.check_model(model_id)
            logger.info("links: %s", _in_words(gate), extra={"fields": {"event": "links", "gate": gate.least}})
        return cls(gate, max_source_tokens)

    def method_of_edits(self, name: str) -> Method:
        """Return the method for an edited chat. Raises InvalidRequestError for a method that is not served."""
        method = self._known(name)
        if self.gate is not None:
            self.gate.check_edits(method.name)
        return method

    def method(self, name: str) -> Method:
        """Return the method of a request. Raises InvalidRequestError if it is unknown, or refused for all prompts.

        `check_parts` checks the method later for the prompt's parts, which may have gaps between their positions.
        """
        method = self._known(name)
        if self.gate is not None and not self.gate.serves(method.name, has_gaps=True):
            self.gate.check(method.name)
        return method

    def _known(self, name: str) -> Method:
        if self.gate is None:
            raise InvalidRequestError(
                f"link={name!r} is refused, because this server links nothing; leave link out, or have the "
                "operator start it with --allow-links"
            )
        return Method.parse(name)

    def check_parts(self, method: Method, composition: Composition) -> None:
        """Raise InvalidRequestError for a method that is not served for these parts, for example because of gaps.

        A module may have its own `recompute`. If it computes fewer tokens than the method does, the `recompute` counts
        as another method. Otherwise a schema could evade the gate.
        """
        if self.gate is None:
            return
        self.gate.check(method.name, has_gaps=composition.has_gaps)
        if method.first_k is None:
            return
        linked = [
            part.first_k
            for part, end in zip(composition.parts, composition.begins[1:], strict=True)
            if part.first_k is not None and end > composition.num_exact_tokens
        ]
        for first_k in sorted(set(linked)):
            if first_k < method.first_k or method.percent is not None:
                name = f"first-{first_k}" if first_k else "none"
                try:
                    self.gate.check(name, has_gaps=composition.has_gaps)
                except InvalidRequestError as error:
                    raise InvalidRequestError(
                        f"a module of the prompt has recompute={name!r}, which counts as a method: {error}"
                    ) from error

    def check_sources(self, num_sources: int, num_tokens: int) -> None:
        """Raise InvalidRequestError for a prompt whose sources are too many or too long."""
        if num_sources > MOST_SOURCES:
            raise InvalidRequestError(
                f"the prompt has {num_sources} parts to link, and this server takes {MOST_SOURCES}; use larger parts, "
                "or leave link out"
            )
        if num_tokens > self.max_source_tokens:
            raise InvalidRequestError(
                f"the parts to link, each with what is computed before it, have {num_tokens} tokens, and the cache "
                f"holds {self.max_source_tokens}; send fewer or shorter ones, or leave link out"
            )


async def composed(service: Service, method: Method | None, num_choices: int, compose: Callable[[], T]) -> T:
    """Return the result of `compose`, from a thread. Methods that choose tokens by a pass of the model run one by one.

    Raises APIError 429 if the queue has no room.
    """
    if method is None or method.percent is None:  # a short body may name long modules
        return await service.crews.modules.run(compose)
    service.check_room(num_choices)  # choosing tokens takes a pass of the model
    async with service.links.choosing:
        service.check_room(num_choices)  # other calls may have come meanwhile
        return await to_its_end(compose)  # keeps the lock until the thread has ended


async def to_its_end(function: Callable[[], T]) -> T:
    """Run a function in a thread. A cancelled caller waits for the function's end, because the thread continues."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})  # a cancellation of this wait does not cancel `running`
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        await asyncio.gather(running, return_exceptions=True)  # takes the function's error, so that it is not logged
        raise cancelled
    return running.result()


def _in_words(gate: Gate) -> str:
    if not gate.least:
        return "every method is served, measured or not (link_gate=0)"
    if gate.measured is None:
        return f"served are all, of link_gate={gate.least:g}; without link_measurements nothing else is"
    served = [name for name in gate.measured.methods if gate.serves(name)]
    edits = [name for name in gate.measured.edits if gate.serves_edits(name)]
    with_gaps = [name for name in gate.measured.with_gaps if gate.serves(name, has_gaps=True)]
    return (
        f"served are {', '.join(dict.fromkeys([EXACT, *served]))}, of link_gate={gate.least:g}; with gaps between "
        f"positions {', '.join(with_gaps) or 'no method'}; for edits of chats {', '.join(edits) or 'no method'}"
    )
