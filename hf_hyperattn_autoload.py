"""Register attention names in programs that cannot import hf_hyperattn themselves.

`hyperattn autoload on` writes a .pth file into site-packages. With HF_HYPERATTN_AUTOLOAD=1, that
file calls `register` when Python starts. Transformers is not imported at that time, so a finder on
`sys.meta_path` watches the imports of the libraries below. When the outermost of them is finished
and `transformers.modeling_utils` is loaded, it imports hf_hyperattn.

This code runs in every process of the environment. It imports nothing of ours before it is needed,
and it never raises.
"""

import importlib
import os
import sys

#: Environment variable that turns the registration on.
VARIABLE = "HF_HYPERATTN_AUTOLOAD"
#: Module that hf_hyperattn patches, so it must be loaded first.
AWAITED = "transformers.modeling_utils"
#: Libraries that hf_hyperattn imports; importing it while one is half loaded would fail.
WATCHED = ("transformers", "peft", "accelerate", "datasets", "evaluate")


def register() -> None:
    """Install the finder if HF_HYPERATTN_AUTOLOAD is 1; called when Python starts."""
    try:
        # Some Pythons run .pth files twice.
        is_installed = any(isinstance(finder, _Finder) for finder in sys.meta_path)
        if os.environ.get(VARIABLE) == "1" and not is_installed:
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _report_error(error)


class _Finder:
    """Let the other finders search, and wrap the loader of watched modules."""

    depth = 0  # nesting of watched modules that are being executed
    loading = False  # whether hf_hyperattn is being imported or was imported

    def find_spec(self, name, path=None, target=None):
        try:
            # Modules whose import began before `register` have no `_Loader` that would report their
            # end.
            if not self.depth:
                self.load_if_ready()
            if self.loading or name.partition(".")[0] not in WATCHED:
                return None
            found = (f.find_spec(name, path, target) for f in list(sys.meta_path) if f is not self)
            spec = next((spec for spec in found if spec is not None), None)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, self)
            return spec
        except Exception as error:
            _report_error(error)
            return None

    def load_if_ready(self, finished=None):
        """Import hf_hyperattn and stop watching, if all watched imports are finished.

        Args:
            finished: Spec of a module that has just been executed but is still marked as
                initializing.
        """
        if self.loading or AWAITED not in sys.modules or _is_import_unfinished(finished):
            return
        self.loading = True
        try:
            importlib.import_module("hf_hyperattn")
        except Exception as error:
            _report_error(error)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Wrap the loader of a watched module, and check for readiness afterwards."""

    def __init__(self, loader, finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # Modules must see their own loader, for example to find resources.
        spec = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._finder.depth += 1
        try:
            self._loader.exec_module(module)
        finally:
            self._finder.depth -= 1
        # Only the outermost import is safe: inner modules are used before their parents are
        # complete.
        if not self._finder.depth:
            self._finder.load_if_ready(finished=spec)


def _is_import_unfinished(finished):
    """Return whether a watched module other than `finished` is half imported."""
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in WATCHED
    ]
    specs = [getattr(module, "__spec__", None) for module in modules]
    return any(getattr(spec, "_initializing", False) for spec in specs if spec is not finished)


def _report_error(error):
    try:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{VARIABLE}=1, but hf_hyperattn is not available: {reason}", file=sys.stderr)
    except Exception:
        pass  # there is no stderr, for example in a windowed program
