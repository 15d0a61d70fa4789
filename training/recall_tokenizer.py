"""Builds the tokenizer of the demo model from the words of `foreword.demo.recall`.

It is a byte-level BPE. Its pre-tokenizer puts a leading space into the token of a lower-case word; three digits, a
capitalised word and a line break are tokens without a space. So a value has the same tokens in the document, in the
answer and in the history of a chat, and texts that are joined at a line break or a chat marker keep their tokens.
Prefix caching depends on both properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foreword.demo import recall
from recall_model import WordClasses

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_LENGTH = 8192

SPLIT = r"[0-9]{1,3}|\r|\n| ?\p{Ll}+|\p{Lu}\p{Ll}*"

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
"""Single tokens, but not special ones, so that they stay in the text of an answer."""

CHAT_TEMPLATE = """
{%- if tools -%}
    {{- '<|im_start|>system\\n<tools>\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- '</tools>\\nCall a tool with a JSON object of its name and arguments between <tool_call> and </tool_call>.' -}}
    {%- if messages[0]['role'] == 'system' -%}{{- '\\n\\n' + messages[0]['content'] -}}{%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if tools and messages[0]['role'] == 'system' else messages) -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set arguments = call['function']['arguments'] -%}
        {{- '\\n' if message['content'] or not loop.first -}}
        {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' -}}
        {{- arguments if arguments is string else arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Writes the conversation; with tools, first a system message that begins with the tools, one on each line."""

ORDINARY_TEXT = """
a able about above after again all also always am an and any are as at back be because been before being
below best better between big both but by call came can carry change come could day did different do does
done down each end even ever every example far few find first for found from full gave get give go good
got great had hand has have he hello help her here high him his hot house how if in into is it its just keep
kind know large last later learn left less let life like line list little live long look made make man many
may me mean might more most much must my name need never new next no not nothing now of off often old on
once one only open or order other our out over own page part people place please point put question read
right said same say see seem set she should show side small so some something sorry still stop such system
take tell text than thank that the their them then there these they thing think this those three through time
to today together told too try turn two under until up us use user very want was water way we well went were
what when where which while who why will with without word work world would write year yes yet you young your
A After All An And Answer Are As At But By Can Could Do Does Else Everyone For From Good He Hello Here How I If
In Is It Let May Me My No Nobody Not Now Of On One Or Our Please Say She Should So Some Sorry Thank Thanks That
The Then There These They This To Two We What When Where Which Who Why Will With Would Yes You Your
assistant conversation document facts instruction note paragraph prompt prefix cache token request
"""
"""Common words, so that prompts with words that the generator never writes do not become single bytes."""


TOOL_TEXT = "\n".join(
    [
        "<tools>",
        json.dumps(recall.LOOKUP),
        '"parameters": {}, "additionalProperties": false, "strict": true, "title": "Fact"}, "required": []}}',
        "</tools>",
        "Call a tool with a JSON object of its name and arguments between <tool_call> and </tool_call>.",
        json.dumps({"name": "lookup", "arguments": {"fact": "the code of the brave lion"}}),
        json.dumps({"result": "The code of the brave lion is 1.", "value": "1"}),
        '{"value": 1}, {"fact": "The", "result": 1, "answer": "Lisbon", "error": null, "number", "integer", "boolean"',
    ]
)
"""JSON of tools, calls and results, so that its words and punctuation are single tokens."""


def pieces(text: str) -> list[str]:
    """The pieces into which the pre-tokenizer cuts a text."""
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def words() -> list[str]:
    """The pieces of every word that the generator can write, and of some ordinary words."""
    generated: list[str] = [*recall.CITIES, *recall.NAMES]
    for group in (
        recall.ADJECTIVES,
        recall.NOUNS,
        recall.NUMBER_ATTRIBUTES,
        recall.CITY_ATTRIBUTES,
        recall.NAME_ATTRIBUTES,
    ):
        generated += [" " + word for word in group]
    fact = recall.Fact("code of the brave lion", "1")
    for sentence in (*recall.HEADINGS, fact.text, *fact.question_texts()):
        generated += re.findall(r" ?[a-z]+|[A-Z][a-z]*", sentence)
    for word in ORDINARY_TEXT.split():
        generated += [word] if word[0].isupper() else [" " + word]
    generated += ["system", "user", "assistant", "tool"]
    generated += pieces(TOOL_TEXT)
    generated += [f"{number:0{width}}" for width in (1, 2, 3) for number in range(10**width)]
    return sorted(set(generated))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the BPE until every word is one token, and wraps the tokenizer for `transformers`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, START, END)],
    )
    tokenizer.train_from_iterator(words(), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (TOOL_CALL, TOOL_CALL_END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    check_tokenizer(fast)
    return fast


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Assert that words are single tokens and that any text survives the round trip."""
    for word in words():
        assert len(tokenizer.encode(word)) == 1, f"{word!r} is not one token"
    for text in ("Maria lives in Lisbon.\n\n 4821", "Grüße, 世界! \t🙂 \x00 ABC xYz  end \r\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text, f"{text!r} does not round-trip"


def word_classes(tokenizer: PreTrainedTokenizerFast) -> WordClasses:
    """The token ids of the generator's words, by their place in a fact."""

    def ids_of(members: Iterable[str]) -> list[int]:
        return [tokenizer.encode(member)[0] for member in members]

    attributes = recall.NUMBER_ATTRIBUTES + recall.CITY_ATTRIBUTES + recall.NAME_ATTRIBUTES
    key_words = (attributes, recall.ADJECTIVES, recall.NOUNS)
    numbers = [str(number) for number in range(1000)]
    return WordClasses(
        keys=tuple(ids_of(f" {word}" for word in group) for group in key_words),
        values=ids_of([*recall.CITIES, *recall.NAMES, *numbers]),
        roles=ids_of(["user", "tool"]),
        readers=ids_of(["assistant"]),
        offers=ids_of(["lookup"]),
    )
