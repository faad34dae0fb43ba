"""Render messages, documents and completions to token ids, and find which of the ids are trained.

chat_variants -> chat -> tokens (long_text for long text) -> render;  counts holds the findings about the rows
"""
