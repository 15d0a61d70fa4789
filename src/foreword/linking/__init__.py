"""Linking: which tokens of a prompt are copied from their sources, and how well a model answers then."""

from foreword.linking.compare import METHODS, LinkedAnswer, compare_methods
from foreword.linking.explain import LinkExplanation, PartLinks, explain_parts
from foreword.linking.measured import Gate, MeasuredLinks, Rightness
from foreword.linking.methods import Deviations, Method, composition_of, link_parts, with_links

__all__ = [
    "METHODS",
    "Deviations",
    "Gate",
    "LinkExplanation",
    "LinkedAnswer",
    "MeasuredLinks",
    "Method",
    "PartLinks",
    "Rightness",
    "compare_methods",
    "composition_of",
    "explain_parts",
    "link_parts",
    "with_links",
]
