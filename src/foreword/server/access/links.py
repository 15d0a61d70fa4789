"""Which methods of linking a server offers: those that the operator allows, and that agree often enough.

Knows the server's options, the file of measured agreement, and the size of prompts; knows no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from foreword.engine import Prompt
from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import Gate, MeasuredLinks, Method, with_links
from foreword.pml.composition import Composition
from foreword.server.options import ServerConfig

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.99
"""`link_gate`, unless it is given."""
MOST_RUNS = 1024
"""Most linked parts of a prompt: the engine looks for the source of each in every step until all are there."""


def read_gate(config: ServerConfig, *, allows_links: bool) -> Gate | None:
    """The bar that methods must pass; None if nothing is linked. Raises ConfigError.

    Needs no model, so that mistakes are told before one is loaded.
    """
    if not allows_links:
        for name in ("link_measurements", "link_gate"):
            value = getattr(config, name)
            if value is not None:
                raise ConfigError(f"{name}={value} needs allow_links; give --allow-links too, or leave it out")
        return None
    measured = None if config.link_measurements is None else MeasuredLinks.read(config.link_measurements.expanduser())
    return Gate(LEAST_SHARE if config.link_gate is None else config.link_gate, measured)


@dataclass(frozen=True, slots=True)
class ServedLinks:
    """The methods that clients of one server may ask for."""

    gate: Gate | None
    """None: none."""
    max_source_tokens: int
    """Most tokens of one prompt's sources: more cannot lie in the pool together."""

    @classmethod
    def of(cls, config: ServerConfig, *, allows_links: bool, model_id: str, max_source_tokens: int) -> ServedLinks:
        """What the options say about this model. Raises ConfigError if another one was measured."""
        gate = read_gate(config, allows_links=allows_links)
        if gate is not None:
            gate.check_model(model_id)
            logger.info("links: %s", _in_words(gate), extra={"fields": {"event": "links", "gate": gate.least}})
        return cls(gate, max_source_tokens)

    def method(self, name: str) -> Method:
        """The method of a request. Raises InvalidRequestError for one that is unknown, or that is not served."""
        if self.gate is None:
            raise InvalidRequestError(
                f"link={name!r} is refused: this server links nothing, unless its operator starts it with "
                "--allow-links; leave link out"
            )
        method = Method.parse(name)
        self.gate.check(method.name)
        return method

    def check_sources(self, num_tokens: int) -> None:
        """Raise InvalidRequestError for sources that cannot be cached together."""
        if num_tokens > self.max_source_tokens:
            raise InvalidRequestError(
                f"the documents, each with the instructions before it, have {num_tokens} tokens, and the cache holds "
                f"{self.max_source_tokens}; send fewer or shorter ones, or leave link out"
            )

    def linked(self, prompt: Prompt, composition: Composition, method: Method) -> Prompt:
        """The prompt with its parts linked. Raises InvalidRequestError if there are too many."""
        found = with_links(prompt, composition, method)
        num_runs = 0 if found.links is None else len(found.links.runs)
        if num_runs > MOST_RUNS:
            raise InvalidRequestError(
                f"the prompt has {num_runs} parts to link, and this server takes "
                f"{MOST_RUNS}; use larger parts, or leave link out"
            )
        return found


def _in_words(gate: Gate) -> str:
    """What is served, for the log."""
    if not gate.least:
        return "every method is served, measured or not (link_gate=0)"
    measured = {} if gate.measured is None else gate.measured.agreements
    served = [name for name, one in measured.items() if one.share >= gate.least]
    why = "; without link_measurements nothing else is" if gate.measured is None else ""
    return f"served are {', '.join(['all', *served])}, of link_gate={gate.least:g}{why}"
