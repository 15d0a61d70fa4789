"""The server's options. The engine's options are in foreword.config.

A field with a docstring is also a flag of `foreword serve` and a key of its config files (foreword.config.option).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from foreword.config.option import read_fields
from foreword.errors import ConfigError

MOST_SECONDS = 366 * 86400.0
"""Longest time limit: a year."""
_LEAST = (
    ("max_body_bytes", 1, "is too small; use a positive number"),
    ("max_choices", 1, "is too small; use a positive number"),
    ("max_cached_contents", 0, "is negative; use 0 to keep none"),
    ("max_schema_tokens", 0, "is negative; use 0 to keep none"),
    ("max_queued", 0, "is negative; use 0 to refuse requests that cannot run at once"),
    ("max_prompt_tokens", 1, "allows no prompt; use 1 or more, or None"),
)
"""The smallest valid value of each count, and the error's words for smaller values."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's options: who may use the server, its limits and its logs."""

    host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for other machines too."""
    port: int = 8000
    """Port to listen on; 0: any free port."""
    lora_modules: tuple[str, ...] = ()
    """Adapters that clients may give as `model`, as name=path; needs `enable_lora`."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; answers show the first. Without this option: the last part of the folder or
    hub id."""
    api_key: str | None = None
    """One key for everybody, or FOREWORD_API_KEY; `keys_file` has several tenants. None: the server asks for no key."""
    keys_file: Path | None = None
    """TOML file of tenants and their keys. The server reads the file again when it changes."""
    operator_key: str | None = None
    """Key for /dashboard, /metrics, /reset_prefix_cache and all of /v1/cache; or FOREWORD_OPERATOR_KEY."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server (CORS), such as https://chat.example.com; "*": all origins."""
    root_path: str = ""
    """Path under which a proxy publishes the server, such as /llm. The proxy may strip the path, or pass it on."""
    dashboard: bool = True
    """Show /dashboard, if its packages are installed."""
    otlp_traces_endpoint: str | None = None
    """URL that takes OpenTelemetry traces (OTLP over HTTP), such as http://localhost:4318/v1/traces."""
    record: Path | None = None
    """File to which requests are recorded for `foreword replay`, without their text."""
    server_secret: str | None = None
    """Secret that separates tenants' cached prefixes, or FOREWORD_SERVER_SECRET. None: a random one at each start of a
    server with keys."""
    share_prefix: tuple[Path, ...] = ()
    """Text files. Prompts of any tenant that begin with such a text share its tokens in the cache."""
    allow_media_domain: tuple[str, ...] = ()
    """Domains from which the server fetches pictures that clients name by URL, such as images.example.com or
    host:port; each must lead to public addresses. Without this option, the server fetches nothing."""
    ignore_unknown_fields: bool = False
    """Ignore unknown fields of requests, with one warning per name, instead of refusing them."""
    max_queued: int = 256
    """Limit of the choices that wait while others run (`max_num_seqs`); the server refuses more with 429."""
    max_body_bytes: int = 16 * 2**20
    """Limit of a request's body in bytes; the server refuses longer bodies with 413."""
    max_prompt_tokens: int | None = None
    """Limit of one prompt's tokens; None: only `max_model_len` limits a prompt."""
    max_choices: int = 128
    """Limit of one call's choices: n times the number of prompts."""
    max_cached_contents: int = 256
    """Limit of one tenant's cached contents (Gemini's API); for all tenants together, 16 times this limit. 0: none."""
    max_schema_tokens: int = 1_000_000
    """Limit of the tokens of one tenant's prompt schemas; for all tenants together, 16 times this limit. 0: none."""
    score_template: str | None = None
    """How /v1/rerank asks the model about a document: qwen3-reranker, or a TOML file. None: calls are refused."""
    classify_template: str | None = None
    """How /v1/classify asks the model about a text: a TOML file. None: calls are refused."""
    link_measurements: Path | None = None
    """File that `foreword pml measure --save` wrote: how well this model answers linked prompts. `--gaps` measures
    prompts with gaps between positions too. Needs `allow_links`."""
    link_gate: float | None = None
    """Serve a method of linking only if it keeps this share of the right answers, as measured with 95% confidence; 0
    serves every method, measured or not. None: 0.95."""
    request_timeout_s: float = 600.0
    """Limit of the seconds from a request's arrival to its last token."""
    body_timeout_s: float = 60.0
    """Limit of the seconds in which a request's body must arrive."""
    shutdown_delay_s: float = 1.0
    """Seconds after SIGTERM in which the server still takes connections, while /ready answers 503."""
    shutdown_timeout_s: float = 600.0
    """Limit of the seconds in which accepted requests must finish after SIGTERM."""
    log_requests: bool = False
    """Log a line for each finished request (tokens, times and outcome, never its text), and for each refused call."""
    log_interval_s: float = 10.0
    """Seconds between two log lines about the traffic, while there is any; 0: none."""

    def __post_init__(self) -> None:
        read_fields(self)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path={self.root_path!r} is not a path; it must begin, and not end, with a slash")
        for origin in self.allowed_origins:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise ConfigError(
                    f"allowed_origins has {origin!r}, which is not an origin; use https://chat.example.com, or '*'"
                )
        if self.link_gate is not None and not 0 <= self.link_gate <= 1:
            raise ConfigError(f"link_gate={self.link_gate} is not a share; use 0 to 1, such as 0.99")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} is not a port; use 1 to 65535, or 0 for any free one")
        for name, instead in (("api_key", "to ask for no key"), ("operator_key", "for no operator's key")):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}='' is empty; leave it out {instead}")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name has an empty name; leave it out to use the model's name")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint={endpoint!r} is not a URL; use http://localhost:4318/v1/traces")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, least, remedy in _LEAST:
            if (number := getattr(self, name)) is not None and number < least:
                raise ConfigError(f"{name}={number} {remedy}")
        for name in ("request_timeout_s", "body_timeout_s", "shutdown_timeout_s"):
            if not 0 < getattr(self, name) <= MOST_SECONDS:
                raise ConfigError(
                    f"{name}={getattr(self, name):g} is out of range; use a positive number, at most {MOST_SECONDS:.0f}"
                )
        for name, what in (("log_interval_s", "no lines"), ("shutdown_delay_s", "no delay")):
            if not 0 <= getattr(self, name) <= 86400:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use 1 to 86400, or 0 for {what}")


def name_of_model(model: str) -> str:
    """The default name of a model: its folder's name, or its file's without the ending."""
    path = PurePath(re.sub("^(ollama|lmstudio|package):", "", model))
    return path.stem if path.suffix.lower() == ".gguf" else path.name
