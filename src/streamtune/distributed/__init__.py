"""Several ranks: started, watched and ended together. Importing it loads no torch."""
