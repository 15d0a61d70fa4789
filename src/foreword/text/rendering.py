"""Rendering: conversations to tokens by a chat template.

Knows messages, templates and places in conversations; knows nothing of replies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import ChatTemplateError, ConfigError, InvalidRequestError
from foreword.text.conversation import plain_messages
from foreword.text.places import Conversation, Place, common_beginning
from foreword.text.tokenizer_files import one_line

_NO_INPUTS = frozenset(
    "conversation chat_template add_generation_prompt tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of transformers' rendering that are not inputs of a template."""

MOST_MESSAGE_ENDS = 64
"""Recurrent states may be saved at the ends of this many messages of a conversation: its last ones."""


class Renderer:
    """Renders conversations with a Hugging Face tokenizer's chat template, or with another."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer

    @property
    def chat_template(self) -> str | None:
        """The template's source; None if there is none, or if there are several with names."""
        template = self._hf.chat_template
        return template if isinstance(template, str) else None

    def set_chat_template(self, template: str) -> None:
        """Use another chat template: its source, or the path of its file.

        Raises ConfigError for a file that cannot be read, or a source that is not a template.
        """
        source = template
        if "\n" not in template and "{" not in template:
            try:
                source = Path(template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={template!r} cannot be read as UTF-8 text: {error}") from error
        from jinja2 import Environment, TemplateSyntaxError

        try:
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except TemplateSyntaxError as error:
            if "generation" not in str(error):  # transformers adds a block of this name
                raise ConfigError(f"chat_template={template!r:.60} is not a Jinja template: {error}") from error
        self._hf.chat_template = source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_inputs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> npt.NDArray[np.int32]:
        """Token ids of a conversation, with the tokenizer's chat template or the given one.

        `messages` are mappings with at least `role` and `content`, a text or a list of text parts. `template_inputs`
        are further values for the template, such as `tools` or `reasoning_effort`; it ignores those that it
        does not know. The result ends where the assistant's answer begins; after the last message if
        `add_generation_prompt` is False; inside the last message if `continue_final_message`. Raises
        `InvalidRequestError` for malformed messages or inputs and `ChatTemplateError` when there is no template or it
        refuses them.
        """
        conversation = _conversation(messages, template_inputs, add_generation_prompt, continue_final_message)
        token_ids = self._apply_template(conversation, continue_final_message, chat_template, tokenize=True)
        return np.array(token_ids, dtype=np.int32)

    def render_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, of which `render_chat` gives the tokens. Raises as it does."""
        text: str = self._apply_template(_conversation(messages, None, add_generation_prompt, False), False)
        return text

    def _apply_template(
        self, one: Conversation, continues: bool, chat_template: str | None = None, *, tokenize: bool = False
    ) -> Any:
        wrong = sorted(_NO_INPUTS & set(one.inputs))
        if wrong:
            raise InvalidRequestError(f"{wrong[0]!r} is not an input of a chat template; leave it out")
        if not chat_template and not self._hf.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; use generate() with a prompt written out in full, or "
                "add a chat_template.jinja file to the model's folder"
            )
        try:
            return self._hf.apply_chat_template(
                one.messages,
                chat_template=chat_template,
                add_generation_prompt=one.is_open and not continues,
                continue_final_message=continues,
                tokenize=tokenize,
                return_dict=False,
                **one.inputs,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatTemplateError(
                f"the chat template does not accept these messages (roles: "
                f"{', '.join(str(message['role']) for message in one.messages)}): {one_line(error)}"
            ) from error

    def render_places(
        self,
        messages: Sequence[Mapping[str, Any]],
        places: Sequence[Place],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_inputs: Mapping[str, Any] | None = None,
    ) -> tuple[npt.NDArray[np.int32], list[int]]:
        """What `render_chat` returns, and for each place the number of tokens before it.

        These tokens do not depend on what follows the place. 0: the template does not show the place, or refuses the
        conversation that would find it. Costs a rendering for each place; only slow tokenizers tokenize it.
        """
        ours = _conversation(messages, template_inputs, add_generation_prompt, continue_final_message)
        render = functools.partial(self._apply_template, continues=continue_final_message)
        if not self._hf.is_fast:
            return self._token_places(ours, places, render)
        text = render(ours)
        try:
            encoding = self._hf(text, add_special_tokens=False, verbose=False).encodings[0]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError("the conversation is not valid Unicode: it holds half of a surrogate") from error
        token_ids = np.array(encoding.ids, dtype=np.int32)
        positions = []
        for place in places:
            try:
                length = common_beginning(text, render(ours.differing_after(place)))
            except ChatTemplateError:
                length = 0
            is_shown = length < len(text) or place.message == len(ours.messages) - 1
            positions.append(self._token_at(token_ids, encoding, length, text) if is_shown else 0)
        return token_ids, positions

    def _token_places(
        self, ours: Conversation, places: Sequence[Place], render: Callable[..., Any]
    ) -> tuple[npt.NDArray[np.int32], list[int]]:
        token_ids = np.array(render(ours, tokenize=True), dtype=np.int32)
        positions = []
        for place in places:
            try:
                other = np.array(render(ours.differing_after(place), tokenize=True), dtype=np.int32)
            except ChatTemplateError:
                other = token_ids[:0]
            length = min(len(other), len(token_ids))
            parts = np.flatnonzero(other[:length] != token_ids[:length])
            positions.append(int(parts[0]) if len(parts) else length)
        return token_ids, positions

    def _token_at(self, token_ids: npt.NDArray[np.int32], encoding: Any, length: int, text: str) -> int:
        """The number of tokens within the first `length` characters that another continuation leaves as they are.

        Between two ordinary tokens the one before may depend on the text after it.
        """
        at = next((token for c in range(length, len(text)) if (token := encoding.char_to_token(c)) is not None), None)
        if at is None:
            return len(token_ids)
        special = self._hf.added_tokens_decoder
        if at and int(token_ids[at]) not in special and int(token_ids[at - 1]) not in special:
            at -= 1
        return int(at)

    def message_ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        token_ids: npt.NDArray[np.int32],
        *,
        template_inputs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> tuple[int, ...]:
        """Lengths in tokens of the rendered conversation up to the end of each of its last messages, ascending.

        A conversation that continues differently after a message shares these tokens with this one. Only the
        MOST_MESSAGE_ENDS messages before the last one count, because each needs another rendering. Leaves out a message
        if the template does not accept the conversation up to it. `template_inputs` and `chat_template` are those that
        rendered `token_ids`.
        """
        ends = set()
        for count in range(max(1, len(messages) - MOST_MESSAGE_ENDS), len(messages)):
            try:
                beginning = self.render_chat(
                    messages[:count],
                    add_generation_prompt=False,
                    template_inputs=template_inputs,
                    chat_template=chat_template,
                )
            except ChatTemplateError:
                continue
            length = min(len(beginning), len(token_ids))
            parts = np.flatnonzero(beginning[:length] != token_ids[:length])
            ends.add(int(parts[0]) if len(parts) else length)
        return tuple(sorted(ends - {0}))


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continues: bool,
) -> Conversation:
    conversation = plain_messages(messages)
    if continues:
        _check_continued(conversation, add_generation_prompt)
    return Conversation(conversation, inputs or {}, add_generation_prompt is not False)


def _check_continued(conversation: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message=True and add_generation_prompt=True cannot be combined; leave one out"
        )
    if not conversation[-1]["content"].strip():
        raise InvalidRequestError("continue_final_message=True needs a last message with text to continue")
