"""The examples in the docstrings of the public operators do what they show."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import turbogr.ops
import turbogr.ops.embedding

FUNCTIONS = {
    "dropout.dropout",
    "embedding.lookup.embedding_lookup",
    "embedding.rows.distinct",
    "embedding.rows.merge_rows",
    "embedding.update.rowwise_adagrad",
    "fuxi_attention.fuxi_attention",
    "hstu_attention.hstu_attention",
    "hstu_layer.hstu_layer",
    "philox.random_words",
    "position_input.position_input",
    "sampled_softmax.sampled_softmax",
    "softmax_attention.softmax_attention",
}
"""What must have an example, under turbogr.ops."""


def modules() -> list[str]:
    """Every operator's package, and the modules of `embedding`, among which its functions are spread."""
    operators = [f"turbogr.ops.{found.name}" for found in pkgutil.iter_modules(turbogr.ops.__path__) if found.ispkg]
    parts = [
        f"turbogr.ops.embedding.{found.name}"
        for found in pkgutil.iter_modules(turbogr.ops.embedding.__path__)
        if found.name != "triton"  # imports Triton, which is not everywhere, and holds kernels alone
    ]
    return operators + parts


def examples() -> list[doctest.DocTest]:
    found = []
    for name in modules():
        module = importlib.import_module(name)
        known = {"torch": torch} | {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found += doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=known)
    return [one for one in found if one.examples]


EXAMPLES = examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.name)
def test_an_example_answers_what_it_shows(example: doctest.DocTest) -> None:
    """Catches: an example that no longer runs, or whose answer is another one."""
    told: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert result.attempted == len(example.examples) and not result.failed, "".join(told)


def test_the_examples_are_found() -> None:
    """Catches: a search that finds none, or not all, and so passes."""
    assert len(EXAMPLES) >= len(FUNCTIONS) >= 8
    missing = {f"turbogr.ops.{name}" for name in FUNCTIONS} - {one.name for one in EXAMPLES}
    assert not missing
