"""The REST interface keeps to its OpenAPI document, whatever it is sent."""

import secrets

from tests.fuzz.rest import fuzz


class TestTheRestInterface:
    def test_answers_as_its_document_says_and_never_fails(self, empty_database, tmp_path, search, monkeypatch):
        for rate in ("READS", "WRITES", "FAILURES"):  # which would turn most of it away
            monkeypatch.setenv(f"TSEMON_LIMIT_{rate}_PER_S", "100000")
        seed = 7 if search.is_repeatable else secrets.randbits(31)
        status, said = fuzz(tmp_path, empty_database.url, search.seconds // 2, seed)
        print(said)  # how many cases it was, for who asks pytest for it with -rP
        assert status == 0
