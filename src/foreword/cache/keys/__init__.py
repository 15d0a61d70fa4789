"""What identifies a block's content: a hash chain over token ids, and what else keeps contents apart."""
