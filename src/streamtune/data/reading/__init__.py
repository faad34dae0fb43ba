"""Read folders, datasets on the hub and files of every format as raw rows, each with its place in the source.

data_paths (folders, hub) -> sources -> readers (files, cells);  builtin makes rows without a file
"""
