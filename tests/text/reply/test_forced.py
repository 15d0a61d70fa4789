"""Forced calls and limits on thinking, on a tokenizer that has the markers of every family as tokens of its own.

llguidance walks through each grammar at random; what comes out is read by ReplyReader.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foreword.errors import InvalidRequestError
from foreword.grammar import Grammars
from foreword.text import Tokenizer
from foreword.text.reply import Call, Reasoning, Text
from foreword.text.reply.forced import forced_calls
from foreword.text.reply.format import ThinkingMarks
from foreword.text.reply.reader import joined
from foreword.text.reply.turn import Turn
from text.reply.replies import FORMATS, NAMES, SAMPLES, named, read

SPECIAL = (
    "<|start|> <|channel|> <|message|> <|end|> <|constrain|> <|call|> [TOOL_CALLS] [ARGS] [THINK] [/THINK] "
    "<|python_tag|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_begin|> "
    '<|tool_calls_section_end|> <|tool_call> <tool_call|> <|"|> <|channel> <channel|> <escape> <|tool_call|>'
).split()
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
FUNCTIONS = [
    named(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"enum": ["Lisbon", "Oslo"]},
                "days": {"$ref": "#/$defs/days"},
                "note": {"enum": ["a <b>", "two\nlines"]},
                "hot": {"type": "boolean"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    ),
    named("clock", {"type": "object", "properties": {}, "additionalProperties": False}),
]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["get_weather city days note Lisbon Oslo true false \n\n"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"])
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(token, special=False) for token in PLAIN])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    definition = tokenizer.definition()
    assert definition is not None
    return Grammars(definition, vocab_size=tokenizer.vocab_size, eos_token_ids=sorted(tokenizer.eos_token_ids))


def walk(
    constraint, eos: int, rng: random.Random, *, most: int = 600, avoid: frozenset[int] = frozenset()
) -> list[int]:
    """Tokens that a constraint allows, drawn at random up to the end; long texts grow less likely."""
    written: list[int] = []
    while len(written) < most:
        (choices,) = np.nonzero(constraint.allowed(written))
        assert len(choices)
        if eos in choices and (len(choices) == 1 or rng.random() < 0.5):
            return written
        wanted = [token for token in choices if token not in avoid and token != eos]
        written.append(int(rng.choice(wanted or list(choices))))
    return written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("may_repeat", [False, True])
def test_the_reader_reads_what_a_forced_call_can_be(tokenizer, grammars, name, may_repeat):
    form = FORMATS[name]
    grammar = forced_calls(form, FUNCTIONS, tokenizer.added_tokens, may_repeat=may_repeat)
    open_constraint, (eos,) = grammars.lark(grammar), tokenizer.eos_token_ids
    prompt_end = SAMPLES[name].prompt_end.removesuffix("<think>\n").removesuffix("<think>")
    num_calls = set()
    for seed in range(4):
        rng = random.Random(seed)
        token_ids = walk(open_constraint(), eos, rng, most=3000)
        text = tokenizer.spell(token_ids)
        parts = read(name if form.reads_calls else "bare", text, 1000, prompt_end=prompt_end, tools=TOOLS)
        assert parts, text
        for call in parts:
            assert isinstance(call, Call), text
            assert call.is_complete
            arguments = json.loads(call.arguments)
            if call.name == "clock":
                assert arguments == {}
                continue
            assert call.name == "get_weather"
            assert arguments["city"] in ("Lisbon", "Oslo")
            assert arguments["days"] in range(1, 10)
            assert set(arguments) <= {"city", "days", "note", "hot"}
            assert isinstance(arguments.get("hot", True), bool)
        num_calls.add(len(parts))
    assert may_repeat or num_calls == {1}


@pytest.mark.parametrize("name", [name for name in NAMES if SAMPLES[name].num_calls == 2 and FORMATS[name].call_form])
def test_a_forced_call_has_the_tokens_that_the_template_writes(tokenizer, grammars, name):
    """The samples' calls are written as templates write them."""
    functions = [
        named(
            "get_weather",
            {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        ),
        named("clock", {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}),
    ]
    text = CALLS.get(name) or calls_text(name)
    grammar = forced_calls(FORMATS[name], functions, tokenizer.added_tokens, may_repeat=True)
    constraint, written = grammars.lark(grammar)(), []
    for token in tokenizer.hf_tokenizer.encode(text, add_special_tokens=False):
        assert constraint.allowed(written)[token], (tokenizer.spell(written), tokenizer.spell([token]))
        written.append(token)
    (eos,) = tokenizer.eos_token_ids
    assert constraint.allowed(written)[eos]


CALLS = {
    "gpt_oss": ' to=functions.clock<|channel|>commentary json<|message|>{"zone": "UTC"}',
    "llama3": '{"name": "clock", "parameters": {"zone": "UTC"}}',
    "llama4": '{"name": "clock", "parameters": {"zone": "UTC"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 7}[TOOL_CALLS]clock[ARGS]{"zone": "UTC"}',
    "mistral_old": '[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "UTC"}, "id": "abc123456"}]',
}


def calls_text(name: str) -> str:
    sample = SAMPLES[name]
    return sample.text[sample.text.index(sample.content) + len(sample.content) :].lstrip()


# ------------------------------------------------------------------- thinking


def turn(tokenizer: Tokenizer, family: str, prompt: str) -> Turn:
    tokenizer.set_response_template(family)
    return Turn(tokenizer, tokenizer.hf_tokenizer.encode(prompt, add_special_tokens=False))


def limit(tokenizer, grammars, one: Turn, lark: str | None, budget: int | None, *, is_call: bool = False):
    answer = None if lark is None else grammars.lark(lark)
    opened = one.limit(
        answer,
        budget=budget,
        vocab_size=tokenizer.vocab_size,
        end_token_ids=tokenizer.eos_token_ids,
        is_call=is_call,
    )
    assert opened is not None
    return opened()


def spelt_parts(tokenizer, one: Turn, token_ids: list[int]):
    reader = one.reader()
    assert reader is not None
    return joined([*reader.push(tokenizer.spell(token_ids)), *reader.finish()])


OPEN, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize("budget", [0, 1, 30])
def test_a_budget_ends_thinking_and_the_answer_keeps_its_form(tokenizer, grammars, budget):
    one, (eos,) = turn(tokenizer, "hermes", OPEN), tokenizer.eos_token_ids
    markers = frozenset(tokenizer.added_tokens.values())
    token_ids = walk(limit(tokenizer, grammars, one, 'start: "42"', budget), eos, random.Random(3), avoid=markers)
    text = tokenizer.spell(token_ids)
    assert text.endswith("\n</think>\n\n42")
    end = tokenizer.hf_tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    assert token_ids[budget : budget + len(end)] == end
    assert spelt_parts(tokenizer, one, token_ids)[-1] == Text("42")


def test_thinking_that_ends_by_itself_is_followed_by_the_answer(tokenizer, grammars):
    one, (eos,) = turn(tokenizer, "hermes", OPEN), tokenizer.eos_token_ids
    constraint = limit(tokenizer, grammars, one, 'start: "42"', None)
    written: list[int] = []
    for token in tokenizer.hf_tokenizer.encode("hm</think>", add_special_tokens=False):
        assert not constraint.allowed(written)[eos], "the answer is still to come"
        assert constraint.allowed(written).sum() == tokenizer.vocab_size - 1
        written.append(token)
    token_ids = written + walk_on(constraint, written, eos)
    assert tokenizer.spell(token_ids) == "hm</think>\n\n42"
    assert spelt_parts(tokenizer, one, token_ids) == [Reasoning("hm"), Text("42")]


def walk_on(constraint, written: list[int], eos: int) -> list[int]:
    more: list[int] = []
    while not (allowed := constraint.allowed([*written, *more]))[eos]:
        more.append(int(np.argmax(allowed)))
    return more


def test_a_budget_counts_from_where_the_model_begins_to_think(tokenizer, grammars):
    one = turn(tokenizer, "hermes", CLOSED)
    think = tokenizer.hf_tokenizer.encode("<think>abcdef", add_special_tokens=False)
    constraint = limit(tokenizer, grammars, one, None, 3)
    assert all(constraint.allowed(think[:length]).all() for length in range(4))
    assert constraint.allowed(think[:4]).sum() == 1
    plain = tokenizer.hf_tokenizer.encode("abcdef", add_special_tokens=False)
    constraint = limit(tokenizer, grammars, one, None, 3)
    assert all(constraint.allowed(plain[:length]).all() for length in range(len(plain)))


def test_an_answer_that_is_not_thought_about_has_its_form_at_once(tokenizer, grammars):
    one, (eos,) = turn(tokenizer, "hermes", CLOSED), tokenizer.eos_token_ids
    token_ids = walk(limit(tokenizer, grammars, one, 'start: "42"', 5), eos, random.Random(0))
    assert tokenizer.spell(token_ids) == "42"


@pytest.mark.parametrize(
    ("is_call", "end"),
    [
        (False, "<|end|><|start|>assistant<|channel|>final<|message|>42"),
        (True, "<|end|><|start|>assistant42"),
    ],
)
def test_channels_are_written_where_replies_have_them(tokenizer, grammars, is_call, end):
    one, (eos,) = turn(tokenizer, "gpt_oss", "<|start|>assistant"), tokenizer.eos_token_ids
    constraint = limit(tokenizer, grammars, one, 'start: "42"', 2, is_call=is_call)
    token_ids = walk(constraint, eos, random.Random(1), avoid=frozenset(tokenizer.added_tokens.values()))
    text = tokenizer.spell(token_ids)
    assert text.startswith("<|channel|>analysis<|message|>")
    assert text.endswith(end)


@pytest.mark.parametrize(("family", "budget"), [("hermes", -1), ("hermes", 1.5), ("llama3", 4)])
def test_a_budget_that_cannot_be_kept_is_refused(tokenizer, grammars, family, budget):
    with pytest.raises(InvalidRequestError, match=f"thinking_budget={budget}"):
        limit(tokenizer, grammars, turn(tokenizer, family, ""), None, budget)


# -------------------------------------------------------------------- markers


def test_special_tokens_that_are_markers_stay_in_the_text_only_on_request(tokenizer):
    tokenizer.set_response_template("mistral")
    text = '[THINK]ü 🙂[/THINK][TOOL_CALLS]clock[ARGS]{"zone": "UTC"}</s>'
    token_ids = tokenizer.hf_tokenizer.encode(text, add_special_tokens=False)
    for kept, shown in [
        (tokenizer.marker_ids, text.removesuffix("</s>")),
        (frozenset(), 'ü 🙂clock{"zone": "UTC"}'),
    ]:
        stream = tokenizer.stream(kept_ids=kept)
        for token in token_ids:
            stream.push([token])
        stream.finish()
        assert stream.text == shown
    tokenizer.set_response_template("hermes")
    assert tokenizer.marker_ids == frozenset(), "its markers are no special tokens"


def test_marks_of_a_template_from_outside_are_those_of_its_literals(tokenizer):
    spec = {
        "start_anchor": "A:",
        "fields": {"thinking": {"open": "<mull>", "close": "</mull>"}, "content": {}},
    }
    tokenizer.set_response_template(json.dumps(spec))
    assert tokenizer.reply_format.thinking == ThinkingMarks("<mull>", "</mull>")
    assert turn(tokenizer, json.dumps(spec), "A:<mull>").is_thinking
