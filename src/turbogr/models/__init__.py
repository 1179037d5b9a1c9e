"""Encoders. A package adds its own by an entry point in the group `turbogr.encoders`: (ModelConfig, seed) -> Module."""

from collections.abc import Callable
from importlib.metadata import entry_points

from torch import nn

from turbogr.config import ModelConfig
from turbogr.errors import ConfigError, did_you_mean
from turbogr.models.hstu import Hstu
from turbogr.models.layers import Encoder, Sequences
from turbogr.models.sasrec import Sasrec

__all__ = ["Encoder", "Sequences", "build_encoder"]

ENCODERS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {"hstu": Hstu, "sasrec": Sasrec}
GROUP = "turbogr.encoders"


def build_encoder(config: ModelConfig, seed: int) -> nn.Module:
    """The encoder that `config.name` names, with initial values that depend on the seed only."""
    if config.name in ENCODERS:
        return ENCODERS[config.name](config, seed)
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if config.name not in plugins:
        known = [*ENCODERS, *plugins]
        raise ConfigError(
            f"no model is named {config.name!r}{did_you_mean(config.name, known)}; known: {', '.join(known)}."
        )
    encoder: nn.Module = plugins[config.name].load()(config, seed)
    return encoder
