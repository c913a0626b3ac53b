#!/usr/bin/env python3
"""Ranks make the same directories and files at the same time, and see each other's within a second. Argument: a name of its own."""
import os, sys, time

rank, size = int(os.environ["HPCRT_RANK"]), int(os.environ["HPCRT_SIZE"])
top = os.path.join(os.path.dirname(os.path.abspath(__file__)), sys.argv[1])
for n in range(10):
    here = "%s/%d" % (top, n)
    os.makedirs(here, exist_ok=True)
    os.chdir(here)
    assert os.getcwd() == here
    open("rank%d" % rank, "w").close()
    try:
        os.close(os.open("once", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        assert os.path.exists("once")
os.listdir(top)
# Whole at once: a network file system may remember for seconds that a file was empty.
with open(top + "/part%d" % rank, "w") as f:
    f.write("%f" % time.time())
os.rename(top + "/part%d" % rank, top + "/of%d" % rank)
for other in range(size):
    name = top + "/of%d" % other
    begun = time.time()
    while not os.path.exists(name):
        assert time.time() - begun < 20, name + " never came"
    found = time.time()
    made = float(open(name).read())
    assert found - max(begun, made) < 1, (name, begun, made, found)
    while "of%d" % other not in os.listdir(top):
        assert time.time() - found < 1, "not listed"
print("together")
