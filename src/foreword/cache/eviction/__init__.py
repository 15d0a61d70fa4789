"""Eviction: the order in which free blocks are given away, and pins that protect blocks."""
