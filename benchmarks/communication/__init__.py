"""What ranks send each other in a step: ordinary training, streaming, and chunks that each go backward.

traffic   counts collectives and bytes while it is active
cases     one case on one rank: build, step, count
nodes     two network namespaces joined by a cable: bytes on the wire
tables    which cases, and their rows
page      docs/benchmarks/communication.md and its picture
"""
