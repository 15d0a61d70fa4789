"""Chats: conversations to answer and their answers, in one form for all dialects."""
