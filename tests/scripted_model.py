"""A model whose weights are set by hand: it looks at its last token only, and says what a script has for it.

Knows tokenizers and Llama's layers. Calls that a model makes of its own accord come from such a one; random weights
never write any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tiny_models import EOS_TOKEN_ID, RECIPES, Recipe, save_model, save_tokenizer


def save_scripted_model(folder: Path, template: str, script: Mapping[str, str]) -> Path:
    """Write a model that answers `script[marker]` after a prompt that ends with `marker`, and then ends.

    Each marker and each answer is one token of the vocabulary.
    """
    save_tokenizer(folder, chat_template=template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [*script, *script.values()]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer.save_pretrained(folder)
    recipe = RECIPES["llama"]
    save_model(folder, Recipe(recipe.model_type, {**recipe.options, "vocab_size": len(tokenizer)}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    follows: dict[str, str | None] = {**script, **dict.fromkeys(script.values())}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()  # the last hidden state is the embedding of the last token
            elif name.endswith("norm.weight"):
                weight.fill_(1)
        for before, after in follows.items():
            embedding = model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(before)]
            token_id = EOS_TOKEN_ID if after is None else tokenizer.convert_tokens_to_ids(after)
            model.get_output_embeddings().weight[token_id] += 8 * embedding / embedding.norm()
    model.save_pretrained(folder)
    return folder
