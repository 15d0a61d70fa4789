"""Replies as the families of models write them: each with reasoning, text and two calls where the family has them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from foreword.text.reply import Call, Part, Reasoning, ReplyFormat, ReplyReader, Text
from foreword.text.reply.format import BARE, FAMILIES, family
from foreword.text.reply.reader import joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    },
]
WEATHER = '{"city": "Lisböa, \\"old\\" town", "days": 7}'
CLOCK = '{"zone": "UTC"}'
CITY = 'Lisböa, "old" town'


@dataclass(frozen=True)
class Sample:
    """A reply and its parts."""

    prompt_end: str
    text: str
    reasoning: str = "The user wants the weather."
    content: str = "Let me look."
    ids: tuple[str | None, str | None] = (None, None)
    num_calls: int = 2

    @property
    def parts(self) -> list[Part]:
        calls = [
            Call("get_weather", WEATHER, id=self.ids[0]),
            Call("clock", CLOCK, id=self.ids[1]),
        ][: self.num_calls]
        return joined([Reasoning(self.reasoning), Text(self.content), *calls])


THOUGHT = "<think>\nThe user wants the weather.\n</think>\n\nLet me look."
CHATML = "<|im_start|>user\nHow warm?<|im_end|>\n<|im_start|>assistant\n"


def wide(text: str) -> str:
    """The text with DeepSeek's markers in its own letters: a wide bar, and a block for a space."""
    return re.sub(r"<\|(\w+)\|>", lambda marker: f"<\uff5c{marker[1].replace('_', chr(0x2581))}\uff5c>", text)


def tagged(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


SAMPLES = {
    "hermes": Sample(
        CHATML,
        f"{THOUGHT}\n<tool_call>\n{tagged('get_weather', WEATHER)}\n</tool_call>\n"
        f"<tool_call>\n{tagged('clock', CLOCK)}\n</tool_call>",
    ),
    "think": Sample(CHATML + "<think>\n", THOUGHT.removeprefix("<think>\n"), num_calls=0),
    "qwen3_coder": Sample(
        CHATML + "<think>\n",
        THOUGHT.removeprefix("<think>\n")
        + f"\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n7\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n<parameter=zone>\nUTC\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "glm4": Sample(
        "<|user|>\nHow warm?<|assistant|>",
        "\n<think>The user wants the weather.</think>\nLet me look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        f"<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>",
    ),
    "minimax_m2": Sample(
        "]~b]user\nHow warm?[e~[\n]~b]ai\n<think>\n",
        THOUGHT.removeprefix("<think>\n")
        + f'\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">7</parameter>\n</invoke>\n<invoke name="clock">\n'
        '<parameter name="zone">UTC</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "llama3": Sample(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{tagged('get_weather', WEATHER, 'parameters')}; {tagged('clock', CLOCK, 'parameters')}",
        reasoning="",
        content="",
    ),
    "llama4": Sample(
        "<|header_start|>assistant<|header_end|>\n\n",
        f"Let me look.<|python_start|>{tagged('get_weather', WEATHER, 'parameters')}<|python_end|>"
        f"<|python_start|>{tagged('clock', CLOCK, 'parameters')}<|python_end|>",
        reasoning="",
    ),
    "mistral": Sample(
        "[INST]How warm?[/INST]",
        f"[THINK]The user wants the weather.[/THINK]Let me look.[TOOL_CALLS]get_weather[ARGS]{WEATHER}"
        f"[TOOL_CALLS]clock[CALL_ID]abc123456[ARGS]{CLOCK}",
        ids=(None, "abc123456"),
    ),
    "mistral_old": Sample(
        "[INST] How warm? [/INST]",
        f'[TOOL_CALLS] [{tagged("get_weather", WEATHER)[:-1]}, "id": "abc123456"}}, '
        f'{tagged("clock", CLOCK)[:-1]}, "id": "def"}}]',
        reasoning="",
        content="",
        ids=("abc123456", "def"),
    ),
    "gpt_oss": Sample(
        "<|start|>user<|message|>How warm?<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>The user wants the weather.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        "<|constrain|>json<|message|>"
        f"{WEATHER}<|call|><|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{CLOCK}<|call|>",
    ),
    "deepseek_v3": Sample(
        wide("<|User|>How warm?<|Assistant|><think>\n"),
        wide(
            "The user wants the weather.\n</think>\n\nLet me look."
            f"<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>get_weather\n```json\n{WEATHER}\n```"
            f"<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>clock\n```json\n{CLOCK}\n```<|tool_call_end|>"
            "<|tool_calls_end|>"
        ),
    ),
    "deepseek_v3_1": Sample(
        wide("<|User|>How warm?<|Assistant|><think>"),
        wide(
            "The user wants the weather.</think>Let me look.<|tool_calls_begin|><|tool_call_begin|>get_weather"
            f"<|tool_sep|>{WEATHER}<|tool_call_end|><|tool_call_begin|>clock<|tool_sep|>{CLOCK}<|tool_call_end|>"
            "<|tool_calls_end|>"
        ),
    ),
    "kimi_k2": Sample(
        "<|im_user|>user<|im_middle|>How warm?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "<think>The user wants the weather.</think>Let me look.<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.get_weather:0<|tool_call_argument_begin|>{WEATHER}<|tool_call_end|><|tool_call_begin|>"
        f"functions.clock:1<|tool_call_argument_begin|>{CLOCK}<|tool_call_end|><|tool_calls_section_end|>",
        ids=("functions.get_weather:0", "functions.clock:1"),
    ),
    "gemma4": Sample(
        "<|turn>user\nHow warm?<turn|>\n<|turn>model\n",
        "<|channel>thought\nThe user wants the weather.<channel|>Let me look."
        f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>,days:7}}<tool_call|>'
        '<|tool_call>call:clock{zone:<|"|>UTC<|"|>}<tool_call|>',
    ),
    "functiongemma": Sample(
        "<start_of_turn>user\nHow warm?<end_of_turn>\n<start_of_turn>model\n",
        f"Let me look.<start_function_call>call:get_weather{{city:<escape>{CITY}<escape>,days:7}}<end_function_call>"
        "<start_function_call>call:clock{zone:<escape>UTC<escape>}<end_function_call>",
        reasoning="",
    ),
    "granite3": Sample(
        "<|start_of_role|>assistant<|end_of_role|>",
        f"{THOUGHT}<|tool_call|>[{tagged('get_weather', WEATHER)}, {tagged('clock', CLOCK)}]",
    ),
    "nemotron": Sample(
        "<SPECIAL_11>Assistant\n<think>\n",
        THOUGHT.removeprefix("<think>\n")
        + f"\n\n<TOOLCALL>[{tagged('get_weather', WEATHER)}, {tagged('clock', CLOCK)}]</TOOLCALL>",
    ),
    BARE: Sample("", tagged("get_weather", WEATHER), reasoning="", content="", num_calls=1),
}
NAMES = [*FAMILIES, BARE]
FORMATS: dict[str, ReplyFormat] = {name: family(name) for name in NAMES}


def read(name: str, text: str, cuts: list[int] | int = 1, **options: object) -> list[Part]:
    """The parts of a reply that comes in pieces: all of one length, or cut at these positions."""
    options = {"prompt_end": SAMPLES[name].prompt_end, "tools": TOOLS, **options}
    reader = ReplyReader(FORMATS[name], **options)  # type: ignore[arg-type]
    at = range(cuts, len(text), cuts) if isinstance(cuts, int) else sorted({cut for cut in cuts if cut < len(text)})
    positions = [0, *at, len(text)]
    parts: list[Part] = []
    for begin, end in itertools.pairwise(positions):
        parts += reader.push(text[begin:end])
    parts += reader.finish()
    assert reader.num_calls == sum(isinstance(part, Call) for part in parts)
    return joined(parts)


def named(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A function that may be called."""
    return {"name": name, "parameters": parameters}
