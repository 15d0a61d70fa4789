"""LLM: the class for use from Python, and the forms of its users' prompts."""

from foreword.llm.llm import LLM as LLM
