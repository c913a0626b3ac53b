#!/usr/bin/env python3
"""What new processes see of a library that somebody replaces: a line before, one after the file named in the argument is there."""
import os, subprocess, sys, time

here = os.path.dirname(os.path.abspath(__file__))
run = lambda: subprocess.run([here + "/origin"], capture_output=True, text=True).stdout.split()[0]
print(run(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print(run(), flush=True)
