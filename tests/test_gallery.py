"""docs/gallery.md tells what the rules say of its runs."""

import re

import pytest
from matplotlib.image import imread

from scripts import gallery
from scripts.gallery import IMAGES, PAIRS, ROOT, Recorded

SECTIONS = re.split(r"^## ", (ROOT / "docs/gallery.md").read_text(), flags=re.MULTILINE)[1:]


def test_has_a_section_for_each_pair():
    assert [re.findall(r"images/gallery-(.+?)\.png", section) for section in SECTIONS] == [[p.name] for p in PAIRS]


@pytest.mark.parametrize(
    ("pair", "section"), list(zip(PAIRS, SECTIONS, strict=True)), ids=[pair.name for pair in PAIRS]
)
class TestAPair:
    def test_fails_with_the_rule_and_at_the_step_of_the_page(self, pair, section):
        [incident] = Recorded(pair.failing).replayed().incidents
        assert f"[{incident.rule}](alerts.md#{incident.rule}) fires at step {incident.step}" in " ".join(
            section.split()
        )

    def test_is_healthy_on_the_right(self, pair, section):
        assert "**Healthy.**" in section
        assert not Recorded(pair.healthy).replayed().incidents


def test_draws_the_picture(tmp_path):
    gallery.draw(PAIRS[0], tmp_path / "picture.png")
    drawn, shown = imread(tmp_path / "picture.png"), imread(IMAGES / f"gallery-{PAIRS[0].name}.png")
    assert drawn.shape == shown.shape
    assert abs(drawn - shown).mean() < 0.01
