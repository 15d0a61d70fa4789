"""llama.cpp through llama-cpp-python, in a process of its own; runs under the interpreter of its own environment.

The driver writes the checkpoint as a bfloat16 GGUF beside it, with the `gguf` package. It keeps sequences as
llama.cpp's server keeps its slots: a prompt takes the free slot with which it shares most tokens. If it shares more
with a slot that another prompt of the call took, it copies that slot's cells, which costs no memory. All tokens that a
call has to compute go into common batches.
"""

from __future__ import annotations

import ctypes
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Options, serve

BATCH_TOKENS = 2048
MIN_CELLS = 4096


class LlamaCppDriver:
    version = api.__version__

    def __init__(self, options: Options) -> None:
        path = Path(options.model)
        if path.suffix != ".gguf":
            path /= "model.bf16.gguf"
        if not path.exists():
            write_gguf(Path(options.model), path)
        api.llama_backend_init()
        if options.weights == "Q4_0":
            path = quantized(path)
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        params = api.llama_context_default_params()
        params.n_ctx = max(MIN_CELLS, 4 * options.max_model_len)
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = options.max_num_seqs
        params.kv_unified = True
        if options.kv == "q8_0":  # as -ctk q8_0 -ctv q8_0; quantized values need flash attention
            params.type_k = params.type_v = api.GGML_TYPE_Q8_0
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_threads = params.n_threads_batch = options.num_threads
        self._context = api.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._slots: list[list[int]] = [[] for _ in range(options.max_num_seqs)]
        self._chains: list[Any] = []
        self._lookup = LlamaPromptLookupDecoding() if options.drafts else None

    def reset(self) -> None:
        api.llama_memory_clear(self._memory, True)
        self._slots = [[] for _ in self._slots]

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[list[int]]:
        self._chains = self._samplers(sampling or {})
        slots = self._assign(prompts)
        work = [
            (slot, position, prompt[position], position == len(prompt) - 1)
            for slot, prompt in zip(slots, prompts, strict=True)
            for position in range(len(self._slots[slot]), len(prompt))
        ]
        for slot, prompt in zip(slots, prompts, strict=True):
            self._slots[slot] = list(prompt)
        latest = self._decode(work)
        if self._lookup is not None and len(prompts) == 1 and not sampling:
            return [self._with_lookup(slots[0], latest[slots[0]], num_tokens)]
        answers = {slot: [latest[slot]] for slot in slots}
        for _ in range(num_tokens - 1):
            work = [(slot, len(self._slots[slot]), latest[slot], True) for slot in slots]
            for slot in slots:
                self._slots[slot].append(latest[slot])
            latest = self._decode(work)
            for slot in slots:
                answers[slot].append(latest[slot])
        return [answers[slot] for slot in slots]

    def _samplers(self, sampling: dict[str, float]) -> list[Any]:
        """A sampler chain for each slot, in llama.cpp's order: top_k, top_p, temperature, a draw."""
        for chain in self._chains:
            api.llama_sampler_free(chain)
        chains: list[Any] = []
        for slot in range(len(self._slots)) if sampling else ():
            chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
            if "top_k" in sampling:
                api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(int(sampling["top_k"])))
            if "top_p" in sampling:
                api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(sampling["top_p"], 1))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(sampling["temperature"]))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(slot))
            chains.append(chain)
        return chains

    def _with_lookup(self, slot: int, first: int, num_tokens: int) -> list[int]:
        """The answer to one prompt. Each step checks the tokens that followed the last tokens earlier in the text."""
        assert self._lookup is not None
        answer, known = [first], self._slots[slot]
        while len(answer) < num_tokens:
            text = np.array([*known, answer[-1]], np.intc)
            drafts = self._lookup(text)[: num_tokens - len(answer) - 1].tolist()
            row = [answer[-1], *drafts]
            found = self._decode([(slot, len(known) + at, token, True) for at, token in enumerate(row)], by_row=True)
            right = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, found.values(), strict=False))
            )
            known += row[: right + 1]
            api.llama_memory_seq_rm(self._memory, slot, len(known), -1)
            answer += [found[at] for at in range(right + 1)]
        return answer

    def _assign(self, prompts: list[list[int]]) -> list[int]:
        """A slot for each prompt, which holds the prompt's cached tokens and nothing else."""
        before = [list(slot) for slot in self._slots]
        free = set(range(len(self._slots)))
        chosen: list[int] = []
        copies: list[tuple[int, int, int]] = []
        for prompt in prompts:
            shared = [min(shared_length(slot, prompt), len(prompt) - 1) for slot in before]
            best = max(range(len(before)), key=lambda slot: shared[slot])
            # Among free slots that share equally much, takes the one that holds least, so that long contexts stay.
            own = max(free, key=lambda slot: (shared[slot], -len(before[slot])))
            if shared[own] < shared[best]:
                copies.append((best, own, shared[best]))
            free.remove(own)
            chosen.append(own)
            self._slots[own] = prompt[: max(shared[own], shared[best])]
        targets = {target for _, target, _ in copies}
        for source, target, length in copies:
            assert source not in targets, "a slot is overwritten before it is copied"
            api.llama_memory_seq_rm(self._memory, target, 0, -1)
            api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        for slot in chosen:
            api.llama_memory_seq_rm(self._memory, slot, len(self._slots[slot]), -1)
        return chosen

    def _decode(self, work: list[tuple[int, int, int, bool]], *, by_row: bool = False) -> dict[int, int]:
        """Computes (slot, position, token, whether its next token is needed). Returns the likeliest next tokens by
        slot, or by place in `work`, which then has to fit into one batch.
        """
        found: dict[int, int] = {}
        batch = self._batch
        for start in range(0, len(work), BATCH_TOKENS):
            part = work[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for row, (slot, position, token_id, wanted) in enumerate(part):
                batch.token[row], batch.pos[row], batch.logits[row] = token_id, position, wanted
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
            code = api.llama_decode(self._context, batch)
            assert code == 0, f"llama_decode answered {code}"
            for row, (slot, _, _, wanted) in enumerate(part):
                if wanted and self._chains:  # a chain for each slot, as in llama.cpp's server
                    found[slot] = api.llama_sampler_sample(self._chains[slot], self._context, row)
                elif wanted:
                    logits = api.llama_get_logits_ith(self._context, row)
                    array = np.ctypeslib.as_array(
                        ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)
                    )
                    found[row if by_row else slot] = int(array.argmax())
        return found


def quantized(path: Path) -> Path:
    """The GGUF with 4-bit weights, beside the one that is given."""
    target = path.with_suffix(".Q4_0.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype = api.LLAMA_FTYPE_MOSTLY_Q4_0
    code = api.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params))
    assert code == 0, f"llama_model_quantize answered {code}"
    return target


def shared_length(left: list[int], right: list[int]) -> int:
    """The number of tokens that two sequences share at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


# ----------------------------------------------------------------------------------------------- GGUF

TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, target: Path) -> None:
    """The bfloat16 Qwen2 checkpoint in `folder` with the same weights as GGUF: matrices bfloat16, vectors float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in read_bfloat16(folder / "model.safetensors").items():
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE_LAYERS:
        return f"{OUTSIDE_LAYERS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{TENSORS[part]}.{kind}"


def read_bfloat16(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as the bits of their bfloat16 numbers."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8:start]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            first, last = entry["data_offsets"]
            tensors[name] = data[start + first : start + last].view(np.uint16).reshape(entry["shape"])
    return tensors


if __name__ == "__main__":
    serve(LlamaCppDriver)
