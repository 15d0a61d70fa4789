"""The form in which a model writes replies: a response template, and facts that templates do not have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import regex

from foreword.errors import ConfigError, ModelLoadError

FAMILIES = (
    "gpt_oss minimax_m2 kimi_k2 deepseek_v3 deepseek_v3_1 glm4 gemma4 functiongemma qwen3_coder mistral mistral_old "
    "nemotron granite3 llama4 llama3 hermes think"
).split()
"""Model families, in the order in which a chat template is searched for their marks (texts typical of the family). If
the marks of family A include those of family B, A comes before B."""

THINK = "think"
"""The name of the reply format with reasoning and without calls."""

BARE = "bare"
"""The form of forced calls for templates without a form: the whole reply is JSON. No chat template selects it."""

GENERIC = "generic"
"""The form of calls if a template takes no tools, and the prompt explains calls. No chat template selects it."""

_KINDS = {
    "tool_calls": "call",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
}
"""Kinds of the fields of a response template; all other fields are text."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks that open and close thinking in a reply."""

    opens: str
    closes: str
    before: str = ""
    """White space that templates write before `closes`."""
    after: str = ""
    """The text that templates write between `closes` and the answer."""
    after_call: str | None = None
    """The text that templates write between `closes` and a call; None: `after`."""
    is_expected: bool = False
    """Whether a reply always begins with thinking, and writes `opens` itself."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplyFormat:
    """A compiled response template, with the facts that foreword adds to it."""

    name: str
    template: Any
    """transformers' `ResponseTemplate`, or an object with its attributes."""
    thinking: ThinkingMarks | None = None
    """The marks of thinking; None if replies have no reasoning, or the end of reasoning is not known."""
    call_form: Mapping[str, Any] | None = None
    """The format in which forced calls are written; `forced.py` reads it. None: bare JSON."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply after its first call."""
    source: str = field(default="", repr=False)
    """The text of the template, in which markers are looked for."""

    @property
    def reads_calls(self) -> bool:
        return "tool_calls" in self.template.fields

    def kind(self, name: str) -> str:
        """The kind of a field: call, reasoning or text."""
        return _KINDS.get(name, "text")

    def has_marker(self, token: str) -> bool:
        """Whether a special token's text occurs in the form's definition, and so perhaps in one of its markers."""
        return token in self.source


def family(name: str) -> ReplyFormat:
    """The form of a family, by its name in FAMILIES."""
    return _read_family(name, _data(name))


def choose_format(option: str | None, spec: Mapping[str, Any] | None, chat_template: str | None) -> ReplyFormat | None:
    """Choose the form of a model's replies: from the option, else the checkpoint, else the chat template's family.

    The option is a family's name, a file, or the JSON text of a response template. Returns None if replies are plain
    text. Raises ConfigError for any other option, and ModelLoadError if transformers refuses the checkpoint's template.
    """
    base = next((_read_family(name, data) for name, data in _marked(chat_template or "")), None)
    if option is not None:
        return _chosen(option, base)
    if spec is not None:
        try:
            return _with_template("checkpoint", spec, base)
        except (ValueError, TypeError, KeyError) as error:
            raise ModelLoadError(
                f"the tokenizer's response_template cannot be used: {error}; correct it, or name a family with "
                f"response_template ({', '.join(FAMILIES)})"
            ) from error
    return base


def _chosen(option: str, base: ReplyFormat | None) -> ReplyFormat:
    if option in (*FAMILIES, BARE, GENERIC):
        return family(option)
    text = option
    if "{" not in option:
        try:
            text = Path(os.path.expanduser(option)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"response_template={option!r} is neither a family nor a file that can be read ({error}); families "
                f"are {', '.join(FAMILIES)}"
            ) from error
    try:
        spec = json.loads(text)
        if isinstance(spec, dict) and "response_template" in spec:
            return _read_family("option", spec, _compiled)
        return _with_template("option", spec, base)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"response_template={option!r:.60} is not a response template of transformers: {error}; correct it, or "
            f"name a family ({', '.join(FAMILIES)})"
        ) from error


def _with_template(name: str, spec: Any, base: ReplyFormat | None) -> ReplyFormat:
    """Make a reply format from a response template of a user or checkpoint.

    `base`: the format of the chat template's family, which gives the facts that response templates do not have.
    """
    template = _compiled(spec)
    parts = {} if base is None else {"thinking": base.thinking, "call_form": base.call_form, "stop": base.stop}
    if "thinking" not in parts or parts["thinking"] is None:
        parts["thinking"] = _marks_of(template)
    return ReplyFormat(name, template, source=_plain(spec), **parts)  # type: ignore[arg-type]


def _marks_of(template: Any) -> ThinkingMarks | None:
    for name, part in template.fields.items():
        if _KINDS.get(name) == "reasoning" and part.open_literals and part.close_literals:
            close = part.close_literals[0]
            return ThinkingMarks(part.open_literals[0], close)
    return None


def _read_family(
    name: str, data: Mapping[str, Any], compile_template: Callable[[Any], Any] | None = None
) -> ReplyFormat:
    """Make the form of a family. `compile_template` compiles the family's template; None: `_compiled_own` does."""
    marks = data.get("thinking")
    return ReplyFormat(
        name,
        (compile_template or _compiled_own)(data["response_template"]),
        None if marks is None else ThinkingMarks(**marks),
        data.get("call"),
        tuple(data.get("stop", ())),
        _plain(data["response_template"]),
    )


def _compiled(spec: Any) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(spec)


def _compiled_own(spec: Mapping[str, Any]) -> SimpleNamespace:
    """Compile one of foreword's own templates without transformers' checks. A test compares both results."""
    fields = {
        name: SimpleNamespace(
            name=name,
            **_anchor(item, "open"),
            **_anchor(item, "close"),
            content=item.get("content", "text"),
            content_args=item.get("content_args", {}),
            join=item.get("join"),
            transform=item.get("transform"),
            transform_each=item.get("transform_each", False),
        )
        for name, item in spec["fields"].items()
    }
    return SimpleNamespace(fields=fields, **_anchor(spec, "start_anchor"))


def _anchor(item: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The marker that opens or closes a field, as attributes of a response template.

    `re`: a regular expression, or None without a marker. `literals`: the marker's possible texts; None for a pattern.
    `literal_can_extend`: whether one of these texts begins with another.
    """
    pattern, literals, can_extend = item.get(f"{key}_pattern"), None, False
    if pattern is None and key in item:
        literals = [item[key]] if isinstance(item[key], str) else list(dict.fromkeys(item[key]))
        pattern = "|".join(regex.escape(text) for text in sorted(literals, key=len, reverse=True))
        can_extend = any(a != b and a.startswith(b) for a in literals for b in literals)
    expression = None if pattern is None else regex.compile(pattern, regex.DOTALL)
    return {f"{key}_re": expression, f"{key}_literals": literals, f"{key}_literal_can_extend": can_extend}


def _plain(spec: Any) -> str:
    """The text of a template's fields, markers included. Escapes are removed from patterns."""
    return json.dumps(spec["fields"], ensure_ascii=False).replace("\\", "")


def _marked(chat_template: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The model families whose marks all occur in a chat template, as (name, data); the first one fits best."""
    each = [(name, _data(name)) for name in FAMILIES] if chat_template else []
    return [(name, data) for name, data in each if all(mark in chat_template for mark in data["found_by"])]


def _data(name: str) -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(
        files("foreword.text.reply").joinpath("templates", f"{name}.json").read_text(encoding="utf-8")
    )
    return data
