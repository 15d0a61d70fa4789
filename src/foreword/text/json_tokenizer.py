"""Makes a tokenizer from its `tokenizer.json`, equal to the one that transformers makes from the same files.

transformers chooses a class by the names in both configs. Most classes take tokenizer.json as it is. Some classes build
its parts anew. The file must have the same parts as such a class builds. If transformers might make a different
tokenizer, `NotPlainError` is raised, and transformers is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, pre_tokenizers

from foreword.errors import ModelLoadError, UnsupportedModelError, one_line

_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
"""Special tokens that every class knows, in transformers' order."""
AS_IT_IS = "as_it_is"
"""A field that foreword writes for GGUF files. It says that tokenizer.json is taken as it is, for any model."""
_KNOWN_FIELDS = frozenset(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens as_it_is backend "
    "chat_template clean_up_tokenization_spaces errors extra_special_tokens is_local legacy local_files_only "
    "max_length model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id padding_side "
    "processor_class response_template sp_model_kwargs spaces_between_special_tokens split_special_tokens stride "
    "tokenizer_class truncation_side truncation_strategy use_default_system_prompt".split()
)
"""Fields of tokenizer_config.json that are read here, or that change neither tokens nor texts."""
_PLAIN_CLASSES = frozenset("TokenizersBackend PreTrainedTokenizerFast PreTrainedTokenizer PythonBackend".split())
_CLASS_OF = {
    **dict.fromkeys(("", "llama", "smollm3", "gpt_oss")),
    **dict.fromkeys(("granite", "mistral", "mixtral", "olmo2", "phi3"), "TokenizersBackend"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer"),
    "cohere2": "CohereTokenizer",
}
"""`model_type` -> the class that transformers has registered for it."""
_CORRECTED = ("phi3", "qwen2")
"""Models whose files are known to name a wrong class."""
_MANY_TOKENS = 100_000
"""Mistral's vocabularies with more tokens than this may have a wrong pattern. transformers warns of it."""


class NotPlainError(Exception):
    """Raised if these files may give a different tokenizer in transformers; the message says why."""


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """The parts that a tokenizer class of transformers builds itself, instead of reading tokenizer.json."""

    special: Mapping[str, str | None]
    """The special tokens of the tokenizer class. The files of a model may leave them out."""
    model: tuple[Any, ...]
    """unk_token (a name in `special`), fuse_unk, byte_fallback."""
    normalizer: Any
    pre_tokenizer: Any
    decoder: str
    """The decoder's type, or the types of its parts."""


_END_OF_TEXT = "<|endoftext|>"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_QWEN_PATTERN = "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e"
"""SHA-256 of the pattern by which Qwen2's class splits texts."""
_REBUILT: Mapping[str, _Rebuilt] = {
    "Qwen2Tokenizer": _Rebuilt(
        {"unk_token": _END_OF_TEXT, "bos_token": None, "eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT},
        (None, False, False),
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN_PATTERN}, "behavior": "Isolated", "invert": False},
                {**_BYTES, "use_regex": False},
            ],
        },
        "ByteLevel",
    ),
    "GPT2Tokenizer": _Rebuilt(
        {"unk_token": _END_OF_TEXT, "bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT},
        (None, False, False),
        None,
        {**_BYTES, "use_regex": True},
        "ByteLevel",
    ),
    "GemmaTokenizer": _Rebuilt(
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        ("unk_token", True, True),
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "Replace ByteFallback Fuse",
    ),
}
"""Classes that build their parts anew."""


class Encoded(dict[str, list[int]]):
    """Token ids under "input_ids", and the encoding that gave them."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(input_ids=encoding.ids)
        self.encodings = [encoding]


class JsonTokenizer:
    """The part of `transformers.PreTrainedTokenizerBase` that foreword uses, under the same names."""

    is_fast = True

    def __init__(self, backend: Tokenizer, special: Mapping[str, str], extra: Sequence[str]) -> None:
        """`special`: special tokens by their names; `extra`: special tokens without names."""
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special)
        self.all_special_tokens = list(dict.fromkeys((*special.values(), *extra)))
        self.all_special_ids = self.convert_tokens_to_ids(self.all_special_tokens)
        self.eos_token = self.special_tokens_map.get("eos_token")
        self.eos_token_id, self.unk_token_id, self.pad_token_id = map(self._id, ("eos_token", "unk_token", "pad_token"))
        self.chat_template: Any = None
        """The template's source, or several sources by their names."""
        self.response_template: Any = None

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> JsonTokenizer:
        """Load the tokenizer of a folder. Raises NotPlainError if it is not supported, or its files are damaged."""
        try:
            return _load(folder, trust_remote_code)
        except NotPlainError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for damaged files
            raise NotPlainError(f"files that cannot be read ({error})") from error

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.convert_tokens_to_ids([token])[0]

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[Any]:
        """The ids of tokens. A token outside the vocabulary gets the id of the unknown token, or None."""
        unknown = self.special_tokens_map.get("unk_token")
        other = None if unknown is None else self.backend_tokenizer.token_to_id(unknown)
        ids = (self.backend_tokenizer.token_to_id(token) for token in tokens)
        return [other if token_id is None else token_id for token_id in ids]

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The token of an id, as the vocabulary writes it; None if there is no such id."""
        token: str | None = self.backend_tokenizer.id_to_token(token_id)
        return token

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> Encoded:
        """Encode a text. Raises TypeError or UnicodeError for any other value."""
        [encoding] = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return Encoded(encoding)  # with a single text instead of a batch, the library would block other threads

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Token ids of a text. Raises the same errors as `__call__`."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of tokens, without any clean-up of spaces."""
        return str(self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _load(folder: Path, trust_remote_code: bool) -> JsonTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotPlainError("a folder without tokenizer.json")
    config, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    if "auto_map" in config or (trust_remote_code and "auto_map" in model):
        raise NotPlainError("code of its own")
    if "added_tokens_decoder" not in config:
        older = [name for name in ("special_tokens_map.json", "added_tokens.json") if (folder / name).exists()]
        if older:
            raise NotPlainError(older[0])
    token_fields = [name for name in config if name.endswith("_token") and name not in _KNOWN_FIELDS]
    unknown = sorted(set(config) - _KNOWN_FIELDS - set(token_fields))
    if unknown:
        raise NotPlainError(f"tokenizer_config.json's {unknown[0]}")
    if {config.get("padding_side", "left"), config.get("truncation_side", "left")} - {"left", "right"}:
        raise NotPlainError("sides that are none")
    name = _class(config, model, path)
    backend = Tokenizer.from_file(str(path))
    if backend.padding is not None:
        raise NotPlainError("padding in tokenizer.json")
    backend.no_truncation()
    if model.get("model_type") == "mistral" and backend.get_vocab_size() > _MANY_TOKENS:
        raise NotPlainError("a vocabulary of Mistral's, whose pattern may be wrong")
    rebuilt = _REBUILT.get(name)
    listed = config.get("added_tokens_decoder")
    existing = dict(backend.get_added_tokens_decoder())
    added = existing if listed is None else {int(number): AddedToken(**entry) for number, entry in listed.items()}
    special, extra = _special(config, token_fields, {} if rebuilt is None else rebuilt.special, added)
    if rebuilt is not None:
        _check_parts(name, rebuilt, backend, special, bool(config.get("add_prefix_space")))
        size = backend.get_vocab_size(with_added_tokens=False)
        beyond = sorted(number for number in existing if number >= size)
        if set(existing) != set(added) or beyond != list(range(size, size + len(beyond))):
            raise NotPlainError("added tokens that tokenizer_config.json lists otherwise than tokenizer.json")
    _add(backend, existing, added, special, extra)
    if name == "Qwen2Tokenizer":
        backend.add_tokens([AddedToken(_text(token), special=True) for token in (*special.values(), *extra)])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    loaded = JsonTokenizer(backend, {key: _text(one) for key, one in special.items()}, [_text(one) for one in extra])
    loaded.chat_template, loaded.response_template = _chat_template(folder, config), config.get("response_template")
    return loaded


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes()) if path.exists() else {}
    if not isinstance(content, dict):
        raise NotPlainError(f"a {path.name} that is no object")
    return content


def _class(config: Mapping[str, Any], model: Mapping[str, Any], path: Path) -> str:
    """The class that transformers uses: a name in `_REBUILT`, or "TokenizersBackend" for tokenizer.json as it is."""
    if config.get(AS_IT_IS) is True:
        return "TokenizersBackend"
    kind = str(model.get("model_type", ""))
    if kind not in _CLASS_OF:
        raise NotPlainError(f"model_type={kind!r}")
    if kind in ("mistral", "mixtral") and find_spec("mistral_common") is not None:
        raise NotPlainError("mistral_common, which is installed")
    registered = _CLASS_OF[kind]
    class_name = config.get("tokenizer_class") or model.get("tokenizer_class")
    declared = (registered or "") if class_name is None else str(class_name).removesuffix("Fast")
    if declared == "LlamaTokenizer" and kind not in _CORRECTED and b'"ByteLevel"' in path.read_bytes():
        declared = "TokenizersBackend"
    elif registered is not None and registered != declared:
        declared = registered if registered == "TokenizersBackend" or kind in _CORRECTED else declared
    if declared in _PLAIN_CLASSES:
        return "TokenizersBackend"
    if declared not in _REBUILT:
        raise NotPlainError(f"tokenizer_class={class_name!r}")
    return declared


def _special(
    config: Mapping[str, Any], fields: Sequence[str], usual: Mapping[str, str | None], added: Mapping[int, AddedToken]
) -> tuple[dict[str, str | AddedToken], list[str | AddedToken]]:
    """Special tokens by their names, and special tokens without names. `usual`: the class's own special tokens."""
    by_text = {token.content: token for token in added.values()}
    tokens = {**usual, **{name: _token(config[name]) for name in _NAMED if name in config}}
    special = {name: by_text.get(_text(value), value) for name in _NAMED if (value := tokens.get(name)) is not None}
    further = {name: config[name] for name in fields if name not in _NAMED}
    more, older = config.get("extra_special_tokens") or [], config.get("additional_special_tokens") or []
    if isinstance(more, Mapping):
        further, more = {**further, **more}, []
    extra = more or older
    for name, value in further.items():
        if not isinstance(value, str):
            raise NotPlainError(f"tokenizer_config.json's {name}")
        special[name] = value
    return special, [_token(token) for token in extra]


def _token(token: Any) -> Any:
    if isinstance(token, Mapping) and token.get("__type") == "AddedToken":
        return AddedToken(**{name: value for name, value in token.items() if name != "__type"})
    if token is not None and not isinstance(token, str):
        raise NotPlainError("a special token that is no text")
    return token


def _text(token: str | AddedToken) -> str:
    return token.content if isinstance(token, AddedToken) else token


def _check_parts(
    name: str, rebuilt: _Rebuilt, backend: Tokenizer, special: Mapping[str, str | AddedToken], has_prefix: bool
) -> None:
    """Raise NotPlainError if tokenizer.json has other parts than the class builds."""
    unk, fuse_unk, byte_fallback = rebuilt.model
    model, unk = backend.model, None if unk is None else _text(special[unk])
    affixes = (model.continuing_subword_prefix or "") + (model.end_of_word_suffix or "")
    model_facts = (model.unk_token, model.fuse_unk, model.byte_fallback, model.dropout, model.ignore_merges, affixes)
    same = model_facts == (unk, fuse_unk, byte_fallback, None, False, "")
    same = same and _state(backend.normalizer) == rebuilt.normalizer
    splitting = backend.pre_tokenizer
    several: Any = splitting if isinstance(splitting, pre_tokenizers.Sequence) else [splitting]
    for part in several:
        if isinstance(part, pre_tokenizers.ByteLevel):
            part.trim_offsets = True  # as classes set it: it changes offsets, but no tokens
    backend.pre_tokenizer = splitting
    splits = _state(splitting)
    for splitter in (splits or {}).get("pretokenizers", ()):
        if "Regex" in splitter.get("pattern", {}):
            splitter["pattern"]["Regex"] = hashlib.sha256(splitter["pattern"]["Regex"].encode()).hexdigest()
    same = same and splits == rebuilt.pre_tokenizer and not has_prefix
    decoder = _state(backend.decoder) or {}
    kinds = " ".join(part["type"] for part in decoder.get("decoders", [decoder]) if part)
    if not same or kinds != rebuilt.decoder:
        raise NotPlainError(f"parts of tokenizer.json that {name} builds otherwise")


def _state(part: Any) -> Any:
    """The settings of one part of a tokenizer, as tokenizer.json would write them."""
    return None if part is None else json.loads(part.__getstate__())


def _add(
    backend: Tokenizer,
    existing: Mapping[int, AddedToken],
    added: Mapping[int, AddedToken],
    special: Mapping[str, str | AddedToken],
    extra: Sequence[str | AddedToken],
) -> None:
    """Add the tokens that tokenizer.json lacks, or has with other settings. `existing`: the tokens that it has."""
    special_texts = {_text(token) for token in special.values()}
    present = {repr(token) for token in existing.values()}
    missing = []
    for number in sorted(added):
        token = added[number]
        token.special = token.special or token.content in special_texts
        if repr(token) not in present:
            missing.append(token)
    texts = {token.content for token in (*existing.values(), *missing)}
    further: list[str | AddedToken] = []
    for entry in (*special.values(), *extra):
        if _text(entry) not in texts and entry not in further:  # the same text may come twice, in different ways
            further.append(entry)
    for entry in further:
        token = AddedToken(entry, special=True) if isinstance(entry, str) else entry
        token.special = token.special or token.content in special_texts
        missing.append(token)
    if missing:
        backend.add_tokens(missing)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template's source, or several sources by their names. Template files override tokenizer_config.json."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    if sources:
        return sources["default"] if list(sources) == ["default"] else sources
    template = config.get("chat_template")
    return {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else template


_TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt spiece.model sentencepiece.bpe.model "
    "tekken.json tiktoken.model"
).split()
"""A model without any of these files has no tokenizer."""


def find_tokenizer_files(model: str, revision: str | None) -> str | None:
    """The folder or hub id from which to load a tokenizer; None if the model exists but has no tokenizer."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return str(folder) if _holds_tokenizer(folder) else None
    if folder.suffix == ".gguf":
        raise UnsupportedModelError(
            f"{str(model)!r} is a GGUF file, whose tokenizer is used only with its own model; name a folder that has a "
            "tokenizer.json"
        )
    if folder.exists():
        raise ModelLoadError(f"{model!r} is a file; name the folder that holds the model")
    if folder.is_absolute() or model.startswith(".") or len(folder.parts) > 2:
        raise ModelLoadError(f"there is no folder {model!r}; give a model's folder or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:
        raise ModelLoadError(
            f"{model!r} is neither a folder here nor a model that the hub provides: {one_line(error)}"
        ) from error
    return model if _holds_tokenizer(snapshot) else None


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)
