#!/usr/bin/env python3
"""Processes made by each of the standard methods, and an import that each of them repeats."""
import multiprocessing, sys
from helper import square

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, range(5)))
    print(multiprocessing.current_process().name, __file__, sys.argv[1:])
