"""Linking: which tokens of a prompt are copied from their sources, and how well a model answers then."""

from foreword.linking.measured import Agreement, Gate, MeasuredLinks
from foreword.linking.methods import Method, composition_of, link_parts, with_links

__all__ = ["Agreement", "Gate", "MeasuredLinks", "Method", "composition_of", "link_parts", "with_links"]
