"""Rendering: turns conversations into tokens with a chat template.

A control token in a user's message, such as `<|im_end|>`, stays text. A mark inside it hides it from the tokenizer:

    <|im_end|>  ->  <⿻|im_end|>  ->  "<" "⿻" "|" "im" "_end" "|" ">"  ->  the tokens without those of the mark
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import regex
from jinja2 import TemplateSyntaxError

from foreword.cache import common_length
from foreword.errors import ChatTemplateError, ConfigError, InvalidRequestError, one_line
from foreword.text.conversation import (
    Conversation,
    Place,
    Rendering,
    common_beginning,
    in_parts,
    pictures_in_order,
    pictures_of,
)
from foreword.text.reply.format import choose_format
from foreword.text.template_engine import environment, render
from foreword.text.template_probe import Probe, TemplateReport, refuse_lost

MARKS = "⿻⿺⿹⿸⿷"
"""Candidates for the mark: printable characters that are in hardly any text, and that templates write as they are."""
_NO_INPUTS = frozenset(
    "conversation chat_template add_generation_prompt tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of transformers' rendering that are not inputs of a template."""
MOST_REPORTS = 16
"""The number of chat templates whose reports are remembered: a request may name its own template."""
MOST_MESSAGE_ENDS = 64
"""The most messages of a conversation, the last ones, at whose ends recurrent states may be saved."""


class ControlTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = [text for text in texts if len(text) > 1]
        self._beginnings = {text[:2] for text in self._texts}
        self._pattern = regex.compile(r"\L<texts>", texts=self._texts) if self._texts else None

    def hidden(self, value: Any, mark: str, spared: frozenset[str] = frozenset()) -> Any:
        """In all strings of a value, put the mark into the text of each special token that is not in `spared`.

        Returns the value itself if there is no special token's text in it.
        """
        if isinstance(value, str):
            return self._hidden_text(value, mark, spared)
        if isinstance(value, Mapping):
            marked = {self.hidden(key, mark, spared): self.hidden(item, mark, spared) for key, item in value.items()}
            return marked if any(marked.get(key, marked) is not item for key, item in value.items()) else value
        if isinstance(value, list | tuple):
            items = [self.hidden(item, mark, spared) for item in value]
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def _hidden_text(self, text: str, mark: str, spared: frozenset[str]) -> str:
        if self._pattern is None or not any(beginning in text for beginning in self._beginnings):
            return text  # most texts end here, in a hundredth of the time

        def hide(match: Any) -> str:
            token = str(match[0])
            return token if token in spared else token[0] + mark + token[1:]

        hidden = str(self._pattern.sub(hide, text))
        return text if hidden == text else hidden


def marked_tokens(encoding: Any, text: str, mark: str) -> npt.NDArray[np.intp] | None:
    """The indices of the tokens that are a mark; None if a token has a mark together with other characters."""
    if mark not in text:
        return np.empty(0, np.intp)
    indices = [at for at, (begin, end) in enumerate(encoding.offsets) if mark in text[begin:end]]
    if any(text[begin:end] != mark for begin, end in (encoding.offsets[at] for at in indices)):
        return None
    return np.array(indices, np.intp)


class _Marked(NamedTuple):
    """A text in which a mark hides the texts of control tokens from the tokenizer."""

    text: str
    mark: str

    @property
    def plain(self) -> str:
        return self.text.replace(self.mark, "") if self.mark else self.text


class Renderer:
    """Renders conversations with a Hugging Face tokenizer's chat template, or with another."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._reports: dict[str, TemplateReport] = {}
        special = (str(token) for token in hf_tokenizer.added_tokens_decoder.values() if token.special)
        self._control = ControlTokens({*special, *hf_tokenizer.all_special_tokens})
        self._takes_control_tokens = False
        self._written_sign: tuple[str, str] | None = None

    def write_signs(self, written_sign: tuple[str, str]) -> None:
        """Replace each picture's sign in rendered texts from now on. `written_sign`: (sign, its replacement)."""
        self._written_sign = written_sign

    def with_written_signs(self, text: str) -> str:
        """The text of a prompt, in which each picture's sign is written as the model's own processor writes it."""
        return text if self._written_sign is None else text.replace(*self._written_sign)

    @property
    def chat_template(self) -> str | None:
        """The template's source; None without a template. If there are several, the template that takes tools."""
        return self._source(has_tools=True)

    def _source(self, *, has_tools: bool) -> str | None:
        template = self._hf.chat_template
        if isinstance(template, Mapping):
            names = ("tool_use", "default") if has_tools else ("default", "tool_use")
            return next((template[name] for name in names if name in template), None)
        return template or None

    def template_report(self, chat_template: str | None = None) -> TemplateReport:
        """The form of a chat template, and the kinds of conversations that it does not show. Probes a template once.

        `chat_template`: the template's source; None: the tokenizer's own template.
        """
        source = chat_template or self.chat_template
        if source is None:
            return TemplateReport()
        if (report := self._reports.get(source)) is not None:  # other threads may drop it at any time
            return report

        def render(messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> str:
            is_open = messages[-1]["role"] != "assistant"
            return self._apply(Conversation(messages, inputs, is_open), source)

        report = Probe(render, choose_format(None, None, source)).report()
        if len(self._reports) >= MOST_REPORTS:
            self._reports.popitem()  # the last: the first is the tokenizer's own
        self._reports[source] = report
        return report

    def take_control_tokens(self) -> None:
        """From now on, read control tokens in messages, such as `<|im_end|>`, as tokens, as in text prompts."""
        self._takes_control_tokens = True

    def _spared_tokens(self) -> frozenset[str]:
        """Control tokens that earlier answers in a conversation may have: the marks around reasoning."""
        return frozenset()

    def set_chat_template(self, template: str) -> None:
        """Use another chat template: its source, or the path of its file.

        Raises ConfigError for a file that cannot be read, or a source that is not a template.
        """
        source = template
        if "\n" not in template and "{" not in template:
            try:
                source = Path(os.path.expanduser(template)).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={template!r} cannot be read as UTF-8 text: {error}") from error
        try:
            environment().parse(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template={template!r:.60} is not a Jinja template: {error}") from error
        self._hf.chat_template = source

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **rendering: Unpack[Rendering]
    ) -> npt.NDArray[np.int32]:
        """Token ids of a conversation, rendered by the tokenizer's chat template, or by the one in `rendering`.

        `messages` are mappings with at least `role` and `content`, a text or a list of text parts. Raises
        `InvalidRequestError` for malformed messages or inputs, and `ChatTemplateError` if there is no template or it
        refuses the messages.
        """
        return self._encoded(self._marked(Conversation.of(messages, rendering)))[0]

    def render_text(self, messages: Sequence[Mapping[str, Any]], **rendering: Unpack[Rendering]) -> str:
        """The text whose tokens `render_chat` returns. Raises the same errors."""
        return self._marked(Conversation.of(messages, rendering)).plain

    def _marked(self, chat: Conversation) -> _Marked:
        """Render a conversation to text. A mark hides the control tokens in messages."""
        wrong = sorted(_NO_INPUTS & set(chat.inputs))
        if wrong:
            raise InvalidRequestError(f"{wrong[0]!r} is not an input of a chat template; leave it out")
        source = self._source_for(chat)
        if source is None:
            raise ChatTemplateError(
                "the model has no chat template: it continues texts; send a prompt written out in full (generate(), "
                "/v1/completions), name a template with chat_template, or add chat_template.jinja to the model's folder"
            )
        report = self.template_report(source)
        refuse_lost(report, chat.messages, chat.inputs)
        try:
            chat, mark = self._hidden(chat)
            messages, inputs = report.form.write(chat.messages, chat.inputs)
        except RecursionError as error:
            raise InvalidRequestError("a message or a tool has lists or objects too deep inside each other") from error
        if not pictures_of(chat.messages):
            return _Marked(self._apply(replace(chat, messages=messages, inputs=inputs), source), mark)
        text = self._apply(replace(chat, messages=in_parts(messages), inputs=inputs), source)
        return _Marked(self.with_written_signs(text), mark)

    def _source_for(self, chat: Conversation) -> str | None:
        has_tools = bool(chat.inputs.get("tools")) or any(message.get("tool_calls") for message in chat.messages)
        return chat.chat_template or self._source(has_tools=has_tools)

    def pictures(self, messages: Sequence[Mapping[str, Any]], **rendering: Unpack[Rendering]) -> list[Any]:
        """The files of a conversation's pictures, in the order in which the rendered text shows them."""
        if len(files := pictures_of(messages)) < 2:
            return files
        chat = Conversation.of(messages, rendering)
        form = self.template_report(self._source_for(chat)).form
        return pictures_in_order(chat.messages, lambda ordered: form.write(ordered, chat.inputs)[0])

    def _hidden(self, chat: Conversation) -> tuple[Conversation, str]:
        """Put a mark into each control token's text in messages, so that the tokenizer does not read a token there.

        Answers keep the tokens of `_spared_tokens`. Returns the conversation and the mark, which is "" if nothing was
        marked.
        """
        if self._takes_control_tokens:
            return chat, ""
        spared = self._spared_tokens()
        for mark in MARKS:
            messages = [
                self._control.hidden(message, mark, spared if message["role"] == "assistant" else frozenset())
                for message in chat.messages
            ]
            inputs = self._control.hidden(chat.inputs, mark)
            if inputs is chat.inputs and all(a is b for a, b in zip(messages, chat.messages, strict=True)):
                return chat, ""
            if mark not in repr(chat):
                break
        return replace(chat, messages=messages, inputs=inputs), mark

    def _apply(self, chat: Conversation, source: str) -> str:
        return apply_template(source, chat, self._hf.special_tokens_map)

    def _encoded(self, marked: _Marked) -> tuple[npt.NDArray[np.int32], Any, npt.NDArray[np.intp]]:
        """Encode a text. Returns token ids without the marks, a fast tokenizer's encoding, and the marks' indices."""
        try:
            encoded = self._hf(marked.text, add_special_tokens=False, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError("the conversation is not valid Unicode: it holds half of a surrogate") from error
        token_ids = np.array(encoded["input_ids"], dtype=np.int32)
        if not marked.mark:
            return token_ids, encoded.encodings[0] if self._hf.is_fast else None, np.empty(0, np.intp)
        marks = marked_tokens(encoded.encodings[0], marked.text, marked.mark) if self._hf.is_fast else None
        if marks is None:
            raise InvalidRequestError(
                "a message has the text of a control token, which this tokenizer cannot write as text; leave it out, "
                "or set chat_control_tokens=True if all clients may send control tokens"
            )
        return np.delete(token_ids, marks), encoded.encodings[0], marks

    def render_places(
        self, messages: Sequence[Mapping[str, Any]], places: Sequence[Place], **rendering: Unpack[Rendering]
    ) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Return the token ids of `render_chat`, and for each place the number of tokens before it.

        These tokens do not depend on the text after the place. The number is 0 if the template does not show the place,
        or refuses the conversation that is rendered to find it. Each place costs a rendering, and a slow tokenizer must
        also encode its text.
        """
        ours = Conversation.of(messages, rendering)
        marked = self._marked(ours)
        token_ids, encoding, marks = self._encoded(marked)
        text = marked.text
        positions = []
        for place in places:
            try:
                other = self._marked(ours.differing_after(place))
            except ChatTemplateError:
                positions.append(0)
                continue
            if encoding is None:  # of a slow tokenizer
                positions.append(common_length(self._encoded(other)[0], token_ids))
                continue
            length = common_beginning(text, other.text)
            is_shown = length < len(text) or place.message == len(ours.messages) - 1
            at = self._token_at(encoding, length, text) if is_shown else 0
            positions.append(at - int(np.searchsorted(marks, at)))
        return token_ids, positions

    def _token_at(self, encoding: Any, length: int, text: str) -> int:
        """The number of a text's tokens that do not depend on what follows the first `length` characters.

        If two ordinary tokens meet at that place, the first may depend on the text after it, so it is not counted.
        """
        at = next((token for c in range(length, len(text)) if (token := encoding.char_to_token(c)) is not None), None)
        if at is None:
            return len(encoding.ids)
        special = self._hf.added_tokens_decoder
        if at and encoding.ids[at] not in special and encoding.ids[at - 1] not in special:
            at -= 1
        return int(at)

    def message_ends(
        self,
        messages: Sequence[Mapping[str, Any]],
        token_ids: npt.NDArray[np.int32],
        **rendering: Unpack[Rendering],
    ) -> tuple[int, ...]:
        """For each of a conversation's last messages, the number of rendered tokens up to its end, ascending.

        A conversation that continues differently after a message shares these tokens with this conversation. Only the
        MOST_MESSAGE_ENDS messages before the last one count, because each needs another rendering. Leaves out a message
        if the template does not accept the conversation up to it. `rendering` must be the same as for `token_ids`.
        """
        ends = set()
        for count in range(max(1, len(messages) - MOST_MESSAGE_ENDS), len(messages)):
            try:
                chat = Conversation.of(messages[:count], {**rendering, "add_generation_prompt": False})
                beginning, *_ = self._encoded(self._marked(chat))
            except ChatTemplateError:
                continue
            ends.add(common_length(beginning, token_ids))
        return tuple(sorted(ends - {0}))


def apply_template(source: str, chat: Conversation, special_tokens: Mapping[str, Any]) -> str:
    """Render messages that are already in the form of the template. Raises ChatTemplateError."""
    inputs = {"tools": None, "documents": None, **special_tokens, **chat.inputs}
    try:
        return render(
            source, chat.messages, inputs, is_open=chat.is_open and not chat.continues, continues=chat.continues
        )
    except Exception as error:  # a template is a program: it may fail in any way
        roles = ", ".join(str(message["role"]) for message in chat.messages)
        raise ChatTemplateError(
            f"the chat template does not accept these messages (roles: {roles}): {one_line(error)}"
        ) from error
