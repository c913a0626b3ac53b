"""Finds and reads modules on shared file systems through the node's agent (see sitecustomize.py beside this). What the agent does not
know is found as ever: every answer may be "no"."""
import _socket
import os
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec, SourceFileLoader,
    SourcelessFileLoader,
)
from importlib._bootstrap_external import cache_from_source

here = os.path.dirname(os.path.abspath(__file__))
store = os.path.dirname(here)
with open(os.path.join(here, "shared"), "rb") as lines:
    shared = tuple(os.fsdecode(line) + "/" for line in lines.read().split(b"\0") if line)


def ask(kind, *parts):
    """The parts of the agent's answer; none when there is no answer."""
    try:
        door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            door.settimeout(90)
            door.connect(os.path.join(store, "door"))
            door.send(kind + b"\0".join(os.fsencode(part) for part in parts))
            answer = door.recv(8192)
        finally:
            door.close()
    except OSError:
        return []
    return [os.fsdecode(part) for part in answer.split(b"\0")[:-1]]


def staged(path):
    """Where the content of a file is to be read."""
    answer = ask(b"f", path) if path.startswith(shared) else []
    return answer[0] if answer and answer[0] else path


class Listing:
    """The names in a directory: files, directories, and what may be either."""

    def __init__(self, path):
        self.mtime = None
        answer = ask(b"l", path)
        if answer and answer[0]:
            try:
                with open(answer[0], "rb") as file:
                    mtime, *names = os.fsdecode(file.read()).split("\0")
                self.mtime, self.names = int(mtime), dict((name[1:], name[0]) for name in names)
            except (OSError, ValueError):
                pass

    def has(self, name, kind, path):
        found = self.names.get(name)
        if found == "?":
            return (os.path.isdir if kind == "d" else os.path.isfile)(os.path.join(path, name))
        return found == kind


class Loader(SourceFileLoader):
    """Reads source and bytecode from the store; everything else is the original's."""

    def path_stats(self, path):
        self.compiled = None
        try:
            bytecode = cache_from_source(path)
        except NotImplementedError:
            bytecode = path
        answer = ask(b"m", path, bytecode)
        if len(answer) < 2 or not answer[0]:
            return super().path_stats(path)
        seconds, size = answer[0].split()
        self.compiled = bytecode, answer[1]
        return {"mtime": int(seconds), "size": int(size)}

    def get_data(self, path):
        bytecode, place = getattr(self, "compiled", None) or (None, None)
        if path == bytecode and not place:
            raise FileNotFoundError(path)
        if path != bytecode:
            place = staged(path)
        with open(place, "rb") as file:
            return file.read()


class Compiled(SourcelessFileLoader):
    def get_data(self, path):
        with open(staged(path), "rb") as file:
            return file.read()


details = (ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES), (Compiled, BYTECODE_SUFFIXES)


class Finder(FileFinder):
    """Looks names up in the agent's listing, and goes to the directory when that has changed since."""

    def listing(self):
        found = self.__dict__.get("_listing")
        if found is None:
            found = self._listing = Listing(self.path)
        return found

    def invalidate_caches(self):
        self._listing = None
        super().invalidate_caches()

    def find_spec(self, fullname, target=None):
        listing = self.listing()
        if listing.mtime is None:
            return super().find_spec(fullname, target)
        tail = fullname.rpartition(".")[2]
        base = os.path.join(self.path, tail)
        is_directory = listing.has(tail, "d", self.path)
        if is_directory:
            inner = Listing(base)
            if inner.mtime is None:
                return super().find_spec(fullname, target)
            for suffix, loader in self._loaders:
                if inner.has("__init__" + suffix, "f", base):
                    return self._get_spec(loader, fullname, os.path.join(base, "__init__" + suffix), [base], target)
        for suffix, loader in self._loaders:
            if listing.has(tail + suffix, "f", self.path):
                return self._get_spec(loader, fullname, base + suffix, None, target)
        try:
            if os.stat(self.path).st_mtime_ns != listing.mtime:
                return super().find_spec(fullname, target)
        except OSError:
            return None
        if is_directory:
            spec = ModuleSpec(fullname, None)
            spec.submodule_search_locations = [base]
            return spec
        return None


def hook(path):
    if not (path + "/").startswith(shared) or not os.path.isdir(path):
        raise ImportError("not on a shared file system", path=path)
    return Finder(path, *details)


if shared:
    sys.path_hooks.insert(0, hook)
    for entry in [entry for entry in sys.path_importer_cache if entry.startswith(shared)]:
        del sys.path_importer_cache[entry]
