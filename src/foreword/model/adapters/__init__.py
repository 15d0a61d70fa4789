"""Adapters (LoRA, arXiv 2106.09685) beside a written decoder: read, kept, and added to the rows of a step."""
