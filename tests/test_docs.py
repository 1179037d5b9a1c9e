"""What the docs name exists, and the table of tests leaves nothing out."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

from turbogr.cli import VERBS
from turbogr.config import SplitConfig
from turbogr.data.sources import SOURCES

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "tests.md").read_text())
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


def test_every_verb_source_and_protocol_has_a_row() -> None:
    rows = re.findall(r"^\| ([^|]*) \| `", (ROOT / "docs" / "tests.md").read_text(), re.MULTILINE)
    promised = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    protocols = get_args(get_type_hints(SplitConfig)["protocol"])
    assert len(VERBS) > 5 and len(SOURCES) > 3 and len(protocols) > 2
    assert not {*VERBS, *SOURCES, *protocols} - promised


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 10
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
