"""`foreword serve --replicas N`: starts the replicas, and the server in front of them.

Connects what other modules make: Ray's application, the front and the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foreword.cluster import RoutingCore, RoutingOptions
from foreword.config import EngineConfig
from foreword.events.peer_link import PeerLink
from foreword.fleet.front import open_front
from foreword.fleet.options import FleetConfig
from foreword.fleet.ray_serve import RayLink, replicas_of
from foreword.fleet.routed import RoutedEngines
from foreword.llm import LLM
from foreword.model.checkpoint.gguf.unfold import unfolded
from foreword.model.checkpoint.hub import refuse_wrong_path
from foreword.server.engine_thread import AfterStep
from foreword.server.options import ServerConfig
from foreword.server.records import Records
from foreword.server.run import serve
from foreword.server.service import OpenDoor

logger = logging.getLogger(__name__)

APPLICATION = "foreword"


def serve_replicas(model: str, options: Mapping[str, Any], config: ServerConfig, fleet: FleetConfig) -> bool:
    """Run the server with several engines. `options` are the options of each engine.

    Raises ConfigError, ModelLoadError, UnsoundGgufError or UnsupportedModelError.
    """
    engine = EngineConfig.from_options(model, **options)
    refuse_wrong_path(unfolded(engine.model).model)  # before Ray starts, whose errors do not say why
    logger.info("starting %d replicas", fleet.replicas)
    with replicas_of(model, options, fleet, APPLICATION) as link:
        front = open_front(engine, asyncio.run(link.facts_of_engine()))
        return serve(front, config, door_to(link))


def door_to(link: RayLink) -> OpenDoor:
    """Return a function that makes the `RoutedEngines` with which a server uses the replicas of a link."""

    def open_door(front: LLM, records: Records, after_step: Sequence[AfterStep]) -> RoutedEngines:
        life = os.urandom(8).hex()
        options = RoutingOptions(block_tokens=front.layout.block_size, share_load=True)
        core = RoutingCore(options, router=f"front-{life[:6]}", life=life)
        peers = partial(PeerLink, core, link.host, link.find_fronts)
        return RoutedEngines(front, records, after_step, core, link, open_peers=peers)

    return open_door
