"""Measurements on the user's machine, each next to the limit it is up against (`minipaged bench`).

`workloads` and `noise` need nothing but the standard library and numpy: `benchmarks/rivals` run them too,
inside the other engines' environments.
"""
