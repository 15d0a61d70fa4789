"""What prompt modules learn from tokenizers and chat templates: each family writes turns in another way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from foreword.errors import ChatTemplateError, SchemaError
from foreword.pml.library import Library
from foreword.text import Tokenizer
from foreword.text.schema_text import schema_text
from tiny_models import CHAT_TEMPLATE, save_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set first = messages[1] %}"
    "<s>[INST] <<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{{ first.content }} [/INST]"
    "{% set rest = messages[2:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Needs a user's message after the system's, inside of the same brackets."""
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<s>system: Be kind.</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: <think></think>{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it so?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path)


def tokenizer_with(folder: Path, template: str | None) -> Tokenizer:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    tokenizer.hf_tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML, LLAMA2, DEFAULT_SYSTEM], ids=range(4))
@pytest.mark.parametrize("begin", [0, 1])
def test_messages_of_schema_and_prompt_are_the_conversation_that_the_template_writes(
    folder: Path, template: str, begin: int
) -> None:
    tokenizer = tokenizer_with(folder, template)
    conversation = CONVERSATION[begin:]
    turns = "".join(f"<{one['role']}>\n {one['content']}\n</{one['role']}>\n" for one in conversation[:-1])
    schema = Library(schema_text(tokenizer)).load(f'<schema name="s">\n{turns}</schema>')
    tokens = schema.prompt({}, messages={"user": conversation[-1]["content"]}).token_ids
    assert tokenizer.spell(tokens) == tokenizer.render_text(conversation, add_generation_prompt=True)


def test_a_first_message_of_the_user_brings_what_the_template_writes_before_it(folder: Path) -> None:
    text = schema_text(tokenizer_with(folder, DEFAULT_SYSTEM))
    assert text.around(None, "user") == ("<s>system: Be kind.</s><s>user: ", "</s>")
    assert text.around("system", "user") == ("<s>user: ", "</s>")
    assert text.answer("user") == "<s>assistant: <think></think>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        (
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            "does not write the content of each message once",
        ),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "does not write the content"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_that_cannot_write_a_message_is_a_schemas_error(
    folder: Path, template: str | None, message: str
) -> None:
    library = Library(schema_text(tokenizer_with(folder, template)))
    assert library.load('<schema name="s">no messages</schema>').layout.num_positions > 0
    with pytest.raises(SchemaError, match=f"<schema>:1:18: <user> cannot be written: .*{message}"):
        library.load('<schema name="s"><user>x</user></schema>')


def test_messages_that_no_conversation_has_are_refused(folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match="a system message cannot follow a user message"):
        schema_text(tokenizer_with(folder, CHATML)).around("user", "system")


def test_the_beginning_token_opens_every_source_and_stands_once_in_a_conversation(folder: Path) -> None:
    hf = AutoTokenizer.from_pretrained(folder)
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", hf.bos_token_id), ("</s>", hf.eos_token_id)]
    )
    hf.chat_template = LLAMA2
    tokenizer = Tokenizer(hf)
    library = Library(schema_text(tokenizer))
    assert library.text.opening == (hf.bos_token_id,)
    schema = library.load('<schema name="s"><module name="m">The answer</module></schema>')
    (empty, source) = schema.sources
    assert empty.token_ids == (hf.bos_token_id,)
    assert [*source.token_ids, hf.eos_token_id] == tokenizer.encode("The answer").tolist()
    assert schema.prompt({"m": {}}).composition.num_exact_tokens == len(source.token_ids)
    chat = library.load('<schema name="s"><user>Why?</user></schema>').prompt()
    assert tokenizer.spell(chat.token_ids) == "<s>[INST] Why? [/INST]"
