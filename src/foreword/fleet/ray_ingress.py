"""The server as a deployment of Ray Serve, for clusters that Serve's config files or KubeRay run.

    applications:
      - name: foreword
        route_prefix: /
        import_path: foreword.fleet.ray_ingress:build
        args: {model: Qwen/Qwen3-8B, replicas: 4, fronts: 2, max_model_len: 32768}

`args` has the model, the number of fronts, and options of `foreword serve` with underscores.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve

from foreword.config import EngineConfig, Environment
from foreword.config.option import pop_fields
from foreword.errors import ConfigError
from foreword.fleet.front import open_front
from foreword.fleet.options import FleetConfig
from foreword.fleet.ray_serve import RayLink, application
from foreword.fleet.run import door_to
from foreword.server.app import make_app
from foreword.server.dashboard.mount import mount_dashboard
from foreword.server.options import ServerConfig, name_of_model

MAX_FRONTS = 64


class Front:
    """The HTTP server in front of the engines. Several servers tell each other the work that they reserve."""

    def __init__(self, engine: Any, model: str, options: Mapping[str, Any], config: ServerConfig) -> None:
        self._engine, self._model, self._options, self._config = engine, model, options, config

    async def __serve_build_asgi_app__(self) -> Any:
        """Make the server's app. Serve calls this once."""
        link = RayLink(serve.get_replica_context().app_name, self._engine)
        engine = EngineConfig.from_options(self._model, **self._options)
        front = open_front(engine, await link.facts_of_engine())
        name = next(iter(self._config.served_model_name), name_of_model(self._model))
        app = make_app(front, self._config, name, door_to(link))
        if self._config.dashboard:
            mount_dashboard(app, app.state.service)
        return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for Serve's `import_path`. Raises ConfigError for an unknown or wrong argument."""
    options = {name: value for name, value in args.items() if value is not None}  # null leaves the default
    model, fronts = options.pop("model", None), options.pop("fronts", 1)
    if not isinstance(model, str):
        raise ConfigError(f"args has model={model!r}; name a folder or a hub id")
    if not isinstance(fronts, int) or not 1 <= fronts <= MAX_FRONTS:
        raise ConfigError(f"args has fronts={fronts!r}; use 1 to {MAX_FRONTS}")
    environment = Environment.read()
    for name in ("api_key", "operator_key", "server_secret"):
        if (value := getattr(environment, name)) is not None:
            options.setdefault(name, value)
    if "api_key" in options or "keys_file" in options:
        options.setdefault("server_secret", secrets.token_hex(16))  # one secret for all fronts, which share caches
    options.setdefault("replicas", 1)
    config = ServerConfig(**pop_fields(options, ServerConfig))
    fleet = FleetConfig(**pop_fields(options, FleetConfig))
    EngineConfig.from_options(model, **options)  # refuse wrong options before anything starts
    engine = application(model, options, fleet)
    front = serve.deployment(
        name="front",
        num_replicas=fronts,
        max_ongoing_requests=10_000,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 1},
    )(serve.ingress()(Front))
    return front.bind(engine, model, options, config)
