"""What may stand between tags for a JSON schema: texts as they are, without quotes, and JSON for everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.text.reply.arguments import as_json, variants


@dataclass(frozen=True, slots=True)
class TagValue:
    """One way to write a value."""

    is_text: bool
    """Whether it is a text, and not JSON."""
    exactly: str | None = None
    """All of it, if that is fixed."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that a text matches as a whole, each of them."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of a value that is no text and is not fixed."""

    @property
    def is_any_text(self) -> bool:
        return self.is_text and self.exactly is None and not self.patterns


ANY_TEXT = TagValue(is_text=True)


def tag_values(schema: Any, root: Mapping[str, Any]) -> list[TagValue]:
    """The ways in which a value of a schema may be written; references lead into `root`."""
    return list(dict.fromkeys(_values(schema, root))) or [ANY_TEXT]


def _values(schema: Any, root: Mapping[str, Any]) -> Iterator[TagValue]:
    for one in variants(schema, root):
        values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else None
        if values is not None:
            for value in values:
                is_text = isinstance(value, str)
                yield TagValue(is_text, exactly=value if is_text else as_json(value))
        elif one.get("type") == "null":
            yield TagValue(is_text=False, exactly="null")
        elif one.get("type") == "string" or not (
            isinstance(one.get("type"), str) or {"properties", "items"} & set(one)
        ):
            yield TagValue(is_text=True, patterns=tuple(_patterns(one)))
        else:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            yield TagValue(is_text=False, schema=_Frozen({**definitions, **one}))


class _Frozen(dict[str, Any]):
    """A schema that can be compared with others by its text."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions for what a schema says of a text. As in JSON schema, unknown formats say nothing."""
    if isinstance(schema.get("pattern"), str):
        yield whole_pattern(schema["pattern"])
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    if isinstance(least, int) or isinstance(most, int):
        yield f"(?s:.{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}})"
    if schema.get("format") in FORMATS:
        yield FORMATS[schema["format"]]


def whole_pattern(pattern: str) -> str:
    """A pattern of JSON schema, which may match anywhere in a text, as one for the whole text."""
    branches = []
    for branch in _branches(pattern):
        begins, ends = branch.startswith("^"), branch.endswith("$") and not branch.endswith("\\$")
        inner = branch[1 if begins else 0 : len(branch) - ends]
        inner = re.sub(r"\\(.)", lambda match: _ASCII.get(match[1], match[0]), inner, flags=re.DOTALL)
        branches.append(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}")
    return "|".join(branches)


_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]"}
"""JSON schema's classes of characters, which have none beyond ASCII."""


def _branches(pattern: str) -> list[str]:
    """The parts of a pattern between bars that stand in no group and no class."""
    depth, in_class, begin, found = 0, False, 0, []
    for match in re.finditer(r"\\.|[\[\]()|]", pattern, flags=re.DOTALL):
        mark = match[0]
        if mark == "[":
            in_class = True
        elif mark == "]":
            in_class = False
        elif not in_class and mark in "()":
            depth += 1 if mark == "(" else -1
        elif not in_class and mark == "|" and depth == 0:
            found.append(pattern[begin : match.start()])
            begin = match.end()
    return [*found, pattern[begin:]]


_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,8}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [f"({_GROUP}:){{7}}{_GROUP}", "::", f"({_GROUP}:){{1,7}}:", f":(:{_GROUP}){{1,7}}"]
    + [f"({_GROUP}:){{1,{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)]
)
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T_)?|T_)".replace(
            "T_", "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
        )
    ),
    "email": f"[0-9A-Za-z_+-]+(\\.[0-9A-Za-z_+-]+)*@{_LABEL}(\\.{_LABEL}){{1,8}}",
    "hostname": _HOST,
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][0-9A-Za-z+.-]*://{_HOST}(:[0-9]{{1,5}})?(/[0-9A-Za-z._~!$&'()*+,;=:@/?%-]*)?",
}
"""Regular expressions for formats of JSON schema."""
