#!/usr/bin/env python3
"""Imports modules of every kind from a directory that it makes (argument), before and after it changes them, and says what it got."""
import compileall, importlib, os, pkgutil, shutil, subprocess, sys, time

top = sys.argv[1]
if len(sys.argv) > 2:
    sys.path.insert(0, top)
    names = ["single", "pack", "pack.inner", "pack.deep.module", "spread.part", "linked", "only", "absent", "pack.absent"]
    for name in names:
        try:
            module = importlib.import_module(name)
            print(name, module.value, os.path.relpath(module.__file__, top), type(module.__spec__.loader).__mro__[-3:-1] != ())
        except ImportError as error:
            print(name, error)
    print(sorted(found.name for found in pkgutil.iter_modules([top])))
    print(pkgutil.get_data("pack", "data.txt"), __import__("inspect").getsource(module := sys.modules["single"]).strip())
    if sys.argv[2] == "made":
        with open(os.path.join(top, "late.py"), "w") as file:
            file.write("value = 'late'\n")
        importlib.invalidate_caches()
        print(importlib.import_module("late").value)
    print([entry for entry in sys.path if "hpcrt" in entry], "hpcrt" in str(sys.modules.get("sitecustomize", "")))
    sys.exit()

shutil.rmtree(top, ignore_errors=True)
for name, text in [("single.py", "1"), ("pack/__init__.py", "2"), ("pack/inner.py", "3"), ("pack/deep/__init__.py", "4"),
                   ("pack/deep/module.py", "5"), ("spread/part.py", "6"), ("only.py", "7"), ("aside/original.py", "8")]:
    path = os.path.join(top, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("value = %s\n" % text)
with open(os.path.join(top, "pack/data.txt"), "w") as file:
    file.write("data")
os.symlink("aside/original.py", os.path.join(top, "linked.py"))
compileall.compile_dir(os.path.join(top, "pack"), quiet=2)
compileall.compile_file(os.path.join(top, "only.py"), quiet=2, legacy=True)
os.remove(os.path.join(top, "only.py"))
run = lambda word: subprocess.run([sys.executable, __file__, top, word], capture_output=True, text=True)
again = lambda word: print(run(word), flush=True)
again("first")
again("made")
with open(os.path.join(top, "single.py"), "w") as file:
    file.write("value = 'changed, and longer'\n")
# What changes within a job is seen some milliseconds later.
until = time.time() + 10
while "and longer" not in run("second").stdout and time.time() < until:
    time.sleep(0.1)
again("second")
