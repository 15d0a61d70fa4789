"""Ollama's API, without the calls that change models: chats, texts, embeddings, and lists of models."""
