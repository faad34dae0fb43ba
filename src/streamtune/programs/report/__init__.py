"""Write HTML reports about training runs, each as one self-contained file."""
