#!/usr/bin/env python3
"""Ranks talk to each other through hpcrt, without MPI: docs/COLLECTIVES.md.

hpcrt exec --hosts 'n[1-4]' -n 8 -- python3 examples/collectives.py
"""
import os
import socket

hpcrt = socket.socket(fileno=int(os.environ["HPCRT_FD"])).makefile("rwb")
rank, size = int(os.environ["HPCRT_RANK"]), int(os.environ["HPCRT_SIZE"])


def call(verb, *items):
    """Sends a request and returns the items of its reply; every member calls the same ones in the same order."""
    hpcrt.write(b"%s %d\n" % (verb.encode(), len(items)) + b"".join(b"%d\n%s" % (len(i), i) for i in items))
    hpcrt.flush()
    status, _, rest = hpcrt.readline().rstrip(b"\n").partition(b" ")
    if status != b"ok":
        raise RuntimeError(f"{verb}: {(status + b' ' + rest).decode()}")
    return [hpcrt.read(int(hpcrt.readline())) for _ in range(int(rest))]


(word,) = call("broadcast", *([b"a word from rank 0"] if rank == 0 else []))
names = call("gather", f"rank {rank} on {os.environ['HPCRT_HOST']}".encode())
(part,) = call("scatter", *([b"part %d" % to for to in range(size)] if rank == 0 else []))
everybody = call("allgather", b"x" * rank)
call("put", b"key-%d" % rank, b"value of %d" % rank)
call("barrier")
(value,) = call("get", b"key-%d" % ((rank + 1) % size))
for name in names:
    print(name.decode())
print(f"{rank}: {word.decode()}, {part.decode()}, {[len(one) for one in everybody]}, {value.decode()}")
