"""Programs that make parts of the documentation from the code."""
