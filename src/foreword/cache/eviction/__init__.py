"""Which free block is given away next, and which blocks are kept."""
