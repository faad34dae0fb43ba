"""Write a page about one run or several: a single self-contained HTML file."""
