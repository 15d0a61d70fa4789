"""The served model in Ollama's form: lists, details and capabilities.

Knows the service and the names of fields. Names may end with Ollama's default tag, `:latest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foreword.server.api_errors import unknown_model
from foreword.server.dialects.ollama.messages import can_think
from foreword.server.service import Service

LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
_WEIGHTS = (".safetensors", ".gguf", ".bin")

Json = dict[str, Any]


def served_name(names: Sequence[str], name: str) -> str:
    """The name of the server's that a client means. Raises APIError 404."""
    for meant in (name, name.removesuffix(LATEST)):
        if meant in names:
            return meant
    raise unknown_model(name.removesuffix(LATEST))


def listed(service: Service, names: Sequence[str]) -> Json:
    """/api/tags."""
    about = _about(service) | {"modified_at": _modified(service)}
    return {"models": [{"name": name, "model": name, **about} for name in names]}


def running(service: Service, names: Sequence[str]) -> Json:
    """/api/ps."""
    on_cpu = service.llm.config.model.device == "cpu"
    about = _about(service)
    about |= {
        "expires_at": NEVER,
        "size_vram": 0 if on_cpu else about["size"],
        "context_length": service.max_model_len,
    }
    return {"models": [{"name": name, "model": name, **about} for name in names]}


def shown(service: Service, name: str) -> Json:
    """/api/show of a model."""
    tokenizer, family = service.llm.tokenizer, _family(service)
    template = (tokenizer and tokenizer.chat_template) or ""
    parameters = {"num_ctx": service.max_model_len, **service.sampling_defaults}
    capabilities = ["completion"] + (["tools"] if template else [])
    if tokenizer is not None and can_think(service):
        capabilities.append("thinking")
    if service.llm.pictures is not None:
        capabilities.append("vision")
    if service.llm.engine.limits.hidden_size is not None and service.llm.pooling.refusal is None:
        capabilities.append("embedding")
    return {
        "modelfile": f"# foreword serves this model; it has no Modelfile.\nFROM {name}\n",
        "parameters": "\n".join(f"{key:<24} {value}" for key, value in parameters.items()),
        "template": template,
        "details": _details(service),
        "model_info": {"general.architecture": family, f"{family}.context_length": service.max_model_len},
        "capabilities": capabilities,
        "modified_at": _modified(service),
    }


def _about(service: Service) -> Json:
    return {
        "size": _num_bytes(Path(service.llm.config.model.model)),
        "digest": service.llm.cache_identity.model_id,
        "details": _details(service),
    }


def _details(service: Service) -> Json:
    family, of_layers = _family(service), service.llm.dtype
    is_gguf = service.llm.config.model.model.endswith(".gguf")
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "" if is_gguf else of_layers,
    }


def _family(service: Service) -> str:
    code = service.llm.cache_identity.facts.get("model", {}).get("code", {})
    return str(code.get("family") or code.get("class", "unknown").rpartition(".")[2])


def _modified(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _num_bytes(model: Path) -> int:
    """Bytes of the files of weights; 0 if they are elsewhere."""
    files = model.iterdir() if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS and file.is_file())
