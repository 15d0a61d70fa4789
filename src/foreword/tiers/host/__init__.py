"""The host tier: blocks in this machine's memory, below a GPU's."""
