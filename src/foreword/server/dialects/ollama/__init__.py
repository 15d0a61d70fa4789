"""Ollama's API, as far as it reads: chats, texts, and what is served."""
