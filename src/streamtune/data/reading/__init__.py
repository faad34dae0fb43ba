"""Reading: folders, the hub and files of every format as raw rows, each with the place it came from.

data_paths (folders, hub) -> sources -> readers (files, cells);  builtin makes rows without a file
"""
