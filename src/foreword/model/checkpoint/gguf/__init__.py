"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: read without their libraries, never guessed at."""
