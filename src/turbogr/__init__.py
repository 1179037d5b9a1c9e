"""TurboGR: training for generative recommendation.

    model = turbogr.fit(frame, user="user_id", item="item_id", time="ts")
    model.recommend([17], k=10)
    model.save("models/mine");  turbogr.load("models/mine")

The names below are imported when they are first used, so that `import turbogr` does not load torch.
"""

import importlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turbogr.data.prepare import prepare, prepare_frame
    from turbogr.recommend.fit import fit
    from turbogr.recommend.model import Model

    load = Model.load

__all__ = ["Model", "fit", "load", "prepare", "prepare_frame"]

_PLACES = {
    "Model": ("turbogr.recommend.model", "Model"),
    "fit": ("turbogr.recommend.fit", "fit"),
    "load": ("turbogr.recommend.model", "Model.load"),
    "prepare": ("turbogr.data.prepare", "prepare"),
    "prepare_frame": ("turbogr.data.prepare", "prepare_frame"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'turbogr' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return attrgetter(attribute)(importlib.import_module(module))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
