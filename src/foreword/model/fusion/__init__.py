"""Modules, and whole layers, rewritten into fewer and larger operations of equal bits."""
