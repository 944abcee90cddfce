"""With HF_HYPERATTN_AUTOLOAD=1, registers our names in programs into which no `import hf_hyperattn` can be put.

`hyperattn autoload on` writes a .pth file into site-packages, which calls `register` when Python starts and the
variable is 1. Transformers is not imported then. So a finder on `sys.meta_path` watches imports of the libraries
we build on go by, and imports hf_hyperattn at the end of the outermost one after which `transformers.modeling_utils`
is there.

This runs in every process of the environment: it imports nothing of ours before it is needed, and it never raises.
"""

import importlib
import os
import sys

VARIABLE = "HF_HYPERATTN_AUTOLOAD"
AWAITED = "transformers.modeling_utils"
WATCHED = ("transformers", "peft", "accelerate", "datasets", "evaluate")


def register() -> None:
    """Called when Python starts. Does nothing unless HF_HYPERATTN_AUTOLOAD is 1."""
    try:
        if os.environ.get(VARIABLE) == "1" and not any(
            isinstance(f, _Finder) for f in sys.meta_path
        ):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _complain(error)


class _Finder:
    """Lets the other finders find, and puts a `_Loader` around what they found."""

    depth = 0  # watched modules that are being run inside one another
    loading = False

    def find_spec(self, name, path=None, target=None):
        try:
            if not self.depth:
                self.load_if_ready()  # modules that began before `register` was called have no `_Loader`
            if self.loading or name.partition(".")[0] not in WATCHED:
                return None
            found = (f.find_spec(name, path, target) for f in list(sys.meta_path) if f is not self)
            spec = next((spec for spec in found if spec is not None), None)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, self)
            return spec
        except Exception as error:
            _complain(error)
            return None

    def load_if_ready(self, finished=None):
        """Import hf_hyperattn and leave `sys.meta_path`, unless a watched module other than `finished` is half run."""
        if self.loading or AWAITED not in sys.modules or _half_run(finished):
            return
        self.loading = True
        try:
            importlib.import_module("hf_hyperattn")
        except Exception as error:
            _complain(error)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """The loader of a watched module; the outermost one looks afterwards whether it is our turn."""

    def __init__(self, loader, finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        spec = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._finder.depth += 1
        try:
            self._loader.exec_module(module)
        finally:
            self._finder.depth -= 1
        if not self._finder.depth:
            self._finder.load_if_ready(finished=spec)


def _half_run(finished):
    """Whether an import of a watched module is under way, apart from the one with the spec `finished`."""
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in WATCHED
    ]
    specs = [getattr(module, "__spec__", None) for module in modules]
    return any(getattr(spec, "_initializing", False) for spec in specs if spec is not finished)


def _complain(error):
    try:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{VARIABLE}=1, but hf_hyperattn is not available: {reason}", file=sys.stderr)
    except Exception:
        pass  # no stderr to say it on
