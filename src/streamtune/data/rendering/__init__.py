"""Rendering: messages, documents and completions as token ids, and which of the ids are trained.

renderings -> chat -> tokens (long_text for long text) -> render;  counts holds what was found on the way
"""
