"""Keys that identify a block's content: a hash chain over token ids and extra keys."""
