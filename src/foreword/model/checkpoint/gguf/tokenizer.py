"""tokenizer.json from a GGUF file's metadata, for the `tokenizers` library.

A file does not say how texts are split before its byte-level vocabulary is used. It only has llama.cpp's name of the
split (`tokenizer.ggml.pre`). A name whose split was not compared with the original tokenizer is refused, because a
wrong split silently gives wrong answers.

    gpt2     byte-level BPE (arXiv 1508.07909): merges are in the file
    llama    SentencePiece's BPE: scores decide which pieces merge, and each other byte becomes a piece
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from foreword.errors import UnsupportedModelError

Json = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""`tokenizer.ggml.token_type`: user-defined tokens are found in any text, control tokens where they are allowed."""
LONGEST_TOKEN = 512
ENDS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|return|> <|call|> <|END_OF_TURN_TOKEN|> <|eot|> <|EOT|> "
    "<|endoftext|> <|end_of_text|> <eos> </s> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
"""Control tokens that end a turn or a text, whatever `eos_token_id` says, because a file names only one there."""

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cases(end: str) -> str:
    """A pattern of words that begin with capital letters or consist of them, each with an `end`."""
    return f"{_BEFORE}{_UPPER}*{_LOWER}+{end}|{_BEFORE}{_UPPER}+{_LOWER}*{end}"


_BY_THREE = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_BY_ONE = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}"
_OF_CASES = rf"{_cases(_SHORT + '?')}|\p{{N}}{{1,3}}|{_MARKS}"
_TEKKEN = rf"{_cases('')}|\p{{N}}|{_MARKS}"
_BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_WORDS: Json = {**_BYTES, "use_regex": True}
"""GPT-2's own pattern."""


def _split(pattern: str) -> list[Json]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTES, "use_regex": False}]


_DIGITS: list[Json] = [{"type": "Digits", "individual_digits": True}, _WORDS]
_SPLITS: Mapping[str, Sequence[Json]] = {
    name: split
    for names, split in (
        ("gpt-2 olmo", [_WORDS]),
        ("smollm starcoder refact command-r codeshell", _DIGITS),
        ("llama-bpe llama3 llama-v3 smaug-bpe dbrx", _split(_BY_THREE)),
        ("qwen2 deepseek-r1-qwen", _split(_BY_ONE)),
        ("gpt-4o llama4", _split(_OF_CASES)),
        ("tekken", _split(_TEKKEN)),
    )
    for name in names.split()
}
"""`tokenizer.ggml.pre` -> how texts are split before merging."""
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken", "gpt-4o", "llama4")
"""Names of tokenizers that take a word as it is, without merging, if it is a token."""
_BEGIN = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Names of tokenizers whose prompts begin with a special token, unless the file says otherwise."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "command-r")
"""Names of tokenizers that compose characters first (NFC)."""


class _Vocabulary:
    """The tokens in a file's metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.kind, self.pre = str(self("model", "")), str(self("pre", "default"))
        self.tokens = self.texts("tokens")
        types = self.numbers("token_type")
        self.types = [NORMAL] * len(self.tokens) if types is None else [int(kind) for kind in types]
        if not self.tokens or len(self.types) != len(self.tokens):
            raise UnsupportedModelError(
                f"the GGUF file has {len(self.tokens)} tokens and {len(self.types)} of their types; name another "
                "tokenizer with --tokenizer"
            )
        longest = max(map(len, self.tokens))
        if longest > LONGEST_TOKEN:
            raise UnsupportedModelError(
                f"the GGUF file has a token of {longest} characters; vocabularies have at most {LONGEST_TOKEN}"
            )

    def __call__(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty if the file has no such list."""
        values = self(name, [])
        return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []

    def numbers(self, name: str) -> NDArray[Any] | None:
        """An array of finite numbers; None if the file has no such array."""
        values = self(name, None)
        return values if isinstance(values, np.ndarray) and bool(np.isfinite(values).all()) else None

    def special(self, name: str) -> str | None:
        """The text of a token like "bos"."""
        number = self(f"{name}_token_id", None)
        return self.tokens[number] if type(number) is int and 0 <= number < len(self.tokens) else None

    def ids(self) -> dict[str, int]:
        """Each text's number; the first number if a text occurs twice."""
        ids: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            ids.setdefault(token, number)
        return ids

    def added(self) -> list[Json]:
        """The tokens that the tokenizer searches for in a text before it splits the text."""
        return [
            {
                "id": number,
                "content": token,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": kind in (CONTROL, UNKNOWN),
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
        ]


def tokenizer_files(metadata: Mapping[str, Any], *, check: bool = True) -> dict[str, Json]:
    """The content of tokenizer.json and tokenizer_config.json. Raises UnsupportedModelError.

    `check`: whether to load the tokenizer once, to see that the library can load it.
    """
    words = _Vocabulary(metadata)
    if words.kind == "gpt2":
        parts = _byte_level(words)
    elif words.kind == "llama":
        parts = _pieces(words)
    else:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of the kind {words.kind!r}; foreword reads gpt2 and llama: name the model's "
            "own with --tokenizer"
        )
    begins = bool(words("add_bos_token", words.kind == "llama" or words.pre in _BEGIN))
    ends = bool(words("add_eos_token", False))
    around = [name for name, used in (("bos", begins), ("eos", ends)) if used and words.special(name) is not None]
    json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": words.added(),
        **parts,
        "post_processor": _around(words, around) or parts["post_processor"],
    }
    try:
        if check:
            Tokenizer.from_str(dumps(json))
    except Exception as error:  # the library has no error class of its own
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer cannot be used ({error}); name the model's own with --tokenizer"
        ) from error
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config: Json = {
        f"{name}_token": words.special(key) for key, name in names.items() if words.special(key) is not None
    }
    config |= {"as_it_is": True, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = _templates(metadata)
    return {"tokenizer.json": json, "tokenizer_config.json": {**config, **template}}


def end_tokens(metadata: Mapping[str, Any], vocab_size: int, *, own_tokenizer: bool = True) -> list[int]:
    """The ids of the tokens that end an answer, below `vocab_size`.

    `own_tokenizer`: whether the file's tokenizer is used; then end tokens are found by their texts, too.
    """
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if not own_tokenizer:
        return sorted({number for number in ids if type(number) is int and 0 <= number < vocab_size})
    words = _Vocabulary(metadata)
    by_text = [number for number, token in enumerate(words.tokens) if token in ENDS and words.types[number] == CONTROL]
    return sorted({number for number in (*ids, *by_text) if type(number) is int and 0 <= number < vocab_size})


def _templates(metadata: Mapping[str, Any]) -> Json:
    """`chat_template`: one template, or several with names; empty if the file has no template."""
    prefix = "tokenizer.chat_template"
    templates = {
        name.removeprefix(prefix).removeprefix(".") or "default": text
        for name in metadata
        if (name == prefix or name.startswith(f"{prefix}.")) and isinstance(text := metadata[name], str)
    }
    if not templates:
        return {}
    if set(templates) == {"default"}:
        return {"chat_template": templates["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def _around(words: _Vocabulary, names: Sequence[str]) -> Json | None:
    """The post-processor that adds the special tokens `names` before and after a text."""
    if not names:
        return None
    special = {name: words.special(name) for name in names}
    token = {name: {"SpecialToken": {"id": text, "type_id": 0}} for name, text in special.items()}

    def sides(*texts: str) -> list[Json]:
        parts = [{"Sequence": {"id": text, "type_id": 0}} for text in texts]
        return [*([token["bos"]] if "bos" in token else []), *parts, *([token["eos"]] if "eos" in token else [])]

    ids = {
        text: {"id": text, "ids": [words(f"{name}_token_id", 0)], "tokens": [text]} for name, text in special.items()
    }
    return {"type": "TemplateProcessing", "single": sides("A"), "pair": sides("A", "B"), "special_tokens": ids}


def _byte_level(words: _Vocabulary) -> Json:
    split = _SPLITS.get(words.pre)
    if split is None:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer splits texts as {words.pre!r} does, which foreword does not know; it knows "
            f"{', '.join(_SPLITS)}: name the model's own with --tokenizer"
        )
    ids = words.ids()
    merges = [text.split(" ") for text in words.texts("merges")]
    wrong = [pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys()]
    if wrong or not merges:
        what = f"the merge {' '.join(wrong[0])!r:.40} of unknown tokens" if wrong else "no merges"
        raise UnsupportedModelError(f"the GGUF file's tokenizer has {what}; name the model's own with --tokenizer")
    return {
        "normalizer": {"type": "NFC"} if words.pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(split)},
        "post_processor": _WORDS,
        "decoder": _WORDS,
        "model": {**_bpe(ids, merges), "ignore_merges": words.pre in _WHOLE_FIRST},
    }


def _bpe(ids: Mapping[str, int], merges: list[list[str]]) -> Json:
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    plain = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **nothing, **plain, "vocab": dict(ids), "merges": merges}


def _pieces(words: _Vocabulary) -> Json:
    """Parts for SentencePiece's BPE: a space becomes "▁", and pairs that make pieces of better scores merge first."""
    scores = words.numbers("scores")
    if scores is None or len(scores) != len(words.tokens):
        raise UnsupportedModelError("the GGUF file's tokenizer has no score for each token; name one with --tokenizer")
    ids, has_prefix = words.ids(), bool(words("add_space_prefix", True))
    best = sorted(
        (
            (-float(scores[number]), number)
            for number, kind in enumerate(words.types)
            if kind in (NORMAL, USER_DEFINED) and ids[words.tokens[number]] == number
        ),
    )
    merges = [list(pair) for _, number in best for pair in _halves(words.tokens[number], ids)]
    space, replace = {"String": " "}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    split = {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "pre_tokenizer": None if has_prefix else split,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {**_bpe(ids, merges), "unk_token": words.special("unknown"), "fuse_unk": True, "byte_fallback": True},
    }


def _halves(token: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens from which a token can be merged, in the order of their ids."""
    cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
    pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
    return sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
