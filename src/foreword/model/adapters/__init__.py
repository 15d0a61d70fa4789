"""Adapters (LoRA, arXiv 2106.09685) for foreword's own decoders: read, kept, and added to the rows of a step."""
