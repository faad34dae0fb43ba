"""What ranks send each other in a step: ordinary training, streaming, and chunks that each go backward.

cases       one case on one rank: build, step, count
tables      the cases, their rows, and two nodes for bytes on the wire
__main__    docs/benchmarks/communication.md and its picture
"""
