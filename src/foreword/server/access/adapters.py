"""The adapters that a server offers as models, by name. The engine identifies an adapter by its content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence

from foreword.errors import ConfigError, InvalidRequestError
from foreword.llm import LLM
from foreword.request import Adapter, LoRARequest
from foreword.server.crews import Crew

MOST_NAMES = 1024


class ServedAdapters:
    """The served adapters. Any thread may read them, but only the event loop changes them."""

    def __init__(self, llm: LLM, modules: Sequence[str], model_names: Collection[str]) -> None:
        """`modules`: "name=path", or vLLM's JSON. `model_names`: names that the model itself has.

        Raises ConfigError or InvalidRequestError for an adapter that cannot be served.
        """
        self._loaded, self._model_names = llm.adapters, model_names
        self._served: dict[str, LoRARequest] = {}
        self._reading: dict[str, asyncio.Task[Adapter]] = {}
        self._next: dict[str, asyncio.Task[Adapter]] = {}
        """For each folder, `_reading` has the task that reads its files now, and `_next` the task that reads next."""
        if modules and self._loaded is None:
            raise ConfigError("lora_modules needs enable_lora; give --enable-lora too")
        for module in modules:
            request = _parse(module)
            self.check_new(request)
            self.load(request)
            self.add(request)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    @property
    def num_bytes(self) -> int:
        """The memory of all loaded adapters in bytes."""
        return 0 if self._loaded is None else self._loaded.num_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._served

    async def load_in(self, crew: Crew, request: LoRARequest) -> Adapter:
        """Call `load` in a thread, in one thread at a time for each folder, so that a slow folder delays no other.

        Callers share the first read that begins after their calls. Raises the errors of `load`, or APIError.
        """
        path = request.lora_path
        if path not in self._next:
            self._next[path] = asyncio.ensure_future(self._load_after(self._reading.get(path), crew, request))
        return await asyncio.shield(self._next[path])

    async def _load_after(self, other: asyncio.Task[Adapter] | None, crew: Crew, request: LoRARequest) -> Adapter:
        path = request.lora_path
        if other is not None:
            await asyncio.wait([other])
        self._reading[path] = self._next.pop(path)
        try:
            return await crew.run(lambda: self.load(request))
        finally:
            del self._reading[path]

    def load(self, request: LoRARequest) -> Adapter:
        """Return the adapter in a folder, from memory or from its files. Any thread may call it.

        Raises InvalidRequestError or AdaptersBusyError.
        """
        if self._loaded is None:
            raise InvalidRequestError("this server runs no adapters; start it with --enable-lora")
        return self._loaded.get(request.lora_path)

    def find(self, name: str) -> LoRARequest:
        return self._served[name]

    def check_new(self, request: LoRARequest) -> None:
        """Raise InvalidRequestError for a name under which no new adapter can be served."""
        name = request.lora_name
        if not name or len(name) > 256:
            raise InvalidRequestError(f"lora_name={name!r:.80} is not a name; use 1 to 256 characters")
        if name in self._model_names or (name in self._served and not request.load_inplace):
            raise InvalidRequestError(
                f"{name!r:.80} is served already; unload it first, or load it with load_inplace=true"
            )
        if name not in self._served and len(self._served) >= MOST_NAMES:
            raise InvalidRequestError(f"{MOST_NAMES} adapters are served, which is the limit; unload one first")

    def add(self, request: LoRARequest) -> None:
        """Serve an adapter under its name. It replaces an adapter of the same name."""
        self._served[request.lora_name] = request

    def remove(self, name: str) -> bool:
        """Stop serving an adapter. Returns whether it was served. Running requests keep the adapter until they end."""
        return self._served.pop(name, None) is not None


def _parse(module: str) -> LoRARequest:
    """Read an entry of `lora_modules`. Raises ConfigError."""
    name, equals, path = module.partition("=")
    if module.startswith("{"):
        try:
            fields = json.loads(module)
            name, equals, path = fields["name"], "=", fields["path"]
        except (ValueError, LookupError, TypeError):
            equals = ""
    if not equals or not isinstance(name, str) or not isinstance(path, str) or not path:
        raise ConfigError(f"lora_modules has {module!r:.120}; use name=path, or {{'name': ..., 'path': ...}} as JSON")
    return LoRARequest(name, lora_path=path)
