"""Which block holds which prefix: by hash, or by tokens in a radix tree."""
