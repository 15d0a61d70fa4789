"""GGUF files, in which llama.cpp, Ollama and LM Studio keep models: read without llama.cpp, never guessed at."""
