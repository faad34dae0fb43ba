"""Render messages, documents and completions to token ids, and find which tokens count in the loss.

chat_variants -> chat -> tokens (long_text for long text) -> render;  counts holds what the user should know about rows
"""
