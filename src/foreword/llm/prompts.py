"""Users' prompts: texts, token ids, documents and prompts of schemas, as the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreword.cache import NO_EXTRA_KEYS, ExtraKeys
from foreword.engine import Prompt
from foreword.errors import InvalidRequestError
from foreword.linking import Deviations, Method, composition_of, with_links
from foreword.pictures import Pictures, picture_file
from foreword.pml.composition import Composition
from foreword.pml.documents import FIELDS
from foreword.pml.edits import compose_edit
from foreword.pml.library import SchemaPrompt
from foreword.request import RequestOutput
from foreword.text import Tokenizer
from foreword.text.schema_text import schema_text

if TYPE_CHECKING:
    from foreword.model.embeds import EmbedsReader

PromptInput = str | SchemaPrompt | Mapping[str, Any]


class Prompts:
    """Reads prompts for one model."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        deviations: Deviations | None = None,
        pictures: Pictures | None = None,
        *,
        embeds: EmbedsReader | None = None,
        refusal: str = "takes no images",
    ) -> None:
        """`model`: the model's name, for errors. `deviations`: for methods that choose tokens by deviation; None:
        nothing may be linked.

        `pictures` reads pictures; None: the model takes no pictures, and errors contain the text `refusal`. `embeds`
        reads prompt embeddings; None: the option is off.
        """
        self._refusal, self._embeds = refusal, embeds
        self._model, self._tokenizer, self._deviations, self._pictures = model, tokenizer, deviations, pictures

    def read(self, prompt: PromptInput, link: str | Method | None = None) -> Prompt:
        """Turn a user's prompt into a prompt for the engine. Its parts are linked if `link` is given. Raises
        InvalidRequestError.
        """
        plain, composition = self._plain(prompt)
        return plain if link is None else self.link(plain, composition, link)

    def read_parts(self, prompt: PromptInput, method: Method) -> tuple[Prompt, Composition]:
        """Turn a user's prompt into a linked prompt for the engine, and its parts. Raises InvalidRequestError if it has
        no parts.
        """
        plain, composition = self._plain(prompt)
        linked = self.link(plain, composition, method)
        assert composition is not None
        return linked, composition

    def link(self, prompt: Prompt, composition: Composition | None, link: str | Method) -> Prompt:
        """Return `prompt` with the KV of its parts linked, as `link` chooses. Raises InvalidRequestError if it has no
        parts.
        """
        return with_links(prompt, composition, link, self._deviations)

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """Return the model's tokenizer. Raises InvalidRequestError if the model has no tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"model {self._model!r} has no tokenizer, which {purpose} needs; give {{'prompt_token_ids': [...]}}"
            )
        return self._tokenizer

    def _plain(self, prompt: PromptInput) -> tuple[Prompt, Composition | None]:
        """Return the prompt without links, and its parts."""
        if isinstance(prompt, str | SchemaPrompt):
            return self._plain({"prompt": prompt})
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError(
                f"a prompt must be a text or {{'prompt_token_ids': [...]}}, not {prompt!r:.60} "
                f"({type(prompt).__name__})"
            )
        if prompt.get("multi_modal_data"):
            return self._with_pictures(prompt), None
        if prompt.get("prompt_embeds") is not None:
            return self._with_embeds(prompt), None
        kinds = {"prompt", "prompt_token_ids", "documents"} & set(prompt)
        unknown = (
            set(prompt)
            - kinds
            - {"cache_salt", "priority", "session_id", "multi_modal_data"}
            - (FIELDS if "documents" in kinds else {"edited_from"})
        )
        if unknown or len(kinds) != 1:
            raise InvalidRequestError(
                f"a prompt has the keys {sorted(prompt)}; give 'prompt', 'prompt_token_ids', or 'documents' and "
                "'question', and optionally 'cache_salt', 'priority', 'session_id' and 'edited_from'"
            )
        session = prompt.get("session_id")
        if session is not None and (not isinstance(session, str) or not session):
            raise InvalidRequestError(
                f"session_id={session!r:.60} is not a text of at least one character; give one such as 'run-7'"
            )
        parsed, composition = self._of_keys(prompt)
        if "edited_from" in prompt:
            if composition is not None:
                raise InvalidRequestError("edited_from stands beside a schema's prompt; give 'prompt' as a text")
            composition = self.edited(parsed, prompt["edited_from"])
        return replace(parsed, session=session), composition

    def edited(self, prompt: Prompt, before: str | Sequence[int] | RequestOutput) -> Composition:
        """Return the parts of a prompt that was made from an earlier prompt.

        `before`: the text, the tokens or the output of the earlier prompt. Raises InvalidRequestError.
        """
        if isinstance(before, RequestOutput):
            before = [*before.prompt_token_ids, *before.outputs[0].token_ids]
        elif isinstance(before, str):
            before = self.tokenizer_for("a text prompt").encode(before).tolist()
        return compose_edit(prompt.token_ids, _token_array(before))

    def _of_keys(self, prompt: Mapping[str, Any]) -> tuple[Prompt, Composition | None]:
        """Read a mapping whose keys were checked. Returns the prompt and its parts. The parts are None if the prompt
        has none.
        """
        keys, priority = _extra_keys(prompt.get("cache_salt")), priority_of(prompt.get("priority", 0))
        composition = composition_of(prompt, lambda: None if self._tokenizer is None else schema_text(self._tokenizer))
        if composition is not None:
            return Prompt(composition.token_ids, None, keys, priority), composition
        if "prompt" in prompt:
            text = prompt["prompt"]
            return Prompt(self.tokenizer_for("a text prompt").encode(text), text, keys, priority), None
        return Prompt(_token_array(prompt["prompt_token_ids"]), None, keys, priority), None

    def _with_embeds(self, prompt: Mapping[str, Any]) -> Prompt:
        """Return a prompt that begins with `prompt_embeds`, as in vLLM; a text or token ids may follow."""
        if self._embeds is None:
            raise InvalidRequestError("prompt_embeds need an LLM with enable_prompt_embeds=True; open it with that")
        others = {name: value for name, value in prompt.items() if name != "prompt_embeds"}
        if "prompt" in others:
            if "prompt_token_ids" in others:
                raise InvalidRequestError(
                    "a prompt has prompt_embeds, prompt and prompt_token_ids; give one of the last two"
                )
            text = others.pop("prompt")
            others["prompt_token_ids"] = self.tokenizer_for("a text prompt").encode_part(text) if text else ()
        plain = self.read({"prompt_token_ids": (), **others})
        head = self._embeds.read(prompt["prompt_embeds"])
        token_ids = np.concatenate((np.zeros(len(head), np.int32), plain.token_ids))
        return replace(plain, token_ids=token_ids, extra_keys=replace(plain.extra_keys, spans=head.spans), embeds=head)

    def _with_pictures(self, prompt: Mapping[str, Any]) -> Prompt:
        """Return a prompt with `multi_modal_data`, as in vLLM. Each sign in the prompt that stands for a picture gets
        one picture.
        """
        data = prompt["multi_modal_data"]
        if not isinstance(data, Mapping) or set(data) != {"image"}:
            names = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidRequestError(f"multi_modal_data has {names}; give {{'image': one picture or a list of them}}")
        if self._pictures is None:
            raise InvalidRequestError(f"model {self._model!r} {self._refusal}; leave multi_modal_data out")
        images = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
        plain = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        if isinstance(plain.get("prompt"), str):
            plain["prompt"] = self.tokenizer_for("pictures").with_written_signs(plain["prompt"])
        return self._pictures.shown(self.read(plain), self._pictures.read([picture_file(image) for image in images]))


def priority_of(value: Any) -> int:
    """Return a prompt's priority. Raises InvalidRequestError unless it is an integer."""
    if type(value) is not int:
        raise InvalidRequestError(f"priority={value!r} is not an integer; give one, such as 0 (lower goes first)")
    return value


def _extra_keys(salt: Any) -> ExtraKeys:
    if salt is None:
        return NO_EXTRA_KEYS
    try:
        salt.encode()
    except (AttributeError, UnicodeError) as error:
        raise InvalidRequestError(f"cache_salt={salt!r} is not a text; give a str that UTF-8 can encode") from error
    return ExtraKeys(salt=salt)


def _token_array(token_ids: Any) -> npt.NDArray[np.int32]:
    """Return token ids as an array. Raises InvalidRequestError unless they are a flat list of integers."""
    try:
        array = np.asarray(token_ids)
    except ValueError:  # lists of unequal length
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"prompt_token_ids must be a flat list of integers, not {str(token_ids)[:60]!r}")
    wrong = array[(array < 0) | (array > np.iinfo(np.int32).max)] if array.size else array
    if wrong.size:
        raise InvalidRequestError(f"prompt token {wrong[0]} is out of range; ids are 0 or more")
    return array.astype(np.int32)
