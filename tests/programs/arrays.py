"""Arrays of argv[1] MB in all: sorted, multiplied, transformed, written and read; prints "right" when they are what they must be."""
import sys
import tempfile

import numpy

n = int(sys.argv[1]) * 1_000_000 // 32
ordered = numpy.arange(n, dtype=numpy.float64)
mixed = ordered * 7919 % n if n % 7919 else ordered[::-1].copy()
back = numpy.sort(mixed)
assert numpy.array_equal(back, ordered), "sorted"
product = ordered * 2 + back
assert product.sum() == 3 * (n - 1) * n / 2 or abs(product.sum() / (1.5 * n * (n - 1)) - 1) < 1e-12, "a sum"
with tempfile.TemporaryFile() as file:
    mixed.tofile(file)
    file.seek(0)
    again = numpy.fromfile(file, dtype=numpy.float64)
assert numpy.array_equal(again, mixed), "what was read"
del again, product
square = ordered[: int(n**0.5) ** 2].reshape(int(n**0.5), -1)
assert numpy.array_equal(square.T.copy().T, square), "turned twice"
assert mixed.astype(numpy.int64).tobytes()[:8] == b"\0" * 8, "bytes"
print("right")
