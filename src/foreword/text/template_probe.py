"""Template probe: finds the form of messages in which a template shows all parts of a conversation.

Templates are programs that vendors write for their own messages. A template skips or refuses messages that it does not
expect. So the probe renders conversations whose parts are marks. It tries each of a form's choices, the smallest
changes first, until every mark is in the text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.errors import ChatTemplateError
from foreword.text.conversation import earlier_call, function_tool
from foreword.text.reply.format import ReplyFormat
from foreword.text.template_form import TemplateForm

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""Renders messages with a template's inputs; raises ChatTemplateError where the template refuses them."""

NAMES = tuple(f"zq{word}zq" for word in "add ask bid buy can cut".split())
"""Names of functions and fields, and contents. No template changes them, and no name is part of another name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A marked conversation of one kind."""

    kind: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    marks: Sequence[str] = ()
    """Texts that the prompt must have, in addition to all contents."""
    absent: Sequence[str] = ()
    """Texts that the prompt must not have."""

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.messages if message["content"]]


@dataclass(frozen=True, slots=True)
class Loss:
    """The marks of one kind of conversation that a template does not show."""

    kind: str
    lost: tuple[str, ...]
    """The marks that the text lacks; empty if the template refuses the conversation."""
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.refusal or 'left out'})"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The results of a probe."""

    form: TemplateForm = field(default_factory=TemplateForm)
    changes: Mapping[str, str] = field(default_factory=dict)
    """The form's choices that change messages, by name."""
    as_given: Sequence[Loss] = ()
    """Kinds of conversations that the template does not show if messages stay as they are."""
    losses: Sequence[Loss] = ()
    """Kinds of conversations that the template does not show in `form` either."""

    def lost_kinds(self) -> frozenset[str]:
        return frozenset(loss.kind for loss in self.losses)


# ---------------------------------------------------------------------- samples


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return earlier_call(f"call_{number:024x}", name, arguments)


def _result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number:024x}", "name": f"zqresult{number}", "content": text}


def _tool(name: str, key: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string", "description": f"zqis{key}"}}, "required": [key]}
    return function_tool(name, f"zqdoes{name}", schema)


_ADD, _ASK, _BID, _BUY, _CAN, _CUT = NAMES
_TOOLS = (_tool(_ADD, _BID), _tool(_ASK, _BUY))
_BARE_TOOLS = (
    function_tool(_ADD, None, None),
    function_tool(_ASK, None, {}),
    function_tool(_CAN, "zqdoes", {"type": "object"}),
    function_tool(_CUT, None, {"type": "object", "properties": {_BUY: {"enum": ["zqx", "zqy"]}}}),
)
_ONE_CALL = _call("zqcall1", {"zqkey1": "zqvalue1"})
_OTHER_CALL = _call("zqcall2", {"zqkey2": "zqvalue2"}, 1)
_SHOWN_CALL = ("zqcall1", "zqkey1", "zqvalue1")
_SHOWN_CALLS = (*_SHOWN_CALL, "zqcall2", "zqkey2", "zqvalue2")
_REPR = ("'zqkey1'", "'zqvalue1'}", '\\"zqkey1')
"""Signs of arguments that were written as Python writes them, or as a text within JSON."""
_SOON, _BROKEN = _user("zqquestion"), '{"zqkey1": "zqva'


_PARTS_REPR = ("'zqfirst'", "'zqthought'", '"zqfirst"', '"zqthought"')
"""Signs of parts that were written as Python or JSON writes them."""
PLAIN = Sample("questions and answers", [_user("zqfirst"), _said("zqanswer"), _SOON], absent=_PARTS_REPR)
SYSTEM = Sample("a system message", [_system("zqsystem"), _user("zqfirst"), _said("zqanswer"), _SOON])
SYSTEMS = Sample("two system messages", [_system("zqsystem"), _system("zqmore"), _SOON])
LATER_SYSTEM = (
    Sample("a system message after a question", [_system("zqsystem"), _user("zqfirst"), _system("zqlater")]),
    Sample(
        "a system message after an answer",
        [_system("zqsystem"), _user("zqfirst"), _said("zqanswer"), _system("zqlater"), _SOON],
    ),
)
QUESTIONS = Sample("two questions in succession", [_user("zqfirst"), _SOON])
ANSWERS = Sample("two answers in succession", [_user("zqfirst"), _said("zqanswer"), _said("zqmore"), _SOON])
TOOLS = Sample("tools", [_SOON], _TOOLS, (_ADD, f"zqdoes{_ADD}", _BID, f"zqis{_BID}", _ASK, _BUY))
BARE_TOOLS = Sample("tools with fields left out", [_SOON], _BARE_TOOLS, (_ADD, _ASK, _CAN, _CUT))
_CALLED, _OUT = _said("", tool_calls=[_ONE_CALL]), _result("zqout1")
_CALLED_NEXT, _OUT_NEXT = _said("", tool_calls=[_OTHER_CALL]), _result("zqout2", 1)
_TEXT_BESIDE = _said("zqtext", tool_calls=[_ONE_CALL])


def _calls(
    kind: str,
    *messages: dict[str, Any],
    tools: Sequence[Mapping[str, Any]] = _TOOLS,
    marks: Sequence[str] = _SHOWN_CALL,
    absent: Sequence[str] = _REPR,
) -> Sample:
    return Sample(kind, [_user("zqfirst"), *messages], tools, marks, absent)


CALLS = (
    _calls("a call", _CALLED, _OUT),
    _calls("parallel calls", _said("", tool_calls=[_ONE_CALL, _OTHER_CALL]), _OUT, _OUT_NEXT, marks=_SHOWN_CALLS),
    _calls("earlier calls", _CALLED, _OUT, _CALLED_NEXT, _OUT_NEXT, _said("zqanswer"), _SOON, marks=_SHOWN_CALLS),
    _calls("a call of a conversation without tools", _CALLED, _OUT, _said("zqanswer"), _SOON, tools=()),
    _calls("text beside a call", _TEXT_BESIDE, _OUT),
    _calls("text beside an earlier call", _TEXT_BESIDE, _OUT, _said("zqanswer"), _SOON),
)
REASONING = _calls(
    "reasoning before a call",
    _said("", reasoning_content="zqthought", tool_calls=[_ONE_CALL]),
    _OUT,
    marks=("zqthought", *_SHOWN_CALL),
    absent=_PARTS_REPR,
)
BESIDE = _calls(
    "reasoning and text beside a call",
    _said("zqtext", reasoning_content="zqthought", tool_calls=[_ONE_CALL]),
    _OUT,
    absent=(),
)
BROKEN = _calls(
    "a call whose arguments are no object",
    _said("", tool_calls=[_call("zqcall1", _BROKEN)]),
    _OUT,
    _said("", tool_calls=[_call("zqcall2", "[1, zqlist]", 1)]),
    _OUT_NEXT,
    marks=("zqcall1", "zqva", "zqcall2", "zqlist"),
    absent=(),
)
SAMPLES = (
    *(PLAIN, SYSTEM, SYSTEMS, *LATER_SYSTEM, QUESTIONS, ANSWERS, TOOLS, BARE_TOOLS),
    *(*CALLS, REASONING, BESIDE, BROKEN),
)

_REFUSED = 1000
"""A conversation that the template refuses to render counts as this number of lost marks."""

_CALL_CHOICES: Mapping[str, Sequence[str]] = {
    "ids": ("kept", "nine", "numbered"),
    "arguments": ("object", "text"),
    "calls": ("together", "one by one"),
    "call_content": ("empty", "none", "missing"),
    "beside_call": ("kept", "before", "written"),
}


# ------------------------------------------------------------------------ probe


class Probe:
    """Tries forms on one template."""

    def __init__(self, render: Render, reply: ReplyFormat | None = None) -> None:
        """`reply`: the form in which the template's model writes calls."""
        self._render, self._reply = render, reply

    def report(self) -> TemplateReport:
        """Find the form that shows the most marks. Takes some hundred renderings of short conversations."""
        form = plain = TemplateForm(reply=self._reply)
        form = self._best(form, _each("no_tools", "missing", "empty"), [PLAIN])
        form = self._best(form, _each("content", "text", "parts"), [PLAIN])
        refusal = self._loss(form, PLAIN)
        if refusal is not None and refusal.refusal:
            return TemplateReport(plain, {}, [refusal], [refusal])
        form = self._best(form, _each("questions", "kept", "joined"), [QUESTIONS])
        form = self._best(form, _each("answers", "kept", "joined"), [ANSWERS])
        form = self._best(form, _each("system", "kept", "question"), [SYSTEM])
        form = self._best(form, _each("systems", "kept", "joined"), [SYSTEMS])
        form = self._best(form, _each("later_system", "kept", "question"), LATER_SYSTEM)
        form = self._best(form, _each("tools", "kept", "filled"), [TOOLS, BARE_TOOLS])
        if self._lost(form, TOOLS):
            form = replace(form, tools="written")
        form = self._linked(self._calls(form))
        fields = _each("reasoning", "reasoning_content", "reasoning", "thinking", "parts")
        form = self._best(form, fields, [REASONING])
        if form.calls != "written":
            order = {"kept": ("kept", "before", "written"), "before": ("before", "written"), "written": ("written",)}
            form = self._best(form, _each("beside_call", *order[form.beside_call]), [BESIDE])
        form = self._best(form, _each("broken_arguments", "kept", "wrapped"), [BROKEN])
        changes = {
            name: value
            for name in TemplateForm.__dataclass_fields__
            if name != "reply" and (value := getattr(form, name)) != getattr(plain, name)
        }
        return TemplateReport(form, changes, self._losses(plain), self._losses(form))

    def _calls(self, form: TemplateForm) -> TemplateForm:
        names = list(_CALL_CHOICES)
        each = [dict(zip(names, values, strict=True)) for values in itertools.product(*_CALL_CHOICES.values())]
        each.sort(key=lambda choice: sum(_CALL_CHOICES[name].index(value) > 0 for name, value in choice.items()))
        written_calls = [{"calls": "written", "results": results} for results in ("tool", "question")]
        single = [choice for choice in each if choice["calls"] == "together" and choice["beside_call"] == "kept"]
        if self._lost(self._best(form, single, CALLS[:1]), CALLS[0]):  # it shows no call at all
            return self._best(form, written_calls, CALLS)
        return self._best(form, [*each, *written_calls], CALLS)

    def _linked(self, form: TemplateForm) -> TemplateForm:
        """If the template shows ids of results but not of calls, change the ids so that a call and its result match."""
        for ids in (form.ids, "numbered", "indexed"):
            tried = replace(form, ids=ids)
            if not any(self._lost(tried, sample) or self._has_lone_id(tried, sample) for sample in CALLS[:3]):
                return tried
        return form

    def _has_lone_id(self, form: TemplateForm, sample: Sample) -> bool:
        messages, inputs = form.write(sample.messages, {"tools": list(sample.tools)})
        text = self._render(messages, inputs)
        return any(text.count(message["tool_call_id"]) == 1 for message in messages if message.get("tool_call_id"))

    def _best(
        self, form: TemplateForm, choices: Sequence[Mapping[str, str]], samples: Sequence[Sample]
    ) -> TemplateForm:
        """Try the choices in `form`. Return the form with the first choice that loses the fewest marks."""
        best, least = form, None
        for choice in choices:
            tried = replace(form, **choice)  # type: ignore[arg-type]
            lost = 0
            for sample in samples:
                lost += self._lost(tried, sample)
                if lost >= (_REFUSED if least is None else least):
                    lost += _REFUSED  # the other samples cannot make this choice better
                    break
            if least is None or lost < least:
                best, least = tried, lost
            if not least:
                break
        return best

    def _lost(self, form: TemplateForm, sample: Sample) -> int:
        """The number of marks that are not shown; a refusal is worse than any loss."""
        loss = self._loss(form, sample)
        return 0 if loss is None else _REFUSED if loss.refusal else len(loss.lost)

    def _loss(self, form: TemplateForm, sample: Sample) -> Loss | None:
        inputs = {"tools": list(sample.tools)} if sample.tools else {}
        try:
            text = self._render(*form.write(sample.messages, inputs))
        except ChatTemplateError as error:
            return Loss(sample.kind, (), re.sub(r"^.*?\): ", "", str(error)))
        lost = [mark for mark in (*sample.contents, *sample.marks) if mark not in text]
        lost += [mark for mark in sample.absent if mark in text]
        if not lost and not _in_order(text, sample):
            lost = ["order"]
        return Loss(sample.kind, tuple(lost)) if lost else None

    def _losses(self, form: TemplateForm) -> list[Loss]:
        return [loss for sample in SAMPLES if (loss := self._loss(form, sample)) is not None]


def _each(name: str, *values: str) -> list[Mapping[str, str]]:
    return [{name: value} for value in values]


def _in_order(text: str, sample: Sample) -> bool:
    """Whether the contents are in the order of the messages. A system message at the beginning may be anywhere."""
    places = [text.rindex(content) for content in sample.contents]
    places = places[1 if sample.messages[0]["role"] == "system" else 0 :]
    return places == sorted(places)


# --------------------------------------------------------------------- refusal


def refuse_lost(report: TemplateReport, messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> None:
    """Raise ChatTemplateError if the template leaves out a part of a conversation."""
    # If a template refuses messages, its own error says so. If it writes messages as JSON, nothing is really lost.
    lost = {loss.kind for loss in report.losses if not loss.refusal and not set(loss.lost) <= set(_PARTS_REPR)}
    kinds = lost & _kinds(messages, bool(inputs.get("tools"))) if lost else ()
    for kind in kinds:
        raise ChatTemplateError(
            f"the chat template does not show {kind}, so the model would not see all messages; leave it out, or name "
            "another template with chat_template"
        )


def _kinds(messages: Sequence[Mapping[str, Any]], has_tools: bool) -> set[str]:
    """The kinds of samples to which a conversation belongs, without reasoning, which many templates drop by design."""
    roles = [message["role"] for message in messages]
    pairs = list(itertools.pairwise(roles))
    head = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    calling = [message for message in messages if message.get("tool_calls")]
    has_kind = {
        PLAIN.kind: "assistant" in roles and not calling,
        SYSTEM.kind: head > 0,
        SYSTEMS.kind: head > 1,
        LATER_SYSTEM[0].kind: ("user", "system") in pairs,
        LATER_SYSTEM[1].kind: ("assistant", "system") in pairs,
        QUESTIONS.kind: ("user", "user") in pairs,
        ANSWERS.kind: ("assistant", "assistant") in pairs,
        TOOLS.kind: has_tools,
        CALLS[0].kind: bool(calling),
        CALLS[1].kind: any(len(message["tool_calls"]) > 1 for message in calling),
        CALLS[2].kind: len(calling) > 1,
        CALLS[3].kind: bool(calling) and not has_tools,
        CALLS[4].kind: any(message["content"] for message in calling),
        CALLS[5].kind: any(message["content"] for message in calling if message is not messages[-1]),
        BROKEN.kind: any(
            isinstance(call["function"]["arguments"], str) for message in calling for call in message["tool_calls"]
        ),
    }
    return {kind for kind, has in has_kind.items() if has}
