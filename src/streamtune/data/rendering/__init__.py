"""Rendering: messages, documents and completions as token ids, and which of the ids are trained.

chat, reasoning, variables -> renderings -> render (pieces for long text);  counts holds what was found on the way
"""
