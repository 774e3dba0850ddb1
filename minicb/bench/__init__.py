"""The tables of bench.py and what they measure with."""
