"""One room per mechanism. Importing this package imports every room, and each room registers itself."""

import importlib
import pkgutil

for _room in pkgutil.iter_modules(__path__):
    if _room.ispkg:
        importlib.import_module(f"{__name__}.{_room.name}")
