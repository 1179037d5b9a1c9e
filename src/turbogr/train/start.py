"""What is settled and refused before a run's first step: settings, store, folder, and that all ranks agree on them."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from turbogr.config import Config, check, to_dict
from turbogr.data.store import Store
from turbogr.device import pick_device, supports_bf16
from turbogr.errors import ConfigError, UserError, did_you_mean
from turbogr.evaluate import METRICS
from turbogr.files import said_where, sha256
from turbogr.models import build_encoder
from turbogr.negatives.sampler import ensure_enough_items
from turbogr.ranks import Ranks
from turbogr.train.metrics import ensure_sinks


def check_run(config: Config) -> None:
    """Refuse what can be trained on no store, in one sentence."""
    check(config)
    wanted = config.train.select_by
    if wanted not in METRICS:
        known = ", ".join(METRICS)
        raise ConfigError(f"train.select_by {wanted!r} is not a metric{did_you_mean(wanted, METRICS)}: {known} are.")
    ensure_sinks(config)
    device = pick_device(config.device.name)
    if config.train.precision == "bf16" and not supports_bf16(device):
        raise ConfigError(f"train.precision bf16 is not supported by this {device.type}: take fp32.")
    with torch.device("meta"):
        build_encoder(config.model, config.train.seed)  # names an unknown model


def preflight(config: Config) -> Store:
    """Refuse what cannot be trained before any work starts; answers the store."""
    check_run(config)
    if not config.data.store:
        raise ConfigError("data.store is empty: say which prepared store to train on (--data.store stores/NAME).")
    store = Store.open(config.data.store)
    ensure_enough_items(config.negatives, store.num_items)
    return store


def settled(config: Config, saved: dict[str, Any]) -> Config:
    """What a run chose by itself when it began, and goes on with when it is resumed."""
    if config.device.gemm == "auto":
        # sums depend on the library in the last bit
        config = with_gemm(config, saved["device"]["gemm"])
    # steps are made up of as many batches, whatever the number of ranks is now
    return with_batches(config, config.balance.batches or saved["balance"]["batches"])


def ensure_same_everywhere(ranks: Ranks, config: Config, store: Store, found: Path | None) -> None:
    """Refuse ranks that would train on different things, naming the first that differs from rank 0."""
    facts = {
        "reads another store": sha256(store.path / "manifest.json"),
        "has other settings": json.dumps(to_dict(config), sort_keys=True),
        "sees another newest checkpoint": found.name if found else "none",
    }
    for what, own in facts.items():
        said = ranks.texts(own)
        other = next((rank for rank, words in enumerate(said) if words != said[0]), None)
        if other is not None:
            raise UserError(
                f"rank {other} {what} than rank 0: start every rank with the same command, on a store and in a folder "
                "that all machines share or hold alike."
            )


def ensure_shared(ranks: Ranks, folder: Path) -> None:
    """Refuse a run folder that is not the same for all ranks: each writes its part of a checkpoint there."""
    if ranks.alone:
        return
    probe = ""
    with ranks.agreed():
        if ranks.first:
            with said_where(folder):
                folder.absolute().parent.mkdir(parents=True, exist_ok=True)
                probe = tempfile.mkdtemp(prefix=".turbogr-", dir=folder.absolute().parent)
    probe = ranks.texts(probe)[0]
    seen = ranks.texts("yes" if Path(probe).is_dir() else "no")
    if ranks.first:
        Path(probe).rmdir()
    if "no" in seen:
        raise UserError(
            f"rank {seen.index('no')} does not see the folder that rank 0 writes to: put --out on a disk that all "
            "machines share."
        )


def with_gemm(config: Config, library: Literal["auto", "mkl", "onednn"]) -> Config:
    """The config with another `device.gemm`."""
    return replace(config, device=replace(config.device, gemm=library))


def with_batches(config: Config, batches: int) -> Config:
    """The config with another `balance.batches`."""
    return replace(config, balance=replace(config.balance, batches=batches))
