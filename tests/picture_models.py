"""Tiny random models that see, and what transformers says of them: its own processor, encoder and language half."""

from __future__ import annotations

import inspect
import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiny_models import BASE, SLIDING_SLIDING_FULL, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
SIGNS = [
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
OLD_FIELDS = {
    "_flash_attn_2_enabled": True,
    "neftune_noise_alpha": 0.0,
    "perceiver_config": {"model_type": "vllama3"},
    "pixel_shuffle_factor": 4,
    "qk_layer_norms": False,
    "rope_interleaved": False,
    "use_resampler": False,
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
    "max_length": 20,
    "do_sample": False,
}
TILE = 32
"""Pixels of a tile's side, which has 4 rows."""


def save_seeing_model(folder: Path, kind: str = "idefics3", *, seed: int = 0) -> Path:
    """Write a checkpoint of random weights, its tokenizer and its image processor."""
    save_tokenizer(folder, chat_template=TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SIGNS})
    tokenizer.save_pretrained(folder)
    config_class, model_class = {
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    }[kind]
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 8,
    }
    config = config_class(
        text_config={**BASE, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    if kind == "smolvlm":  # as files of earlier versions are written
        path = folder / "config.json"
        values = json.loads(path.read_text())
        values["text_config"] |= OLD_FIELDS
        path.write_text(json.dumps(values))
    Idefics3ImageProcessorPil(size={"longest_edge": 3 * TILE}, max_image_size={"longest_edge": TILE}).save_pretrained(
        folder
    )
    return folder


QWEN_SIGN = "<|image_pad|>"
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TILE_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Family:
    """A family of models that see, made small."""

    config: Any
    model: Any
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    processor: Any
    sign: str
    """The sign of a picture in its chat template."""
    others: tuple[str, ...]
    """Control tokens beside that sign."""
    expand: Callable[[Mapping[str, Any], int], str]
    """The text for the sign of a picture, of what the image processor gave for all pictures, and its number."""
    top: Mapping[str, Any] = field(default_factory=dict)
    """Fields beside those of the halves."""
    token: str | None = None
    """What rows replace, if it is not the sign."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor that transformers' processor gives."""

    @property
    def template(self) -> str:
        """Its chat template."""
        beside = ("<|vision_start|>", "<|vision_end|>") if self.sign == QWEN_SIGN else ("", "")
        return TEMPLATE.replace("<image>", self.sign.join(beside))


def _qwen(config: Any, model: Any, vision: Mapping[str, Any], **text: Any) -> Family:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    rope |= {"mrope_interleaved": True} if "Qwen3" in model.__name__ else {}
    size = {"shortest_edge": 64, "longest_edge": 4096}
    return Family(
        config,
        model,
        {**_QWEN_VISION, **vision},
        {"rope_parameters": rope, "rms_norm_eps": 1e-6, **text},
        lambda: Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2, temporal_patch_size=2),
        QWEN_SIGN,
        ("<|vision_start|>", "<|vision_end|>"),
        lambda seen, number: QWEN_SIGN * (int(seen["image_grid_thw"][number].prod()) // 4),
    )


def _rows_of_pixtral(side: int, seen: Mapping[str, Any], number: int) -> str:
    rows, columns = (int(one) // side for one in seen["image_sizes"][number])
    return ("[IMG]" * columns + "[IMG_BREAK]") * (rows - 1) + "[IMG]" * columns + "[IMG_END]"


_SQUARE = {"height": TILE, "width": TILE}
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _qwen(
        Qwen2VLConfig, Qwen2VLForConditionalGeneration, {"hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": _qwen(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _qwen(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        head_dim=16,
        num_hidden_layers=4,
    ),
    "qwen3_vl_moe": _qwen(
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    "gemma3": Family(
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {**_TILE_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING_SLIDING_FULL, "query_pre_attn_scalar": 16},
        lambda: Gemma3ImageProcessorPil(size=_SQUARE),
        "<start_of_image>",
        ("<image_soft_token>", "<end_of_image>"),
        lambda seen, number: "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n",
        {"mm_tokens_per_image": 16},
        "<image_soft_token>",
    ),
    "mistral3": Family(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {**_TILE_VISION, "model_type": "pixtral", "head_dim": 16},
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        lambda: PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8}),
        "[IMG]",
        ("[IMG_BREAK]", "[IMG_END]"),
        partial(_rows_of_pixtral, 16),
        call={"patch_size": 16},
    ),
    "llava": Family(
        LlavaConfig,
        LlavaForConditionalGeneration,
        {**_TILE_VISION, "model_type": "pixtral", "head_dim": 16},
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        lambda: PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8}),
        "[IMG]",
        ("[IMG_BREAK]", "[IMG_END]"),
        partial(_rows_of_pixtral, 8),
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        call={"patch_size": 8},
    ),
    "internvl": Family(
        InternVLConfig,
        InternVLForConditionalGeneration,
        {**_TILE_VISION, "model_type": "internvl_vision"},
        {"model_type": "qwen2"},
        lambda: GotOcr2ImageProcessorPil(size=_SQUARE, max_patches=6),
        "<IMG_CONTEXT>",
        ("<img>", "</img>"),
        lambda seen, number: f"<img>{'<IMG_CONTEXT>' * (4 * int(seen['num_patches'][number]))}</img>",
        {"image_seq_length": 4},
        call={"crop_to_patches": True},
    ),
}
"""`model_type` -> the family."""


def save_family(folder: Path, kind: str, *, is_old: bool = False) -> Path:
    """Write a checkpoint of random weights. `is_old`: in the form in which the first of them were published."""
    own = FAMILIES[kind]
    save_tokenizer(folder, chat_template=own.template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [own.sign, *own.others]})
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    signs = {"image_token_id": ids(own.token or own.sign)}
    signs |= {"boi_token_index": ids(own.sign), "eoi_token_index": ids("<end_of_image>")} if own.token else {}
    config = own.config(
        text_config={**BASE, "vocab_size": len(tokenizer), **own.text}, vision_config=own.vision, **own.top, **signs
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = own.model(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.get_output_embeddings().weight[signs["image_token_id"]] = 0  # transformers cannot go on after a sign
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    if is_old:
        _write_as_published_first(folder)
    own.processor().save_pretrained(folder)
    return folder


def _write_as_published_first(folder: Path) -> None:
    """The names that weights had first; in Qwen's files, fields of the language half beside the others too.

    Those with experts have them in tensors [experts, in, out].
    """
    path = folder / "config.json"
    values = json.loads(path.read_text())
    names = [("model.language_model.", "model."), ("model.visual.", "visual.")]
    if values["model_type"] == "qwen3_vl_moe":
        names = []
    elif "qwen" in values["model_type"]:
        text = values.pop("text_config")
        rope = text.pop("rope_parameters")
        values = {**text, **values, "rope_theta": rope["rope_theta"]}
        values["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        path.write_text(json.dumps(values))
    else:
        names = [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")]
        names += [("multi_modal_projector.", "model.multi_modal_projector.")]
        if values["model_type"] == "gemma3":
            names += [("vision_tower.", "vision_tower.vision_model.")]
    tensors = load_file(folder / "model.safetensors")
    for old, new in names:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    turned = {name: own.transpose(1, 2).contiguous() for name, own in tensors.items() if ".experts." in name}
    save_file({**tensors, **turned}, folder / "model.safetensors", {"format": "pt"})


class FamilyOracle:
    """The same checkpoint run by transformers alone: eager attention, and each token computed from nothing."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._own = FAMILIES[kind]
        self._model = self._own.model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._tokenizer, self._processor = AutoTokenizer.from_pretrained(folder), self._own.processor()

    def answer(self, messages: Sequence[Mapping[str, Any]], num_tokens: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, and the likeliest continuation."""
        own = self._own
        images = [part["image"] for one in messages for part in one["content"] if part["type"] == "image"]
        seen = self._processor(images, return_tensors="pt", **own.call) if images else {}
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        first, *rest = text.split(own.sign)
        text = first + "".join(own.expand(seen, number) + part for number, part in enumerate(rest))
        prompt: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        ids, sign = torch.tensor([prompt]), self._tokenizer.convert_tokens_to_ids(own.token or own.sign)
        kinds = {"gemma3": "token_type_ids"}.get(self._model.config.model_type, "mm_token_type_ids")
        takes_kinds = kinds in inspect.signature(self._model.forward).parameters
        seen = {name: value for name, value in seen.items() if name not in ("num_patches", "num_crops")}
        for _ in range(num_tokens):
            self._model.model.rope_deltas = None
            marks = {kinds: (ids == sign).int()} if takes_kinds else {}
            with torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False, **marks, **seen).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        return prompt, ids[0, len(prompt) :].tolist()


class SeeingOracle:
    """The same checkpoint run by transformers alone: eager attention, no cache of any kind."""

    def __init__(self, folder: Path) -> None:
        self._model = Idefics3ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        processor = Idefics3ImageProcessorPil.from_pretrained(folder)
        self._processor = Idefics3Processor(processor, tokenizer, image_seq_len=4, chat_template=TEMPLATE)

    def answer(self, messages: Sequence[Mapping[str, Any]], num_tokens: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, and the likeliest continuation."""
        images = [part["image"] for one in messages for part in one["content"] if part["type"] == "image"]
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self._processor(images=images or None, text=text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            found = self._model.generate(
                **inputs, max_new_tokens=num_tokens, do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0
            )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, found[0, len(prompt) :].tolist()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture that no other one equals."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says this size, whatever follows."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def asks(text: str, *images: Any) -> list[dict[str, Any]]:
    """A question after pictures."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
