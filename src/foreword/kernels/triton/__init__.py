"""Attention on GPUs, written in Triton."""
