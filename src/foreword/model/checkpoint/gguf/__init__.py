"""GGUF files, in which llama.cpp, Ollama and LM Studio keep models. They are read without llama.cpp; a file with
unknown contents is refused.
"""
