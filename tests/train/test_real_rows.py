"""Three epochs on the real rows of KuaiRand-Pure (needs TURBOGR_DATA)."""

import os
from pathlib import Path

import pytest

from tests.support.small_run import small_config
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources import open_source
from turbogr.data.split import make_split
from turbogr.data.store import Store
from turbogr.evaluate import RandomScorer, evaluate
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import train

SUBSET = Path(os.environ.get("TURBOGR_DATA", "")) / "kuairand-pure-subset"


@pytest.mark.slow
@pytest.mark.skipif(not SUBSET.exists(), reason="the data folder TURBOGR_DATA has no kuairand-pure-subset")
def test_three_epochs_lower_the_loss_each_and_beat_random_ranking_fivefold(tmp_path: Path) -> None:
    manifest = prepare(open_source("kuairand", SUBSET), tmp_path / "store", PrepareOptions())
    assert (manifest.events, manifest.users, manifest.items) == (228_329, 25_156, 6_361)
    store = Store.open(tmp_path / "store")
    config = small_config(
        store,
        model__dim=32,
        model__max_history=50,
        negatives__count=64,
        train__epochs=3,
        train__batch_users=0,
        train__batch_tokens=4096,
        evaluate__max_users=4000,
    )
    result = train(config, tmp_path / "run")
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "epochs.jsonl")]
    assert losses[0] > losses[1] > losses[2]
    split = make_split(store, config.split)
    random = evaluate(
        {"random": RandomScorer(store.num_items)}, store, split, config=config.evaluate, max_history=50
    ).metrics["random"]
    assert result["last"]["metrics"]["hr@50"] > 5 * random["hr@50"]
    assert result["last"]["metrics"]["mrr"] > 5 * random["mrr"]
