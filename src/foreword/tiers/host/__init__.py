"""The host tier: blocks in this machine's memory, below a pool on a GPU."""
