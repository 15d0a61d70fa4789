"""CPU code in place of modules: packed products, row functions, rotary embedding, layers as programs."""
