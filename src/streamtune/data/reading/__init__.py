"""Read local files and folders, URLs, and datasets on the Hugging Face Hub as raw rows, each with its file and line.

data_paths (folders, hub) -> sources -> readers (files, cells);  builtin makes rows without a file
"""
