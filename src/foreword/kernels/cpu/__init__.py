"""Attention on CPUs: the plan of a call, and the workers that carry it out."""
