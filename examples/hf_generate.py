"""transformers' `generate` with a cache of its `past_key_values`: each turn computes only its new tokens.

    python examples/hf_generate.py [MODEL]

`PayloadCache` keeps whole `DynamicCache` objects, found by the longest prefix. Without MODEL, foreword's tiny demo
model answers. A `DynamicCache` can be cut only for a MODEL whose layers all attend to all tokens. With the package
foreword-cache alone, import from `foreword_cache`.
"""

import copy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from foreword.cache import PayloadCache

DEMO = Path(__file__).parents[1] / "src" / "foreword" / "demo" / "weights"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else DEMO, dtype=torch.float32).eval()
cache = PayloadCache[DynamicCache](max_bytes=1 << 30, can_cut=True)


def generate(prompt: list[int], max_new_tokens: int = 8) -> tuple[list[int], int]:
    """The new tokens, and the number of prompt tokens that came from the cache."""
    found = cache.find(prompt[:-1])  # without the last token, which must be computed for its logits
    past = copy.deepcopy(found.payload) if found else DynamicCache(config=model.config)
    if found and found.num_tokens < found.num_payload_tokens:
        past.crop(found.num_tokens - found.num_payload_tokens)  # removes this many tokens from the end
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(torch.tensor([prompt]), past_key_values=past, **options)[0].tolist()
    num_bytes = sum(tensor.nbytes for layer in past.layers for tensor in (layer.keys, layer.values))
    cache.put(answer[: past.get_seq_length()], past, num_bytes)  # the last new token has no keys and values yet
    return answer[len(prompt) :], found.num_tokens if found else 0


document = [7 * token % 1000 + 3 for token in range(300)]
for question in ([11, 12, 13], [11, 12, 14], [21, 22]):
    tokens, num_found = generate(document + question)
    follow_up = document + question + tokens + [31, 32]
    again, num_found_again = generate(follow_up)
    fresh = model.generate(
        torch.tensor([follow_up]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert again == fresh[0].tolist()[len(follow_up) :], "the cache changed an answer"
    print(
        f"{num_found} of {len(document + question)} tokens from the cache, then {num_found_again} of {len(follow_up)}"
    )
