"""The REST interface keeps to its OpenAPI document, whatever it is sent."""

import secrets

from tests.databases import ENGINES
from tests.fuzz.rest import fuzz
from tests.fuzz.searching import USUAL_S


class TestTheRestInterface:
    def test_answers_as_its_document_says_and_never_fails(self, empty_database, tmp_path, request, monkeypatch):
        for rate in ("READS", "WRITES", "FAILURES"):  # which would turn most of it away
            monkeypatch.setenv(f"TSEMON_LIMIT_{rate}_PER_S", "100000")
        seconds = request.config.getoption("--fuzz-seconds")
        seed = 7 if seconds == USUAL_S else secrets.randbits(31)
        status, said = fuzz(tmp_path, empty_database.url, seconds // len(ENGINES), seed)
        print(said)  # how many cases it was, for who asks pytest for it with -rP
        assert status == 0
