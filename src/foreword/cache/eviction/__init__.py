"""Eviction: the order in which free blocks are taken for new content, and pins that protect blocks."""
