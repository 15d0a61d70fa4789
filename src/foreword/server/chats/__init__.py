"""Chats: conversations to answer and their answers, in a form that belongs to no dialect."""
