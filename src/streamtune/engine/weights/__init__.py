"""Weights that wait in the machine's memory while they are not used."""
