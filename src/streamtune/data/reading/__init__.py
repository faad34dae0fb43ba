"""Reading: folders, the hub and files of every format as raw rows, each with the place it came from.

places (folders, hub) -> sources -> readers (files, cells);  builtin and passkey make rows without a file
"""
