"""One typed config: dataclass defaults, then a TOML file, then dotted overrides from the command line.

The resolved config is written with every run as `config.json`. An unknown key is an error that names the nearest known
one; `check` refuses impossible combinations before any work starts.
"""

from turbogr.config.reading import from_dict, load, to_dict
from turbogr.config.rules import RANGES, check
from turbogr.config.settings import (
    BalanceConfig,
    Config,
    DataConfig,
    DenseConfig,
    DeviceConfig,
    EvaluateConfig,
    HstuConfig,
    LogConfig,
    ModelConfig,
    NegativesConfig,
    SasrecConfig,
    SplitConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
)

__all__ = [
    "BalanceConfig",
    "Config",
    "DataConfig",
    "DenseConfig",
    "DeviceConfig",
    "EvaluateConfig",
    "HstuConfig",
    "LogConfig",
    "ModelConfig",
    "NegativesConfig",
    "RANGES",
    "SasrecConfig",
    "SplitConfig",
    "TablesConfig",
    "TaskConfig",
    "TrainConfig",
    "check",
    "from_dict",
    "load",
    "to_dict",
]
