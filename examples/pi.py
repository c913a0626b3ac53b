"""Computes pi by parts: every rank sums its share of an integral and prints it.

    hpcrt exec --hosts 'node[1-4]' --agent local -n 8 --label -- python3 examples/pi.py

The ranks do not communicate: the parts add up to pi (try `| awk '{sum += $NF} END {print sum}'`).
"""

import os
import sys

rank = int(os.environ.get("HPCRT_RANK", "0"))
size = int(os.environ.get("HPCRT_SIZE", "1"))
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000

width = 1.0 / steps
part = sum(4.0 / (1.0 + ((i + 0.5) * width) ** 2) for i in range(rank, steps, size)) * width
print(f"part {rank + 1} of {size}: {part:.12f}", flush=True)
