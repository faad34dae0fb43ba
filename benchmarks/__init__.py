"""Measurements that are no command of the product: they need several processes, or two nodes of their own making."""
