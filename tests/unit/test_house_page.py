"""The page and the picture of the house follow from the code; folders have no circle and no arrow up."""

from tests.helpers.house_page import PAGE, arrows, circles, written
from tests.unit.test_house_rules import LAYERS


def test_no_folder_reaches_itself_and_no_arrow_goes_up():
    found = arrows()
    assert len(found) > 50
    assert circles(found) == []
    assert [(a, b) for a, b in found if LAYERS[a] < LAYERS[b]] == []


def test_circle_is_found():
    assert {"wire", "session"} <= set(circles(arrows() | {("wire", "session")}))


def test_page_is_that_of_this_code():
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run `python -m tests.helpers.house_page`"
