"""Tiny random models, made on the spot, what transformers says of them, and engines that run them.

Knows recipes of architectures; their words mean nothing, but every weight, bias, norm and sink is random,
so that a mistake anywhere changes the tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foreword.assembly import make_runner
from foreword.cache import CacheLedger, FullAttentionSpec, KVCacheManager, make_index
from foreword.config import Dtype, ModelConfig, SchedulerConfig
from foreword.engine import Engine, ModelLimits, Prompt, TierDirector
from foreword.kernels.kv_format import KVFormat
from foreword.model.gpu.runner import RunnerLimits
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel, load_model
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from foreword.request import RequestOutput, SamplingParams

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
MAX_POSITIONS = 1024

BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
"""Keys of another size than values, as sizes of latent KV."""
GROUPS = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 48}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 256}
SLIDING_SLIDING_FULL = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One architecture of transformers, made small."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)


RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe("llama"),
    "qwen2": Recipe("qwen2", {"head_dim": 32}),
    "qwen3": Recipe("qwen3", {"head_dim": 32}),
    "mistral": Recipe("mistral", {"head_dim": 32, "sliding_window": 24}),
    # Half of each head turns.
    "phi3": Recipe(
        "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "olmo2": Recipe("olmo2"),
    "granite": Recipe("granite", {"embedding_multiplier": 2.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}),
    "qwen3_moe": Recipe(
        "qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    ),
    "mixtral": Recipe("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # One layer without experts between two with them.
    "qwen2_moe": Recipe(
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": Recipe(
        "gemma2",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3_text": Recipe("gemma3_text", {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING_SLIDING_FULL}),
    "gpt_oss": Recipe(
        "gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    ),
    "smollm3": Recipe(
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": SLIDING_SLIDING_FULL,
        },
    ),
    "cohere2": Recipe("cohere2", {"sliding_window": 8, "layer_types": SLIDING_SLIDING_FULL}),
    "llama4_text": Recipe(
        "llama4_text",
        {
            "head_dim": 16,
            "attention_chunk_size": 12,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "no_rope_layers": [1, 1, 0],
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "attn_temperature_tuning": True,
            "floor_scale": 8,  # queries are scaled by their position from 8 on, not from 8,192
            "attn_scale": 0.5,
        },
    ),
    "mamba2": Recipe(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "qwen3_next": Recipe(
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "falcon_h1": Recipe(
        "falcon_h1",
        {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "ssm_in_multiplier": 0.7,
        },
    ),
    "granitemoehybrid": Recipe(
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": Recipe(
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
        },
    ),
    # Layers that remember nothing, between those that do.
    "nemotron_h": Recipe(
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    # Full layers with heads of another size than those of sliding ones.
    "gemma4_text": Recipe(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 8,
            "layer_types": SLIDING_SLIDING_FULL,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "lfm2": Recipe(
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 96},
    ),
    "glm4": Recipe("glm4", {"head_dim": 16}),
    # Positions as an embedding; names of its own for every size.
    "gpt2": Recipe("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    # Scores that fall with the distance; numbers of heads that are no powers of two have two kinds of slopes.
    "bloom": Recipe("bloom", {"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": False}),
    "mpt": Recipe(
        "mpt",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "max_seq_len": 640,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.2},
        },
    ),
    # Latent KV, and experts that are chosen in groups.
    "deepseek_v3": Recipe(
        "deepseek_v3",
        {
            **LATENT,
            **GROUPS,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **MSCALE},
        },
    ),
    "deepseek_v2": Recipe(
        "deepseek_v2",
        {
            **LATENT,
            **GROUPS,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe_lite": Recipe("glm4_moe_lite", {**LATENT, **GROUPS, "n_group": 1, "topk_group": 1}),
    # transformers replaces the row of a padding token.
    "youtu": Recipe("youtu", {**LATENT, "q_lora_rank": 16, "pad_token_id": None}),
    "minicpm3": Recipe("minicpm3", {**LATENT, "scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 48}),
    # Heads of whole panels: their products are one operation where the processor has instructions for it.
    "wide_deepseek": Recipe(
        "deepseek_v2",
        {
            **LATENT,
            **GROUPS,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "topk_method": "greedy",
        },
    ),
    # One KV head: a lone request leaves attention a single matrix to multiply.
    "mqa_llama": Recipe("llama", {"hidden_size": 60, "num_key_value_heads": 1, "num_attention_heads": 3}),
    # Heads of whole vectors: its layers are one program where the processor has instructions for it.
    "wide_llama": Recipe("llama", {"head_dim": 32}),
    # Sizes that no vector width divides, and an embedding that is also the output head.
    "odd_llama": Recipe(
        "llama", {"hidden_size": 60, "head_dim": 20, "intermediate_size": 100, "tie_word_embeddings": True}
    ),
}


def save_model(folder: Path, recipe: Recipe, *, seed: int = 0) -> Path:
    """Write a checkpoint of random weights; equal arguments give equal weights."""
    config = AutoConfig.for_model(recipe.model_type, **{**BASE, **recipe.options})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:  # small, or a tied model only repeats its last token
                parameter.normal_(0.0, 0.15 if not config.tie_word_embeddings else 0.02)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            else:  # biases around 0, norms around what they were
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<s>tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a byte-level BPE tokenizer, no larger than the tiny models' vocabulary, beside a model."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = ["The prefix that two requests share is computed once.", "The answer of the second request is the same."]
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<pad>", "<s>", "</s>"],
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder


class Oracle:
    """The same checkpoint run by transformers alone: eager attention, no cache of any kind."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._likeliest: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def likeliest(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The likeliest token at each place of an answer, in one pass: equal to the answer only if that is greedy."""
        key = tuple(prompt), tuple(answer)
        if key not in self._likeliest:
            logits = self.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
            self._likeliest[key] = logits.argmax(-1).tolist()
        return self._likeliest[key]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation of exactly `num_tokens` tokens; the end token is one like any other."""
        known = self._answers.get(tuple(prompt), [])
        if len(known) < num_tokens:
            generated = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            known = generated[0, len(prompt) :].tolist()
            self._answers[tuple(prompt)] = known
        return known[:num_tokens]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits at every position, [tokens, vocab]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits


class TinyModels:
    """Every recipe's checkpoint, loaded model and oracle, each made once."""

    def __init__(self, root: Path, device: str = "cpu") -> None:
        self._root = root
        self.device = device
        """Where loaded models live; oracles stay on the CPU."""
        self._folders: dict[str, Path] = {}
        self._loaded: dict[tuple[str, str], LoadedModel] = {}
        self._oracles: dict[tuple[str, torch.dtype], Oracle] = {}

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = save_model(self._root / name, RECIPES[name])
        return self._folders[name]

    def folder_with_tokenizer(self, name: str) -> Path:
        """The same weights with a tokenizer and a chat template beside them."""
        folder = self._root / f"{name} with tokenizer"
        if not folder.exists():
            shutil.copytree(self.folder(name), folder)
            save_tokenizer(folder)
        return folder

    def loaded(self, name: str, dtype: Dtype = "float32") -> LoadedModel:
        if (name, dtype) not in self._loaded:
            self._loaded[name, dtype] = load_model(ModelConfig(str(self.folder(name)), dtype=dtype, device=self.device))
        return self._loaded[name, dtype]

    def oracle(self, name: str, dtype: torch.dtype = torch.float32) -> Oracle:
        if (name, dtype) not in self._oracles:
            self._oracles[name, dtype] = Oracle(self.folder(name), dtype)
        return self._oracles[name, dtype]


def in_codes(model: LoadedModel) -> LoadedModel:
    """The same model with KV in codes of eight bits."""
    return replace(model, kv_format=KVFormat(torch.int8))


def build_engine(
    model: LoadedModel,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    state_block_size: int | None = None,
    state_interval: int | None = None,
    keep_all_kv: bool = False,
    holds_tokens: int | None = None,
    enable_prefix_caching: bool = True,
    prefix_index: Literal["radix", "hash"] = "hash",
    deduplicate: bool = False,
    with_ledger: bool = False,
    allows_links: bool = False,
    runner_class: Callable[[LoadedModel, KVStorage], ModelRunner] | None = None,
    make_tiers: Callable[[KVCacheManager, KVStorage], TierDirector] | None = None,
    **scheduler_options: Any,
) -> Engine:
    """An engine over `num_blocks` blocks for each group of layers, put together as `LLM` does it.

    With `holds_tokens`, there are instead just enough for one request of that length, and one more for each group.
    States can be saved behind multiples of `state_block_size` tokens (default: 4, or `block_size` if that is less).
    """
    layout = model.plan_layout(
        LayoutOptions(
            block_size,
            state_block_size or min(4, block_size),
            state_interval,
            model.max_positions,
            keep_all=keep_all_kv,
        )
    )
    groups = None if layout.is_one_full_group else layout.specs
    num_blocks *= len(layout.groups)
    if holds_tokens is not None:
        empty = KVCacheManager(1, groups=layout.specs)
        step = SchedulerConfig(**scheduler_options).max_num_batched_tokens
        num_blocks = empty.max_num_blocks(holds_tokens, step) + len(layout.groups)
    manager = KVCacheManager(
        num_blocks,
        block_size=None if groups else block_size,
        groups=groups,
        enable_prefix_caching=enable_prefix_caching,
        index=None if groups else make_index(prefix_index, num_blocks, block_size),
        ledger=CacheLedger(num_blocks) if with_ledger else None,
        deduplicate=deduplicate,
    )
    storage = KVStorage(layout, num_blocks, model.device)
    config = SchedulerConfig(**scheduler_options)
    held = max(n for n in range(1, model.max_positions + 1) if manager.can_ever_hold(n, config.max_num_batched_tokens))
    limits = ModelLimits(
        model.vocab_size,
        held,
        frozenset(model.eos_token_ids),
        allows_links=allows_links,
        hidden_size=model.hidden_size,
    )
    steps = RunnerLimits(held, config.max_num_seqs)
    runner = runner_class(model, storage) if runner_class else make_runner(model, storage, steps)
    tiers = None if make_tiers is None else make_tiers(manager, storage)
    return Engine(manager, config, runner, limits, tiers=tiers)


def longest_hit(engine: Engine, num_computed: int, length: int) -> int:
    """Tokens of a prompt of `length` that are hit if its first `num_computed` have been computed, none evicted."""
    manager = engine.manager
    if manager.groups == (FullAttentionSpec(manager.block_size),):
        return min(num_computed // manager.block_size * manager.block_size, length - 1)
    alignment = math.lcm(*(group.block_size for group in manager.groups))
    return min(num_computed, length - 1) // alignment * alignment


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """The likeliest `max_tokens` tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def add(engine: Engine, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Queue a prompt given as token ids."""
    return engine.add_request(request_id, Prompt(np.array(token_ids, np.int32)), params)


def drain(engine: Engine) -> None:
    """Step until nothing is left, checking the engine's integrity after every step."""
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()


def complete(
    engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams, *, name: str = "request"
) -> list[RequestOutput]:
    """Run prompts together to their ends."""
    outputs = [add(engine, f"{name}-{number}", prompt, params) for number, prompt in enumerate(prompts)]
    drain(engine)
    return outputs


def random_tokens(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """A prompt without the special tokens."""
    token_ids: list[int] = rng.integers(3, VOCAB_SIZE, num_tokens).tolist()
    return token_ids
