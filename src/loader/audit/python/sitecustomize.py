"""Put in front of PYTHONPATH by hpcrt: modules on shared file systems are found and read through the node's agent. This directory leaves
sys.path at once, and the user's own sitecustomize follows."""
import sys


def _run():
    import os
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        if sys.version_info >= (3, 8):
            import hpcrt_finder
    except Exception:
        # Without it modules are found as ever.
        pass
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]


# Held, because Python 2 empties a module that nobody holds.
_own = sys.modules.pop(__name__)
_run()
try:
    import sitecustomize
except ImportError as _error:
    if getattr(_error, "name", __name__) not in (None, __name__):
        raise
finally:
    # The import system wants one, and nobody is to see this one.
    sys.modules.setdefault(__name__, type(sys)(__name__))
