"""Prompt modules: parts of prompts, written once and reused.

Prompts and modules are written in PML (prompt markup language).
"""
